"""Self-calibration: credits whose readings are known by theory, measured on the user's own network and data.

Each is read by the very functions that the audit uses, and must read as it should, to six standard errors or to a
stated bias, before anything is said about the user's credit; what fails makes the verdict "cannot judge".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from creditscope.auditing import measure, nulls
from creditscope.auditing.bench import Bench
from creditscope.metrics._rows import rows, unit
from creditscope.metrics.scale import norm

NOISE_RATIOS = (0.5, 1.0, 2.0)
ERRORS = 6.0  # standard errors that a reading may be off
ROUNDING = 1e-9
SINGLE = 1e-3  # the printed cosine is taken in float32, where squares of small entries are lost
BENT = 0.2  # curvature and kinks may take this much of a correlation or of a small step's gain
AGREES = 0.99  # of the reference with finite differences: where it is no gradient, its steps gain something else
FEW = 128  # examples are enough here: every tolerance knows its n
NULLS = 100


@dataclass(frozen=True)
class Check:
    """One planted credit at one state: what was read, what it should be, and how far off it may be."""

    planted: str
    measurement: str
    layer: int
    read: float
    expected: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the reading is as theory says; NaN is right where NaN is expected."""
        if self.expected != self.expected:
            return self.read != self.read
        return abs(self.read - self.expected) <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.planted} at state {self.layer}: {self.measurement} reads {self.read:.4g}, "
            f"should be {self.expected:.4g} ± {self.tolerance:.2g}"
        )


def self_check(bench: Bench, *, probed: bool) -> list[Check]:
    """Plant credits at every state and read them with the audit's own measurements."""
    return [check for l in range(bench.depth + 1) for check in _at(bench, l, probed)] + list(_aggregates(bench))


def _at(bench: Bench, l: int, probed: bool) -> Iterator[Check]:
    usable = (bench.finite & (norm(bench.reference[l]) > 0)).nonzero().flatten()[:FEW]
    g, random = bench.reference[l][usable], bench.planted(l)[usable]
    if g.shape[0] < 2 or g[0].numel() < 2:
        return
    yield from _alignment(bench, l, g, random)
    yield from _nulls(bench, l, g, random)
    if probed and bench.is_probed(l):
        yield from _correlations(bench, l)
        if bench.regimes[l].linear and bench.agreements[l] > AGREES:
            yield from _nudges(bench, l, usable)


def _alignment(bench: Bench, l: int, g: Tensor, random: Tensor) -> Iterator[Check]:
    n, d = g.shape[0], g[0].numel()
    batch = bench.settings.published_batch
    metrics = {name: metric for name, metric, _, _ in measure.alignment_metrics(batch)}
    chance = ERRORS / math.sqrt(n * d)  # cosines of random directions have mean 0 and variance 1/d

    def check(planted: str, name: str, a: Tensor, expected: float, tolerance: float = ROUNDING) -> Check:
        return Check(planted, name, l, measure.mean(metrics[name](a, g)), expected, tolerance)

    yield check("the reference", "cosine", g, 1.0)
    yield check("its negative", "cosine", -g, -1.0)
    yield check("zero", "cosine", torch.zeros_like(g), math.nan)
    yield check("random", "cosine", random, 0.0, chance)
    yield check("the mean-reduced reference", "cosine", g / n, 1.0)
    yield check("the mean-reduced reference", "norm_ratio", g / n, 1 / n)
    yield check("the reference", "sign_agreement", g, 1.0)
    yield check("its negative", "sign_agreement", -g, 0.0)
    yield from (check(name, "cosine", a, read, off) for name, a, read, off in _noisy(g, random, chance))
    yield check("shuffled examples", "cosine", *_shuffled(bench, l, g, chance))
    share = _length_left(norm(g), 1.0) * _length_left(norm(g), batch)
    yield check("the reference", "cosine_clamped", g, float(share.mean()), SINGLE)
    yield Check("the reference", "pooled cosine", l, float(measure.pooled_cosine(g, g)), 1.0, ROUNDING)
    yield Check("its negative", "pooled cosine", l, float(measure.pooled_cosine(-g, g)), -1.0, ROUNDING)
    # Σ⟨u,g⟩ has variance Σ‖g‖²/d, so the pooled cosine has 1/(nd) whatever the norms
    yield Check("random", "pooled cosine", l, float(measure.pooled_cosine(random, g)), 0.0, chance)


def _length_left(size: Tensor, batch: float, eps: float = 1e-8) -> Tensor:
    """What the clamp of the printed cosine leaves of a vector of unit length."""
    return (size / batch / eps).clamp(max=1.0)


