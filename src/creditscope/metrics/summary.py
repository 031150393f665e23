"""From values per example, or per seed, or per layer, to one number with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from creditscope.errors import UsageError
from creditscope.metrics.scale import growth, lower_median


class Estimate(NamedTuple):
    """A statistic, the ends of its interval, and the number of values that it rests on."""

    value: Tensor
    low: Tensor
    high: Tensor
    n: Tensor


class Resampling:
    """Bootstrap over n examples: one set of multinomial weights, drawn once and shared by all statistics.

    Means and functions of means get BCa intervals (Efron, *Better bootstrap confidence intervals*, JASA 1987), which
    correct the percentiles for bias and skewness, do not depend on the scale that a ratio is expressed in, and never
    leave the values that the statistic can take. At n = 200 plain percentiles miss a log-normal's mean on its heavy
    side five times as often as on the other. Intervals are conditional on everything but the choice of examples.

    NaN values are left out, and n is what remains; a value or interval of nothing is NaN, and so is the interval where
    the value is not finite or fewer than two are left.

    >>> import torch
    >>> resampling = Resampling(200, generator=torch.Generator().manual_seed(0))
    >>> values = torch.randn(200, generator=torch.Generator().manual_seed(1))
    >>> value, low, high, n = resampling.mean(values)
    >>> bool(low < value < high), n
    (True, tensor(200))
    """

    def __init__(self, n: int, draws: int = 1000, *, generator: torch.Generator, level: float = 0.95):
        self.n, self.draws, self.level = n, draws, level
        chosen = torch.randint(n, (draws, n), generator=generator, device=generator.device)
        weights = torch.zeros(draws, n, dtype=torch.float64, device=generator.device)
        self.weights = weights.scatter_add_(1, chosen, torch.ones_like(weights))

    def mean(self, values: Tensor) -> Estimate:
        """Return the mean over the last axis, (..., n) -> (...), with its BCa interval."""
        return self.pooled(values.unsqueeze(-1), lambda means: means[..., 0])

    def median(self, values: Tensor) -> Estimate:
        """Return the lower median over the last axis, (..., n) -> (...), with the interval of the sign test.

        Order statistics r and n + 1 - r, r the largest rank with P(Binomial(n, ½) < r) ≤ (1 - level)/2: the coverage
        is exact for every continuous distribution, and what percentiles of a bootstrap approach with many draws.
        """
        values = self._own(values)
        n = (~values.isnan()).sum(dim=-1)
        rank = n.cpu().clone().apply_(lambda count: sign_test_rank(count, self.level)).to(n.device)
        ordered = values.sort(dim=-1).values  # NaN last
        ends = (_pick(ordered, rank - 1), _pick(ordered, n - rank))
        low, high = (torch.where(rank > 0, end, math.nan) for end in ends)
        return Estimate(lower_median(values), low, high, n)

    def median_ratio(self, above: Tensor, below: Tensor) -> Estimate:
        """Return the ratio of two lower medians over the same examples (growth), with percentiles of the bootstrap.

        An example that is NaN in either is left out of both.
        """
        above, below = self._own(above), self._own(below)
        missing = above.isnan() | below.isnan()
        above, below = (t.masked_fill(missing, math.nan) for t in (above, below))
        drawn = self._medians(above) / self._medians(below)
        tail = (1 - self.level) / 2
        low, high = _quantiles(drawn, drawn.new_tensor([tail, 1 - tail]).expand(*drawn.shape[:-1], 2)).unbind(-1)
        return _estimate(growth(above, below), low, high, (~missing).sum(dim=-1))

    def pooled(self, terms: Tensor, function: Callable[[Tensor], Tensor]) -> Estimate:
        """Return a function of the means of terms, (..., n, k) -> (...), with its BCa interval.

        ``function`` maps (..., k) to (...), row by row and differentiably: ``pooled_ratio`` of ``pooled_terms``,
        ``pearson`` of ``rho_terms``, ``ratio`` of two. The acceleration is that of the linearised statistic.
        """
        terms = self._own(terms, axis=-2)
        valid = ~terms.isnan().any(dim=-1)
        terms, n = terms.masked_fill(~valid.unsqueeze(-1), 0), valid.sum(dim=-1)
        drawn = function(self._weighted(terms) / self._weighted(valid.double().unsqueeze(-1)))
        with torch.enable_grad():
            means = (terms.sum(dim=-2) / n.unsqueeze(-1)).requires_grad_()
            value = function(means)
            (slope,) = torch.autograd.grad(value.sum(), means)
        value, means = value.detach(), means.detach()
        influence = ((terms - means.unsqueeze(-2)) @ slope.unsqueeze(-1)).squeeze(-1) * valid
        low, high = bca(drawn, value, influence, self.level)
        return _estimate(value, low, high, n)

    def _own(self, values: Tensor, axis: int = -1) -> Tensor:
        if values.shape[axis] != self.n:
            raise UsageError(f"this resampling is over {self.n} examples; {values.shape[axis]} values were given")
        return values.detach().double().to(self.weights.device)

    def _weighted(self, terms: Tensor) -> Tensor:
        """Return the sums over examples under each draw, (..., n, k) -> (..., draws, k), in one product."""
        flat = terms.movedim(-2, 0)
        return (self.weights @ flat.flatten(1)).reshape(-1, *flat.shape[1:]).movedim(0, -2)

    def _medians(self, values: Tensor) -> Tensor:
        """Return the lower median of each draw, (..., n) -> (..., draws); a row at a time, to bound the memory."""
        return torch.stack([self._row_medians(row) for row in values.flatten(0, -2)]).reshape(*values.shape[:-1], -1)

    def _row_medians(self, row: Tensor) -> Tensor:
        order = row.argsort()[: int((~row.isnan()).sum())]  # NaN stands last
        if not len(order):
            return row.new_full((self.draws,), math.nan)
        counts = self.weights[:, order].cumsum(dim=1)
        size = counts[:, -1:]
        at = torch.searchsorted(counts, size / 2)  # the first to have half of the draw at or below it
        return torch.where(size > 0, row[order][at], math.nan).squeeze(1)


def _estimate(value: Tensor, low: Tensor, high: Tensor, n: Tensor) -> Estimate:
    known = value.isfinite() & (n > 1)
    return Estimate(value, torch.where(known, low, math.nan), torch.where(known, high, math.nan), n)


def _pick(ordered: Tensor, rank: Tensor) -> Tensor:
    return ordered.gather(-1, rank.clamp(0, ordered.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


def ratio(means: Tensor) -> Tensor:
    """m₀/m₁ over the last axis, (..., 2) -> (...), for :meth:`Resampling.pooled`: e.g. the efficiency of nudging.

    >>> import torch
    >>> ratio(torch.tensor([1.0, 4.0]))
    tensor(0.2500)
    """
    return means[..., 0] / means[..., 1]


def bca(drawn: Tensor, value: Tensor, influence: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Return the ends of the BCa interval from draws (..., D), the value (...) and its influence values (..., n).

    Percentiles at Φ(z₀ + (z₀ + z)/(1 - â(z₀ + z))), z = ±Φ⁻¹((1 + level)/2): the bias z₀ = Φ⁻¹(share of draws below
    the value, ties by half), the acceleration â = Σu³ / 6(Σu²)^1.5 of the influence values u. Efron (1987), eq. 2.3
    and 6.6. Draws that are NaN are left out.

    >>> import torch
    >>> low, high = bca(torch.arange(1001.0), torch.tensor(500.0), torch.zeros(4))
    >>> round(float(low), 2), round(float(high), 2)
    (25.0, 975.0)
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    bias, acceleration = _bias(drawn, value).unsqueeze(-1), _acceleration(influence).unsqueeze(-1)
    shifted = bias + drawn.new_tensor([-z, z])
    share = torch.special.ndtr(bias + shifted / (1 - acceleration * shifted))
    low, high = _quantiles(drawn, share).unbind(-1)
    return low, high


def _bias(drawn: Tensor, value: Tensor) -> Tensor:
    """z₀, held to what this number of draws can tell."""
    below, same = drawn < value.unsqueeze(-1), drawn == value.unsqueeze(-1)
    count = (~drawn.isnan()).sum(dim=-1)
    share = (below.sum(dim=-1) + same.sum(dim=-1) / 2) / count
    return torch.special.ndtri(share.clamp(1 / (count + 1), count / (count + 1)))


def _acceleration(influence: Tensor) -> Tensor:
    """Σu³ / 6(Σu²)^1.5, which is 0 where nothing varies."""
    u = influence / influence.abs().amax(dim=-1, keepdim=True)
    return (u.pow(3).sum(dim=-1) / (6 * u.square().sum(dim=-1).pow(1.5))).nan_to_num(nan=0)


def _quantiles(drawn: Tensor, share: Tensor) -> Tensor:
    """Return the quantiles of the draws (..., D) at shares (..., 2) of their own, between neighbours linearly."""
    ordered = drawn.sort(dim=-1).values  # NaN last
    last = (~drawn.isnan()).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    at = share.nan_to_num(nan=0.5) * last
    lower, upper = (ordered.gather(-1, index.long()) for index in (at.floor(), at.ceil()))
    return torch.lerp(lower, upper, at - at.floor())


@lru_cache(maxsize=256)
def sign_test_rank(n: int, level: float = 0.95) -> int:
    """Return the largest r with P(Binomial(n, ½) < r) ≤ (1 - level)/2; 0 where even r = 1 is too large (n < 6 at .95).

    >>> sign_test_rank(200), sign_test_rank(6), sign_test_rank(5)
    (86, 1, 0)
    """
    k = torch.arange(n + 1, dtype=torch.float64)
    whole = torch.tensor(n + 1.0, dtype=torch.float64)
    log_mass = whole.lgamma() - (k + 1).lgamma() - (whole - k).lgamma() - n * math.log(2)
    return int((log_mass.exp().cumsum(0) <= (1 - level) / 2).sum())


def share(flags: Tensor, level: float = 0.95) -> Estimate:
    """Return the share of true flags over the last axis, (..., n) -> (...), with Wilson's interval.

    (Wilson, *Probable inference, the law of succession, and statistical inference*, 1927.) A bootstrap of no event in n
    would say that there never is one.

    >>> import torch
    >>> share(torch.zeros(100, dtype=torch.bool)).high
    tensor(0.0370, dtype=torch.float64)
    """
    count, p = flags.shape[-1], flags.double().mean(dim=-1)
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = (p * (1 - p) * z2 / count + z2**2 / (4 * count**2)).sqrt() / (1 + z2 / count)
    low, high = (middle - half).clamp(0, 1), (middle + half).clamp(0, 1)
    return Estimate(p, low, high, torch.full_like(p, count, dtype=torch.long))


def student_t(values: Tensor, level: float = 0.95) -> Estimate:
    """Mean over seeds, the last axis, ± t · s/√n, with s of ddof 1 and Student's t of n - 1 degrees of freedom.

    NaN values are left out, and n is what remains; the interval is NaN where fewer than two are left. Not to be mixed
    with intervals over examples: those say nothing about another seed.

    >>> import torch
    >>> value, low, high, n = student_t(torch.tensor([0.30, 0.31, 0.32]))
    >>> print(f"{value:.2f} [{low:.3f}, {high:.3f}] n = {n}")
    0.31 [0.285, 0.335] n = 3
    """
    values = values.detach().double()
    known = ~values.isnan()
    n, mean = known.sum(dim=-1), values.nanmean(dim=-1)
    squares = (values - mean.unsqueeze(-1)).square().nansum(dim=-1)
    factor = n.cpu().double().apply_(lambda count: t_quantile((1 + level) / 2, int(count) - 1)).to(values.device)
    half = factor * (squares / (n - 1).clamp(min=1) / n).sqrt()
    return Estimate(mean, mean - half, mean + half, n)


def t_quantile(p: float, dof: int) -> float:
    """Return the quantile of Student's t at a probability p in (0, 1), for whole degrees of freedom; NaN for none.

    By halving in θ = atan(t/√dof), in which the distribution function is a finite sum of powers of cosines
    (Abramowitz & Stegun, 26.7.3 and 26.7.4).

    >>> round(t_quantile(0.975, 2), 4), round(t_quantile(0.975, 30), 4)
    (4.3027, 2.0423)
    """
    if not 0 < p < 1:
        raise UsageError(f"a quantile is asked for at a probability between 0 and 1, not {p}")
    if dof < 1:
        return math.nan
    if p < 0.5:
        return -t_quantile(1 - p, dof)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, dof) < 2 * p - 1 else (low, middle)
    return math.sqrt(dof) * math.tan((low + high) / 2)


def _within(angle: float, dof: int) -> float:
    """P(|T| < √dof tan(angle)): A & S 26.7.3 for an odd, 26.7.4 for an even number of degrees of freedom."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, dof, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def participation_ratio(values: Tensor) -> Tensor:
    """(Σv)² / Σv² of the positive values over the last axis: how many layers share them, from 1 to L.

    Negative values count as 0: a layer whose credit points the wrong way takes no part in an alignment, and as a square
    it would. NaN layers (not measured) are left out; NaN where none is positive.

    >>> import torch
    >>> participation_ratio(torch.tensor([[0.016, 0.072, -0.085, 0.997], [0.4, 0.4, 0.4, 0.4]]))
    tensor([1.1779, 4.0000], dtype=torch.float64)
    """
    v = _positive_parts(values)
    return v.sum(dim=-1).square() / v.square().sum(dim=-1)


def best_share(values: Tensor) -> Tensor:
    """max v / Σv of the positive values over the last axis: the share of the best layer, from 1/L to 1.

    What a mean over layers hides: block-level feedback alignment's mean cosine of 1/L is its last block alone. Negative
    values count as 0, as in :func:`participation_ratio`. NaN where none is positive.

    >>> import torch
    >>> best_share(torch.tensor([0.016, 0.072, -0.085, 0.997]))
    tensor(0.9189, dtype=torch.float64)
    """
    v = _positive_parts(values)
    return v.amax(dim=-1) / v.sum(dim=-1)


def _positive_parts(values: Tensor) -> Tensor:
    """max(v, 0), in units of the largest so that no square underflows; NaN as 0."""
    v = values.detach().double().nan_to_num(nan=0).clamp(min=0)
    return v / v.amax(dim=-1, keepdim=True)
