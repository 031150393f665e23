"""How well a credit a points along the reference g: per example, and pooled over examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from creditscope.metrics._rows import common_magnitude, dot, magnitude, paired_rows, peak, quotient
from creditscope.metrics.scale import norm


def cosine(a: Tensor, g: Tensor) -> Tensor:
    """⟨a, g⟩ / (‖a‖ ‖g‖) per example, (B,), without a clamp: right at every norm from 1e-300 to 1e300.

    Each example is first divided by (a power of two next to) its largest entry, so that no square under- or
    overflows. Unit: none, in [-1, 1]. NaN where either is exactly zero (no direction) or not finite.

    >>> import torch
    >>> tiny = torch.tensor([[3e-200, 4e-200], [0.0, 0.0]], dtype=torch.float64)
    >>> cosine(tiny, torch.tensor([[4.0, 3.0], [1.0, 0.0]]))
    tensor([0.9600,    nan], dtype=torch.float64)
    """
    x, y = paired_rows(a, g)
    x, y = x / magnitude(x), y / magnitude(y)
    return (dot(x, y) / (dot(x, x) * dot(y, y)).sqrt()).clamp(-1, 1)  # the clamp removes rounding alone


def cosine_clamped(a: Tensor, g: Tensor, *, batch: int = 128, eps: float = 1e-8) -> Tensor:
    """What papers print, (B,): torch's cosine in float32, on the reference of the mean-reduced loss, g/batch.

    ⟨a, g/batch⟩ / (max(‖a‖, eps) max(‖g/batch‖, eps)): below eps the value shrinks with the norm, whatever the
    direction (at ‖g‖ = 3e-7 and batch 128, cos(g, g) reads .23). Unit: none. A zero reads 0, as it does in print.

    >>> import torch
    >>> g = torch.tensor([[3e-7, 0.0]])
    >>> cosine_clamped(torch.tensor([[2.0, 0.0]]), g), cosine_clamped(torch.tensor([[2.0, 0.0]]), g, batch=1)
    (tensor([0.2344], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    x, y = paired_rows(a, g)
    return functional.cosine_similarity(x.float(), (y / batch).float(), dim=1, eps=eps).double()


def is_clamped(a: Tensor, g: Tensor, *, batch: int = 128, eps: float = 1e-8) -> Tensor:
    """Whether the clamp of :func:`cosine_clamped` touches an example, (B,) bool: ‖a‖ < eps or ‖g‖/batch < eps.

    A zero is clamped; what is not finite is not.

    >>> import torch
    >>> is_clamped(torch.ones(2, 1), torch.tensor([[1e-6], [1e-5]]))
    tensor([ True, False])
    """
    return (norm(a) < eps) | (norm(g) / batch < eps)


def norm_ratio(a: Tensor, g: Tensor) -> Tensor:
    """‖a‖ / ‖g‖ per example, (B,). Unit: none. NaN where g is zero or either is not finite; 0 where only a is zero.

    >>> import torch
    >>> g = torch.tensor([[3e-200, 4e-200]], dtype=torch.float64)
    >>> norm_ratio(2 * g, g)
    tensor([2.], dtype=torch.float64)
    """
    x, y = paired_rows(a, g)
    return quotient(norm(x), norm(y))


def sign_agreement(a: Tensor, g: Tensor) -> Tensor:
    """Share of entries with the same sign per example, (B,), among those where both are non-zero; chance is 1/2.

    Entries where either is exactly zero (units that are off) neither agree nor disagree and are left out. The
    condition for learning that Liao, Leibo & Poggio (2016) study. Unit: none, in [0, 1]. NaN where no entry is left or
    one is not finite.

    >>> import torch
    >>> sign_agreement(torch.tensor([[1.0, -2.0, 3.0, 0.0]]), torch.tensor([[5.0, 1.0, 1.0, 1.0]]))
    tensor([0.6667], dtype=torch.float64)
    """
    x, y = paired_rows(a, g)
    signs = x.sign() * y.sign()
    agreeing, counted = (signs > 0).sum(dim=1).double(), (signs != 0).sum(dim=1).double()
    finite = (x.isfinite() & y.isfinite()).all(dim=1)
    return torch.where(finite, quotient(agreeing, counted), math.nan)


def pooled_terms(a: Tensor, g: Tensor) -> Tensor:
    """(⟨a, g⟩, ‖a‖², ‖g‖²) per example, (B, 3), in units of the largest entries of all a and of all g.

    :func:`pooled_ratio` of their sum, or mean, is the pooled cosine, so that it can be bootstrapped. The unit is
    common to one call: terms of two calls do not add up. NaN for an example that is not finite.

    >>> import torch
    >>> pooled_ratio(pooled_terms(torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])).mean(0))
    tensor(0.5000, dtype=torch.float64)
    """
    x, y = paired_rows(a, g)
    peaks = peak(x), peak(y)
    x, y = (t / common_magnitude(largest) for t, largest in zip((x, y), peaks, strict=True))
    terms = torch.stack([dot(x, y), dot(x, x), dot(y, y)], dim=1)
    return torch.where(peaks[0].isfinite() & peaks[1].isfinite(), terms, math.nan)


def pooled_ratio(terms: Tensor) -> Tensor:
    """s₀ / √(s₁ s₂) over the last axis, (..., 3) -> (...): a pooled cosine from the sums or means of its terms.

    NaN where s₁ or s₂ is zero.

    >>> import torch
    >>> pooled_ratio(torch.tensor([1.0, 4.0, 1.0]))
    tensor(0.5000)
    """
    return (terms[..., 0] / (terms[..., 1].sqrt() * terms[..., 2].sqrt())).clamp(-1, 1)


def pooled_cosine(a: Tensor, g: Tensor) -> Tensor:
    """Σ⟨a, g⟩ / √(Σ‖a‖² Σ‖g‖²) over examples, a scalar: the cosine of the whole batch as one vector.

    The limit of the perturbation correlation ρ for small steps and many directions: for v uniform on the sphere in d
    dimensions, E⟨a, v⟩⟨g, v⟩ = ⟨a, g⟩/d and E⟨a, v⟩ = 0. Unlike a mean of cosines it weighs examples by their norms.
    Unit: none, in [-1, 1]. NaN where all a or all g are zero, or one example is not finite.

    >>> import torch
    >>> g = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> pooled_cosine(torch.tensor([[1.0, 0.0], [0.0, -3.0]]), g)
    tensor(-0.8000, dtype=torch.float64)
    """
    return pooled_ratio(pooled_terms(a, g).sum(dim=0))
