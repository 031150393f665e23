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
from creditscope.metrics._rows import magnitude
from creditscope.metrics.scale import growth, lower_median


class Estimate(NamedTuple):
    """A statistic, the ends of its interval, and the number of values that it rests on."""

    value: Tensor
    low: Tensor
    high: Tensor
    n: Tensor


class Resampling:
    """Bootstrap over n examples: one set of multinomial weights, drawn once and shared by all statistics.

    Means and functions of means get studentised intervals (bootstrap-t), which correct for skewness: at n = 200 they
    cover a log-normal's mean, and pooled cosines of credits whose norms vary, in about 94 % of cases (BCa intervals: in
    92 to 93 %). Intervals are conditional on everything but the choice of examples.

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
        """Return the mean over the last axis, (..., n) -> (...), with its studentised interval."""
        values = self._own(values)
        scale = magnitude(values.nan_to_num(nan=0).reshape(-1, self.n)).reshape(
            values.shape[:-1]
        )  # no square may underflow
        value, low, high, n = self.pooled((values / scale.unsqueeze(-1)).unsqueeze(-1), lambda means: means[..., 0])
        return Estimate(scale * value, scale * low, scale * high, n)

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
        low, high = _quantile(drawn, tail), _quantile(drawn, 1 - tail)
        return _estimate(growth(above, below), low, high, (~missing).sum(dim=-1))

    def pooled(self, terms: Tensor, function: Callable[[Tensor], Tensor]) -> Estimate:
        """Return a function of the means of terms, (..., n, k) -> (...), with its studentised interval.

        ``function`` maps (..., k) to (...), row by row and differentiably: ``pooled_ratio`` of ``pooled_terms``,
        ``pearson`` of ``rho_terms``, ``ratio`` of two. Standard errors are those of the linearised statistic. The
        squares of the terms must not underflow.
        """
        terms = self._own(terms, axis=-2)
        valid = (~terms.isnan().any(dim=-1, keepdim=True)).double()
        n = valid.sum(dim=-2)
        means = torch.where(valid > 0, terms, 0).sum(dim=-2) / n
        centred = torch.where(valid > 0, terms - means.unsqueeze(-2), 0)
        size = self._weighted(valid)
        shift = self._weighted(centred) / size
        covariance = self._weighted(_outer(centred)) / size - _outer(shift)
        drawn, errors = _linearised(function, means.unsqueeze(-2) + shift, covariance / size)
        value, error = _linearised(function, means, _outer(centred).sum(dim=-2) / n**2)
        low, high = studentised(value, error, drawn, errors, self.level)
        return _estimate(value, low, high, n.squeeze(-1).long())

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
        return torch.stack([self._row_medians(row) for row in values.reshape(-1, self.n)]).reshape(
            *values.shape[:-1], -1
        )

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
    low, high = torch.minimum(low, value), torch.maximum(high, value)  # equal values differ by rounding in the draws
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


def studentised(
    value: Tensor, error: Tensor, drawn: Tensor, errors: Tensor, level: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return the ends of the bootstrap-t interval of a value (...) and its standard error, from draws (..., D) of both.

    [θ - t₁₋ₐ s, θ - tₐ s] with tₐ the quantiles of (θ* - θ)/s*: Efron (*The jackknife, the bootstrap and other
    resampling plans*, 1982, ch. 10.10); second-order right on both sides (Hall, *Annals of Statistics* 16, 1988). The
    ends are held between the least and the greatest draw, so that they never leave the values that the statistic can
    take, also where some draws have no spread at all. Draws that are NaN are left out.

    >>> import torch
    >>> drawn = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    >>> low, high = studentised(torch.tensor(0.0), torch.tensor(1.0), drawn, torch.ones(1001))
    >>> round(float(low), 2), round(float(high), 2)
    (-2.85, 2.85)
    """
    moved = drawn - value.unsqueeze(-1)
    t = torch.where(moved == 0, moved, moved / errors)
    tail = (1 - level) / 2
    upper, lower = (error * _quantile(t, share) for share in (tail, 1 - tail))
    least, greatest = _quantile(drawn, 0.0), _quantile(drawn, 1.0)
    return torch.fmax(value - lower, least), torch.fmin(value - upper, greatest)


def _linearised(function: Callable[[Tensor], Tensor], means: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(m) and its standard error √(∇f' C ∇f) by the delta method, C (..., k²) the covariance of the means."""
    with torch.enable_grad():
        means = means.detach().requires_grad_()
        value = function(means)
        (slope,) = torch.autograd.grad(value.sum(), means)
    return value.detach(), (_outer(slope) * covariance).sum(dim=-1).clamp(min=0).sqrt()


def _outer(x: Tensor) -> Tensor:
    """Return all products of two of the last axis, (..., k) -> (..., k²)."""
    return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


def _quantile(drawn: Tensor, share: float) -> Tensor:
    """Return a quantile over the last axis, between neighbours linearly; NaN left out."""
    ordered = drawn.sort(dim=-1).values  # NaN last
    at = share * ((~drawn.isnan()).sum(dim=-1, keepdim=True).clamp(min=1) - 1).double()
    lower, upper = (ordered.gather(-1, index.long()) for index in (at.floor(), at.ceil()))
    between = torch.where(lower == upper, lower, torch.lerp(lower, upper, at - at.floor()))  # equal infinities stay
    return between.squeeze(-1)


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