def _noisy(g: Tensor, random: Tensor, chance: float) -> Iterator[tuple[str, Tensor, float, float]]:
    """a = g + κ‖g‖u: cos = (1 + κc)/√(1 + 2κc + κ²), c = ⟨ĝ,u⟩ of variance 1/d: a bias of the order of 1/d."""
    sizes = norm(g).reshape(-1, *[1] * (g.ndim - 1))
    for ratio in NOISE_RATIOS:
        a = g + ratio * sizes * random
        yield f"the reference with noise {ratio:g}", a, 1 / math.sqrt(1 + ratio**2), chance + 3 / g[0].numel()


def _shuffled(bench: Bench, l: int, g: Tensor, chance: float) -> tuple[Tensor, float, float]:
    """The credits of other examples, one cycle through all: the mean is that of all pairs of different examples."""
    n = len(g)
    order = torch.randperm(n, generator=bench.generator("planted order", l)).to(g.device)
    u = unit(rows(g))
    centre = u.sum(0)
    expected = float((centre @ centre - n) / (n * (n - 1)))
    a = torch.empty_like(g)
    a[order] = g[order.roll(1)]
    spread = float(torch.linalg.vecdot(u[order], u[order.roll(1)]).std())
    return a, expected, ERRORS * spread / math.sqrt(n) + chance + 1 / n


def _nulls(bench: Bench, l: int, g: Tensor, random: Tensor) -> Iterator[Check]:
    """The null of the reference has mean 0 and variance ‖C‖²_F/d, C = (1/n) Σ ĝᵢ ĝᵢᵀ: known without a draw."""
    u = unit(rows(g))
    spread = float(torch.linalg.matrix_norm(u @ u.mT)) / len(u) / math.sqrt(u.shape[1])
    drawn = nulls.null_cosines(g, g, NULLS, bench.generator("planted null", l))
    yield Check("the reference", "mean of the null", l, float(drawn.mean()), 0.0, ERRORS * spread / math.sqrt(NULLS))
    # the draws' fourth moment is at most about that of a normal: the sd of their sd is spread/√(2·draws)
    off = ERRORS / math.sqrt(2 * NULLS) * spread
    yield Check("the reference", "spread of the null", l, float(drawn.std()), spread, off)


def _correlations(bench: Bench, l: int) -> Iterator[Check]:
    """The random credit reads 0, and what was measured itself 1."""
    found = bench.correlated[l]
    assert found is not None
    m, n = bench.settings.directions, len(found.random.terms)
    bound = ERRORS * math.sqrt((1 / m + 1 / bench.reference[l][0].numel()) / n)
    yield Check("random", "ρ", l, found.random.rho, 0.0, bound)
    yield Check("the changes themselves", "ρ", l, found.itself, 1.0, ROUNDING)
    yield Check("their negative", "ρ", l, found.negated, -1.0, ROUNDING)


def _nudges(bench: Bench, l: int, usable: Tensor) -> Iterator[Check]:
    """A small step down the reference gains η√d‖g‖, up to curvature."""
    h, g = bench.probe.state(l), bench.reference[l]
    # as long a step along g as gives the change of a probing step along a random v, known to be resolved and linear
    length = bench.regimes[l].step / math.sqrt(h[0].numel())
    eta = length / math.sqrt(h[0].numel())
    changes = bench.nudge(l, g, eta)
    if changes is not None:
        slope = length * norm(g)[usable].sum()
        yield Check("the reference", "nudging over its slope", l, float(changes[usable].sum() / slope), -1.0, BENT)


def _aggregates(bench: Bench) -> Iterator[Check]:
    """One layer right and the rest silent, and all layers right: what the shares of layers must be."""
    layers = bench.depth
    if layers < 2:
        return
    one = torch.zeros(layers, dtype=torch.float64)
    one[-1] = 1.0
    cases: list[tuple[str, Callable[[Tensor], Tensor], Tensor, float]] = [
        ("one layer right", measure.best_share, one, 1.0),
        ("all layers right", measure.best_share, torch.ones_like(one), 1 / layers),
        ("one layer right", measure.participation_ratio, one, 1.0),
        ("all layers right", measure.participation_ratio, torch.ones_like(one), float(layers)),
    ]
    for planted, metric, values, expected in cases:
        name = getattr(metric, "__name__", "share").replace("_", " ")
        yield Check(planted, name, bench.depth, float(metric(values)), expected, ROUNDING)
