"""Self-calibration: credits whose readings are known by theory, measured on the user's own network and data.

Each must read as it should, to six standard errors or to a stated bias, before anything is said about the user's
credit; what fails makes the measurements that rest on it "cannot judge".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from creditscope.auditing.bench import Bench
from creditscope.auditing.measure import NAN, mean
from creditscope.metrics.alignment import cosine, norm_ratio
from creditscope.metrics.causal import rho
from creditscope.metrics.scale import norm

NOISE_RATIOS = (0.5, 1.0, 2.0)
ERRORS = 6.0  # standard errors that a reading may be off
ROUNDING = 1e-9


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
    checks: list[Check] = []
    for l, g in enumerate(bench.reference):
        usable = bench.finite & (norm(g) > 0)
        g = g[usable]
        if g.shape[0] < 2 or g[0].numel() < 2:
            continue
        checks += _cosines(bench, l, g, usable)
        if probed and bench.is_resolved(l):
            checks += _correlations(bench, l)
    return checks


def _cosines(bench: Bench, l: int, g: Tensor, usable: Tensor) -> list[Check]:
    n, d = g.shape[0], g[0].numel()
    generator = bench.generator("planted order", l)
    sizes = norm(g).reshape(-1, *[1] * (g.ndim - 1))
    unit = bench.planted[l][usable]
    read = lambda a: mean(cosine(a, g))  # noqa: E731
    order = torch.randperm(n, generator=generator).to(g.device)
    bound = ERRORS / math.sqrt(n * d)  # cosines of random directions have mean 0 and variance 1/d
    checks = [
        Check("the reference", "cosine", l, read(g), 1.0, ROUNDING),
        Check("its negative", "cosine", l, read(-g), -1.0, ROUNDING),
        Check("zero", "cosine", l, read(torch.zeros_like(g)), NAN, 0.0),
        Check("random", "cosine", l, read(unit), 0.0, bound),
        Check("the mean-reduced reference", "cosine", l, read(g / len(bench.finite)), 1.0, ROUNDING),
        Check(
            "the mean-reduced reference",
            "norm ratio",
            l,
            mean(norm_ratio(g / len(bench.finite), g)),
            1 / len(bench.finite),
            ROUNDING,
        ),
    ]
    flat = _unit(g).flatten(1)
    centre = flat.sum(0)
    pairs = (centre @ centre - n) / (n * (n - 1))  # mean cosine of two different examples
    shuffled = cosine(g[order], g)
    moved = order != torch.arange(n, device=g.device)
    error = ERRORS * float(shuffled[moved].std()) / math.sqrt(max(1, int(moved.sum()))) if int(moved.sum()) > 1 else 1.0
    checks.append(Check("shuffled examples", "cosine", l, mean(shuffled[moved]), float(pairs), error + bound))
    for ratio in NOISE_RATIOS:
        # a = g + κ‖g‖u: cos = (1 + κc)/√(1 + 2κc + κ²), c = ⟨ĝ,u⟩ of variance 1/d: a bias of the order of 1/d
        noisy = cosine(g + ratio * sizes * unit, g)
        theory = 1 / math.sqrt(1 + ratio**2)
        checks.append(Check(f"reference with noise {ratio:g}", "cosine", l, mean(noisy), theory, bound + 3 / d))
    return checks


def _correlations(bench: Bench, l: int) -> list[Check]:
    probed = bench.correlated[l][0]
    assert probed is not None
    m, n = probed[0].shape
    bound = ERRORS * math.sqrt((1 / m + 1 / bench.planted[l][0].numel()) / n)
    return [Check("random", "ρ", l, float(rho(*probed)), 0.0, bound)]


def _unit(t: Tensor) -> Tensor:
    sizes = norm(t).clamp_min(torch.finfo(torch.float64).tiny)
    return t / sizes.reshape(-1, *[1] * (t.ndim - 1))
