"""Loss changes of a network from one of its states: what finite differences are made of.

At a state of norm 1e9, or a loss of 1e-12, the plain difference of two losses is rounding. For cross-entropy the
change is taken from the change of the outputs instead, Δℓ = log Σ_j p_j e^{δ_j} − δ_y with δ = Δoutput, which keeps
its relative precision however small the loss is; other losses are subtracted as they are, and it is said when the
difference is below their resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from creditscope.replay import Replay
from creditscope.tape import cross_entropy, per_example

RESOLVED = 1e3  # a change this many roundings large has three good digits


@dataclass
class Probe:
    """Loss changes around the states of one recorded pass."""

    replay: Replay
    epsilon: float
    published: bool = False
    """Subtract losses in the network's own precision, as published procedures do."""

    @classmethod
    def of(cls, replay: Replay, *, epsilon: float, published: bool = False) -> Probe:
        """Make the probe: in float64, unless the published procedure is asked for."""
        return cls(replay if published else replay.astype(torch.float64), epsilon, published)

    def state(self, l: int) -> Tensor:
        """Return h_l in the probe's precision."""
        return self.replay.states[l]

    def step_size(self, l: int) -> float:
        """Return ε, or more where a step of ε would be lost in the rounding of h_l.

        Each entry of a unit direction moves by about ε/√d; rounding moves it by eps·|h|. ε grows so that a step is
        1000 roundings; it does not under the published procedure.
        """
        h = self.state(l)
        if self.published:
            return self.epsilon
        rounding = torch.finfo(h.dtype).eps * h.abs().median().item() * h[0].numel() ** 0.5
        return max(self.epsilon, RESOLVED * rounding) if rounding == rounding else self.epsilon

    def change(self, l: int) -> Callable[[Tensor], Tensor]:
        """Return the function h' → ℓᵢ(h') − ℓᵢ(h_l), for n·B rows."""
        stable = self.replay.cut.loss is cross_entropy and not self.published
        base = self.replay.output

        def difference(h: Tensor) -> Tensor:
            with torch.no_grad():
                output, y = self.replay.output_at(l, h), self.replay.labels(h)
                copies = output.shape[0] // base.shape[0]
                if not stable:
                    return per_example(self.replay.cut.loss, output, y) - self.replay.losses.repeat(copies)
                before = base.repeat(copies, *[1] * (base.ndim - 1))
                return cross_entropy_change(before, output - before, y)

        return difference

    def resolution(self, l: int, steps: Tensor) -> float:
        """Return how many roundings a typical step changes the outputs (or, of other losses, the losses) by."""
        with torch.no_grad():
            h = self.state(l) + steps
            stable = self.replay.cut.loss is cross_entropy and not self.published
            after = self.replay.output_at(l, h) if stable else self.replay.tail(l, h)
            before = self.replay.output if stable else self.replay.losses
            change = (after - before).abs().flatten(1).amax(1) if stable else (after - before).abs()
            size = before.abs().flatten(1).amax(1) if stable else before.abs()
            unit = torch.finfo(after.dtype).eps * size.clamp_min(torch.finfo(after.dtype).tiny)
            return float((change / unit).median())


def cross_entropy_change(output: Tensor, change: Tensor, y: Tensor) -> Tensor:
    """Δℓ = log Σ_j p_j e^{δ_j} − δ_y, p = softmax(output), δ = change, stable for small and large δ and any p.

    With δ' = δ − δ_y the sum is 1 + Σ_{j≠y} p_j expm1(δ'_j), and Δℓ = log1p of the second term: no cancellation
    with the part of the loss that does not change.
    """
    relative = change - change.gather(1, y[:, None])
    p = torch.softmax(output, 1)
    small = torch.log1p((p * torch.expm1(relative.clamp_max(30.0))).sum(1))
    large = torch.logsumexp(torch.log_softmax(output, 1) + relative, 1)
    return torch.where(relative.amax(1) > 30.0, large, small)
