"""What a credit says a change of the state would do to the loss, against what it does: ρ and nudging.

A *tail* is the loss per example as a function of the state: ``tail(h) -> (n·B,)`` for h of n·B rows, n copies of the
batch one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from creditscope.errors import UsageError
from creditscope.metrics._rows import common_magnitude, quotient, rows, unit

Tail = Callable[[Tensor], Tensor]


class Probe(NamedTuple):
    """Predicted and true changes of the loss: (credits, M, B) and (M, B)."""

    predicted: Tensor
    actual: Tensor


class Resolution(NamedTuple):
    """How far changes of the loss stand above its rounding.

    ``share``: of the changes, those above rounding. ``ratio``: RMS of the changes over RMS of the rounding.
    ``resolved``: whether the ratio is at least 10, so that rounding lowers a correlation by less than 1 %.
    """

    share: Tensor
    ratio: Tensor
    resolved: Tensor


def directions(
    shape: Sequence[int],
    count: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw Gaussian vectors of unit norm for each example, (count, *shape): uniform on the sphere.

    Drawn one after the other, so that ``count`` at once are the same as in parts; in float32, which is several times
    faster, and normalised in ``dtype``, so that each precision gets the same directions. Unit: that of the state.

    >>> import torch
    >>> v = directions((2, 3, 4), 5, torch.Generator().manual_seed(0))
    >>> v.shape, v.flatten(2).norm(dim=2).allclose(torch.ones(5, 2, dtype=torch.float64))
    (torch.Size([5, 2, 3, 4]), True)
    """
    drawn = [
        torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float32) for _ in range(count)
    ]
    v = torch.cat(drawn).to(device or generator.device, dtype).reshape(count * shape[0], -1)
    return v.div_(torch.linalg.vector_norm(v, dim=1, keepdim=True)).reshape(count, *shape)


