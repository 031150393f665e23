"""Loss changes of a network from one of its states: what finite differences are made of.

At a state of norm 1e9, or a loss of 1e-12, the plain difference of two losses is rounding. For cross-entropy the
change is taken from the change of the outputs instead, Δℓ = log Σ_j p_j e^{δ_j} − δ_y with δ = Δoutput, which keeps
its relative precision however small the loss is; other losses are subtracted as they are, and it is said when the
difference is below their resolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from creditscope.metrics._rows import quotient
from creditscope.metrics.causal import root_mean_square
from creditscope.metrics.scale import norm
from creditscope.replay import Replay
from creditscope.tape import cross_entropy, per_example

RESOLVED = 1e3  # a change this many roundings large has three good digits
LINEAR = 0.1  # even over odd part of the changes: below it, curvature lowers a correlation by less than 1 %
LONGEST = 1e-4  # of the state's norm: as far as a step grows to be resolved


@dataclass(frozen=True)
class Regime:
    """What a probing step at one state meets."""

    step: float
    """ε, or more where a step of ε would be lost in rounding."""
    roundings: float = math.nan
    """How many roundings a step changes the outputs (of losses other than cross-entropy, also the losses) by."""
    curvature: float = math.nan
    """Even over odd part of the changes of the loss, ±step."""
    slope: Tensor | None = field(default=None, repr=False)
    """Of the loss along the trial direction of each example, by the central difference."""
    obstacle: str = ""
    """Why no value can be put in place of the state, where none can."""

    @property
    def resolved(self) -> bool:
        """Whether the changes stand above rounding."""
        return self.roundings >= RESOLVED

    @property
    def linear(self) -> bool:
        """Whether the loss is linear over a step, so that finite differences are its gradient."""
        return self.curvature <= LINEAR

    def __str__(self) -> str:
        if self.obstacle:
            return f"not replayed: {self.obstacle}"
        if not self.resolved:
            return f"below resolution: a typical change is {self.roundings:.2g} roundings"
        if not self.linear:
            return f"not linear: over a step of {self.step:.2g} the loss bends by {self.curvature:.2g} of its slope"
        return "resolved"


@dataclass
class Probe:
    """Loss changes around the states of one recorded pass."""

    replay: Replay
    epsilon: float
    published: bool = False
    """Subtract losses in the network's own precision, as published procedures do."""

    @property
    def stable(self) -> bool:
        """Whether changes of the loss are taken from changes of the outputs."""
        return self.replay.cut.loss is cross_entropy and not self.published

    def state(self, l: int) -> Tensor:
        """Return h_l in the probe's precision."""
        return self.replay.states[l]

    def change(self, l: int) -> Callable[[Tensor], Tensor]:
        """Return the function h' → ℓᵢ(h') − ℓᵢ(h_l), for n·B rows."""

        def difference(h: Tensor) -> Tensor:
            with torch.no_grad():
                return self._difference(self.replay.output_at(l, h), self.replay.labels(h))

        return difference

    def _difference(self, output: Tensor, y: Any) -> Tensor:
        base = self.replay.output
        copies = output.shape[0] // base.shape[0]
        if not self.stable:
            return per_example(self.replay.cut.loss, output, y) - self.replay.losses.repeat(copies)
        before = base.repeat(copies, *[1] * (base.ndim - 1))
        return cross_entropy_change(before, output - before, y)

    def regime(self, l: int, v: Tensor) -> Regime:
        """Settle the step at a state from one trial direction per example, v of unit norm.

        Each entry of a unit direction moves by about ε/√d and rounding moves it by eps·|h|; ε grows so that a step is
        1000 roundings there and, as far as 1e-4 of the state's norm, 1000 roundings of the outputs. It does not under
        the published procedure.
        """
        topology = self.replay.cut.topology
        if not self.replay.direct and topology is not None and l in topology.early:
            return Regime(self.epsilon, obstacle="the state is read before it enters its module")
        if self.published:
            return self._tried(l, v, self.epsilon)
        h = self.state(l)
        lost = torch.finfo(h.dtype).eps * h.abs().nanmedian().item() * h[0].numel() ** 0.5
        found = self._tried(l, v, max(self.epsilon, RESOLVED * lost if math.isfinite(lost) else 0.0))
        longest = LONGEST * norm(h).nanmedian().item()
        if found.resolved or not found.roundings > 0 or not longest > found.step:
            return found
        return self._tried(l, v, min(found.step * 2 * RESOLVED / found.roundings, longest))

    def _tried(self, l: int, v: Tensor, step: float) -> Regime:
        h = self.state(l)
        with torch.no_grad():
            after = self.replay.output_at(l, h + step * v)
            up = self._difference(after, self.replay.y)
            down = self.change(l)(h - step * v)
        roundings = self._roundings(after - self.replay.output, self.replay.output)
        if not self.stable:  # a loss below 1 is a difference of numbers of order 1, and is no better than they are
            losses = self.replay.losses
            roundings = min(roundings, self._roundings(up, losses.clamp_min(1.0)))
        even, odd = ((up + sign * down).double() for sign in (1, -1))
        known = torch.isfinite(even) & torch.isfinite(odd)
        curvature = quotient(root_mean_square(even[known]), root_mean_square(odd[known]))
        return Regime(step, roundings, float(curvature), odd / (2 * step))

    @staticmethod
    def _roundings(change: Tensor, value: Tensor) -> float:
        size, unit = (t.abs().reshape(len(t), -1).amax(1) for t in (change, value))
        unit = torch.finfo(value.dtype).eps * unit.clamp_min(torch.finfo(value.dtype).tiny)
        return float((size / unit).nanmedian())


def cross_entropy_change(output: Tensor, change: Tensor, y: Tensor) -> Tensor:
    """Δℓ = log Σ_j p_j e^{δ_j} − δ_y, p = softmax(output), δ = change, stable for small and large δ and any p.

    With δ' = δ − δ_y the sum is 1 + Σ_{j≠y} p_j expm1(δ'_j), and Δℓ = log1p of the second term: no cancellation
    with the part of the loss that does not change. Where the change is itself large, the plain sum of exponentials is
    right, and that form would cancel.
    """
    relative = change - change.gather(1, y[:, None])
    p = torch.softmax(output, 1)
    gain = (p * torch.expm1(relative.clamp_max(30.0))).sum(1)
    large = torch.logsumexp(torch.log_softmax(output, 1) + relative, 1)
    return torch.where((relative.amax(1) > 30.0) | (gain < -0.5), large, torch.log1p(gain.clamp_min(-0.5)))
