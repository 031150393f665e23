"""Whether the reference can be believed: its precision, its stability, and whether it is the gradient at all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from creditscope.errors import UsageError
from creditscope.metrics._rows import paired_rows, quotient, rows, unit
from creditscope.metrics.causal import (
    Resolution,
    Tail,
    direction_parts,
    inner,
    loss_changes,
    losses_of,
    rho,
    rho_resolution,
)
from creditscope.metrics.scale import norm


class Agreement(NamedTuple):
    """ρ of a gradient with finite differences, and whether these stand above the rounding of the loss."""

    rho: Tensor
    resolution: Resolution


def relative_error(approx: Tensor, exact: Tensor) -> Tensor:
    """‖approx - exact‖ / ‖exact‖ per example, (B,): of a gradient in float32 against float64, about 1e-7 to 1e-6.

    Unit: none. NaN where exact is zero or either is not finite.

    >>> import torch
    >>> relative_error(torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]]))
    tensor([0.1000], dtype=torch.float64)
    """
    x, y = paired_rows(approx, exact)
    return quotient(norm(x - y), norm(y))


def angle(approx: Tensor, exact: Tensor) -> Tensor:
    """Return the angle between the two per example, (B,), in radians: 2 atan2(‖u - v‖, ‖u + v‖) of the unit vectors.

    Right also for angles far below 1e-8, where the arc cosine of a cosine gives nothing but rounding (Kahan, *How
    futile are mindless assessments of roundoff in floating-point computation?*, 2006). NaN where either is zero or not
    finite.

    >>> import torch
    >>> angle(torch.tensor([[1.0, 1e-12], [0.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([1.0000e-12, 1.5708e+00], dtype=torch.float64)
    """
    u, v = (unit(x) for x in paired_rows(approx, exact))
    return 2 * torch.atan2(norm(u - v), norm(u + v))


def cross_batch_stability(batch_gradients: Tensor) -> Tensor:
    """Return the mean cosine over pairs of batch-averaged gradients, a scalar, from (K, B, ...): K batches of B.

    Diagnostic (c) of Hao, Wan & Zhai (arXiv 2606.21126), with K ≥ 8 disjoint batches of 128 at state L/2: 0.05 to
    0.20 in a healthy network, near 0 for noise, above 0.5 where one direction is common to all. Unit: none. NaN where
    an average is zero or not finite.

    >>> import torch
    >>> cross_batch_stability(torch.tensor([[[1.0, 0.0], [3.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]))
    tensor(0.7071, dtype=torch.float64)
    """
    count = batch_gradients.shape[0]
    if count < 2:
        raise UsageError(f"the stability across batches compares pairs of batches; {count} was given")
    u = unit(rows(batch_gradients.detach().double().mean(dim=1)))
    return (u @ u.mT).triu(1).sum() / (count * (count - 1) / 2)


def finite_difference_agreement(
    tail: Tail,
    h: Tensor,
    reference: Tensor,
    generator: torch.Generator,
    *,
    count: int = 8,
    step: float = 1e-5,
    chunk: int = 4096,
) -> Agreement:
    """ρ between ⟨g, v⟩ and the central differences (tail(h + sv) - tail(h - sv)) / 2s, s = step · ‖h‖ per example.

    Beyond .99 for every gradient that is one; a layer whose own backward returns a rule's signal is found so. In
    float64, with a step near its best, eps^(1/3) of the state's norm (Press et al., *Numerical Recipes*, 5.7), so that
    it holds also where the state has exploded. Unit: none. NaN where either has no spread or is not finite; where the
    differences are below resolution, ρ is noise and says nothing about the gradient.

    >>> import torch
    >>> h = torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.float64)
    >>> generator = torch.Generator().manual_seed(0)
    >>> round(float(finite_difference_agreement(lambda h: h.sin().sum(1), h, h.cos(), generator).rho), 4)
    1.0
    """
    h = h.detach().double()
    base = losses_of(tail, h).detach()
    sizes = norm(h)
    distance = step * torch.where(sizes > 0, sizes, 1.0)
    predicted, differences = [], []
    for v in direction_parts(h, count, generator, chunk):
        offsets = v * distance.reshape(-1, *[1] * (h.ndim - 1))
        up, down = (loss_changes(tail, h, sign * offsets, chunk=chunk, base=base) for sign in (1, -1))
        predicted.append(inner(v, reference))
        differences.append(up - down)
    changes = torch.cat(differences)
    return Agreement(rho(torch.cat(predicted), changes / (2 * distance)), rho_resolution(changes, base))