def loss_changes(tail: Tail, h: Tensor, steps: Tensor, *, chunk: int = 4096, base: Tensor | None = None) -> Tensor:
    """tail(h + step) - tail(h) for each step and example, (M, B), from steps (M, B, ...). Unit: that of the loss.

    At most ``chunk`` rows run at a time, but never less than one copy of the batch. The tail runs in the precision of
    h, to which the steps are rounded. ``base`` is tail(h) where it is known already. NaN where a loss or step is.

    >>> import torch
    >>> h = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    >>> loss_changes(lambda h: h.square().sum(1) / 2, h, torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([[1.5000],
            [2.5000]], dtype=torch.float64)
    """
    with torch.no_grad():
        base = losses_of(tail, h) if base is None else base
        parts = [
            losses_of(tail, (h + part.to(h.dtype)).flatten(0, 1)).reshape(part.shape[:2])
            for part in steps.split(max(1, chunk // h.shape[0]))
        ]
    return torch.cat(parts).double() - base.double()


def losses_of(tail: Tail, h: Tensor) -> Tensor:
    """Return tail(h), which has to be one loss per row.

    >>> import torch
    >>> losses_of(lambda h: h.sum(1), torch.ones(2, 3))
    tensor([3., 3.])
    """
    losses = tail(h)
    if losses.shape != h.shape[:1]:
        raise UsageError(f"a tail gives one loss per row: {h.shape[0]} rows gave shape {tuple(losses.shape)}")
    return losses


def probe(
    tail: Tail,
    h: Tensor,
    credits: Sequence[Tensor],
    generator: torch.Generator,
    *,
    count: int = 32,
    epsilon: float = 1e-3,
    chunk: int = 4096,
    base: Tensor | None = None,
) -> Probe:
    """Predict and measure the change of the loss along ``count`` random directions: ⟨a, εv⟩ and tail(h + εv) - tail(h).

    All credits are asked about the same directions, and no more than ``chunk`` rows of them exist at a time. Runs in
    the precision of h: float64 unless a published float32 figure is repeated. Unit: that of the loss.

    >>> import torch
    >>> h = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    >>> predicted, actual = probe(lambda h: h.square().sum(1) / 2, h, [h, -h], torch.Generator().manual_seed(0))
    >>> predicted.shape, actual.shape, round(float(rho(predicted[1], actual)), 4)
    (torch.Size([2, 32, 2]), torch.Size([32, 2]), -1.0)
    """
    base = losses_of(tail, h).detach() if base is None else base
    predicted, actual = [], []
    for v in direction_parts(h, count, generator, chunk):
        actual.append(loss_changes(tail, h, epsilon * v, chunk=chunk, base=base))
        predicted.append(torch.stack([epsilon * inner(v, a) for a in credits]))
    return Probe(torch.cat(predicted, dim=1), torch.cat(actual))


def direction_parts(h: Tensor, count: int, generator: torch.Generator, chunk: int) -> Iterator[Tensor]:
    """Yield ``count`` directions for a state in parts of at most ``chunk`` rows, and at least one direction.

    >>> import torch
    >>> [len(v) for v in direction_parts(torch.zeros(2, 3), 5, torch.Generator(), chunk=4)]
    [2, 2, 1]
    """
    size = max(1, chunk // h.shape[0])
    for start in range(0, count, size):
        yield directions(h.shape, min(size, count - start), generator, dtype=h.dtype, device=h.device)


def inner(v: Tensor, a: Tensor) -> Tensor:
    """⟨a, v⟩ for each direction and example, (M, B), from v (M, B, ...) and a (B, ...).

    >>> import torch
    >>> inner(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[3.0, 4.0]])).squeeze(1)
    tensor([3., 4.], dtype=torch.float64)
    """
    a = rows(a)
    return torch.einsum("mbd,bd->mb", v.double().reshape(len(v), *a.shape), a)


def rho(predicted: Tensor, actual: Tensor) -> Tensor:
    """Pearson's correlation over all pairs of predicted and true changes of the loss, a scalar.

    The perturbation correlation of Hao, Wan & Zhai (arXiv 2606.21126), over examples × directions; its limit is
    :func:`~creditscope.metrics.alignment.pooled_cosine`. They return 0 where there is no spread; here that is NaN, as
    is a change that is not finite. Unit: none, in [-1, 1].

    >>> import torch
    >>> round(float(rho(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]]))), 4)
    1.0
    >>> rho(torch.zeros(3, 2), torch.randn(3, 2, generator=torch.Generator().manual_seed(0)))
    tensor(nan, dtype=torch.float64)
    """
    if predicted.shape != actual.shape:
        raise UsageError(
            f"predicted and actual changes differ in shape: {tuple(predicted.shape)} and {tuple(actual.shape)}"
        )
    x, y = centred(predicted), centred(actual)
    return (x * y).sum().div(((x * x).sum() * (y * y).sum()).sqrt()).clamp(-1, 1)


def centred(t: Tensor) -> Tensor:
    """Subtract the mean of all, at a safe magnitude; values that are all the same give exact zeros.

    >>> import torch
    >>> centred(torch.full((3,), 0.1))
    tensor([0., 0., 0.], dtype=torch.float64)
    """
    x = t.detach().double()
    x = x / common_magnitude(x)
    x = x - x.flatten()[:1]  # without this, rounding of the mean of equal values would pass for spread
    x = x - x.mean()
    return x / common_magnitude(x)


def rho_terms(predicted: Tensor, actual: Tensor) -> Tensor:
    """(M, Σp, Σq, Σp², Σq², Σpq) per example over its directions, (B, 6), p and q in a unit common to the call.

    :func:`pearson` of their sum or mean over examples is ρ, so that it can be bootstrapped by example (its directions
    belong together). NaN for an example that has a value which is not finite.

    >>> import torch
    >>> p = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> round(float(pearson(rho_terms(p, 2 * p + 1).mean(0))), 4)
    1.0
    """
    finite = (predicted.isfinite() & actual.isfinite()).all(dim=0)
    p, q = torch.full_like(predicted.double(), math.nan), torch.full_like(actual.double(), math.nan)
    p[:, finite], q[:, finite] = centred(predicted[:, finite]), centred(actual[:, finite])
    count = torch.where(finite, float(len(p)), math.nan).double()
    return torch.stack([count, p.sum(0), q.sum(0), (p * p).sum(0), (q * q).sum(0), (p * q).sum(0)], dim=1)


def pearson(terms: Tensor) -> Tensor:
    """Pearson's correlation from the sums or means of its six terms over the last axis, (..., 6) -> (...).

    NaN where there is no spread.

    >>> import torch
    >>> pearson(torch.tensor([2.0, 0.0, 0.0, 2.0, 8.0, 2.0]))
    tensor(0.5000)
    """
    p, q, pp, qq, pq = (terms[..., 1:] / terms[..., :1]).unbind(-1)
    var_p, var_q = spread(p, pp), spread(q, qq)
    return ((pq - p * q) / (var_p.sqrt() * var_q.sqrt())).clamp(-1, 1)


def spread(first: Tensor, second: Tensor) -> Tensor:
    """E x² - (E x)², NaN where it is nothing but rounding of the two.

    >>> import torch
    >>> spread(torch.tensor(2.0), torch.tensor(5.0)), spread(torch.tensor(2.0), torch.tensor(4.0))
    (tensor(1.), tensor(nan))
    """
    variance = second - first.square()
    return torch.where(variance > 64 * torch.finfo(second.dtype).eps * second, variance, math.nan)


def rho_resolution(changes: Tensor, losses: Tensor, dtype: torch.dtype = torch.float64) -> Resolution:
    """Say whether changes of the loss (M, B) stand above the rounding of the losses (B,) computed in ``dtype``.

    Rounding is taken as eps(dtype) · max(|ℓ|, 1): a loss below 1 is a difference of numbers of order 1 (the logits, the
    log of a sum of order 1), and is no better than they are. Noise of relative size 1/ratio lowers a correlation by
    the factor 1/√(1 + 1/ratio²); a mean over many changes is dominated by the largest, and so is this ratio. Changes
    below resolution make ρ noise around 0, which is no finding (finite differences at ε = 1e-3 in float32, when the
    change is below 1e-7 of the loss). Unit: none. NaN where nothing is finite.

    >>> import torch
    >>> changes, losses = torch.tensor([[1e-9, 1e-6]], dtype=torch.float64), torch.tensor([2.0, 2.0])
    >>> rho_resolution(changes, losses).resolved, rho_resolution(changes, losses, torch.float32).resolved
    (tensor(True), tensor(False))
    """
    rounding = torch.finfo(dtype).eps * losses.detach().double().abs().clamp(min=1)
    rounding = rounding.expand_as(changes)
    finite = changes.isfinite() & rounding.isfinite()
    sizes, floor = changes.detach().double()[finite].abs(), rounding[finite]
    ratio = quotient(root_mean_square(sizes), root_mean_square(floor))
    return Resolution((sizes > floor).double().mean(), ratio, ratio >= 10)


def root_mean_square(values: Tensor) -> Tensor:
    """√(mean of squares) of all values, a scalar; NaN of none.

    >>> import torch
    >>> root_mean_square(torch.tensor([3e-200, 4e-200], dtype=torch.float64))
    tensor(3.5355e-200, dtype=torch.float64)
    """
    scale = common_magnitude(values)
    return (values / scale).square().mean().sqrt() * scale


def nudge_steps(a: Tensor, eta: float) -> Tensor:
    """-η a / RMS(a) per example, shaped like a: a step down the credit, of length η√d whatever the credit's norm.

    The nudging test of Hao, Wan & Zhai (arXiv 2606.21126) with η in {.001, .003, .01}; for small η the loss changes by
    -η √d cos(a, g) ‖g‖. Unit: that of the state. NaN where a is zero, which has no direction, or not finite.

    >>> import torch
    >>> nudge_steps(torch.tensor([[3e-30, -3e-30], [0.0, 0.0]]), 0.01)
    tensor([[-0.0100,  0.0100],
            [    nan,     nan]], dtype=torch.float64)
    """
    x = rows(a)
    return (-eta * math.sqrt(x.shape[1]) * unit(x)).reshape(a.shape)
