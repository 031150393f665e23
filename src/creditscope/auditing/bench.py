"""What all credits of an audit share: reference, replays, probed directions, the precision certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from creditscope.auditing.probe import Probe, Regime
from creditscope.auditing.subject import Subject
from creditscope.calling import call, map_inputs, pick_state, undisturbed
from creditscope.errors import UsageError
from creditscope.metrics.alignment import cosine
from creditscope.metrics.causal import directions, inner, loss_changes, nudge_steps, probe, rho, rho_terms
from creditscope.metrics.reference import finite_difference_agreement
from creditscope.metrics.scale import norm
from creditscope.replay import Replay
from creditscope.tape import Cut, Exact, per_example

ETAS = (0.001, 0.003, 0.01)
PAIRS = 200  # of example and direction, that tell a gradient from another signal
COARSE = 100.0  # roundings of a state's entries that a nudge has to be, lest it be rounded away


class Correlation(NamedTuple):
    """ρ of one credit at one state, its terms per example, (finite examples, 6)."""

    rho: float
    terms: Tensor


class Correlations(NamedTuple):
    """What is read at one state along the same random directions; None where a credit is not given."""

    random: Correlation
    claims: list[Correlation | None]
    itself: float
    """Of the measured changes with themselves: 1."""
    negated: float
    """Of their negative with them: −1."""


@dataclass(frozen=True)
class Settings:
    """How an audit measures."""

    tier: Literal["quick", "standard", "full"] = "standard"
    probe: Literal["float64", "published"] = "float64"
    directions: int = 32
    epsilon: float = 1e-3
    nulls: int = 200
    draws: int = 1000
    published_batch: int = 128
    chunk: int = 2048
    seed: int = 0


def _backpropagated(cut: Cut, x: Any, y: Any, how: str) -> Exact:
    """Return states and exact credits; foreign layers that cannot be run so are said, with the remedy."""
    try:
        return cut.exact(x, y)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"this network, or its loss, cannot be backpropagated through {how} ({why}): audit a plain twin of it"
        ) from error


class Bench:
    """One network and one evaluation set, measured once for all credits."""

    def __init__(self, subject: Subject, settings: Settings, reference: Callable[[Any, Any], Any] | None):
        self.subject, self.settings = subject, settings
        self.cut, self.x, self.y = subject.cut, subject.x, subject.y
        self._given = reference

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return the stream of one purpose of this audit."""
        from creditscope.rng import stream

        return stream(self.settings.seed, "audit", *purpose)

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return self.cut.depth

    @cached_property
    def native(self) -> Exact:
        """States and exact credits in the network's own precision."""
        return _backpropagated(self.cut, self.x, self.y, "in eval mode")

    @cached_property
    def doubled(self) -> Cut:
        """The network in float64."""
        return self.cut.astype(torch.float64)

    @cached_property
    def exact(self) -> Exact:
        """States and exact credits in float64."""
        return _backpropagated(self.doubled, *self._doubled_data(), "in float64")

    def _doubled_data(self) -> tuple[Any, Any]:
        cast = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
        return map_inputs(self.x, cast), map_inputs(self.y, cast)

    @cached_property
    def autograd(self) -> list[Tensor]:
        """g_l by autograd in float64."""
        return self.exact.gradients

    @cached_property
    def reference(self) -> list[Tensor]:
        """g_l: by autograd in float64, or what the user's ``reference=`` gives."""
        if self._given is None:
            return self.autograd
        given = self._given(self.x, self.y)
        shapes = [h.shape for h in self.exact.states]
        if not isinstance(given, list | tuple) or [getattr(g, "shape", None) for g in given] != shapes:
            raise UsageError(f"reference= must give one tensor a state, of shapes {[tuple(s) for s in shapes]}")
        return [g.detach().double() for g in given]

    @cached_property
    def replay(self) -> Replay:
        """The recorded pass from whose states tails are run."""
        if self.settings.probe == "published":
            return Replay.of(self.cut, self.x, self.y)
        found = Replay.of(self.doubled, *self._doubled_data())
        for l, h in enumerate(found.states):  # one copy of the states is enough
            if torch.equal(self.exact.states[l], h):
                self.exact.states[l] = h
        return found

    @cached_property
    def probe(self) -> Probe:
        """Loss changes around the states."""
        return Probe(self.replay, self.settings.epsilon, self.settings.probe == "published")

    @cached_property
    def finite(self) -> Tensor:
        """Which examples have finite states, outputs and reference: (B,)."""
        parts = [*self.exact.states, *self.reference, self.exact.output]
        return torch.stack([torch.isfinite(t.reshape(len(t), -1)).all(1) for t in parts]).all(0)

    def planted(self, l: int) -> Tensor:
        """Return a random credit of unit norm per example, whose readings are known by theory."""
        g = self.reference[l]
        return directions(tuple(g.shape), 1, self.generator("planted", l), device=g.device)[0]

    @cached_property
    def correlated(self) -> list[Correlations | None]:
        """For each state, ρ of a random credit and of the claims'; None where no value can be put in its place."""
        return [None if self.regimes[l].obstacle else self._correlated(l) for l in range(self.depth + 1)]

    def _correlated(self, l: int) -> Correlations:
        given = [self.planted(l), *(claim.credits[l] for claim in self.subject.claims)]
        asked = [a for a in given if a is not None]
        found = probe(
            self.probe.change(l),
            self.probe.state(l),
            asked,
            self.generator("directions", l),
            count=self.settings.directions,
            epsilon=self.regimes[l].step,
            chunk=self.settings.chunk,
            base=torch.zeros_like(self.replay.losses),
        )
        actual = found.actual[:, self.finite]
        read = (Correlation(float(rho(p, actual)), rho_terms(p, actual)) for p in found.predicted[:, :, self.finite])
        random, *claims = [None if a is None else next(read) for a in given]
        assert random is not None
        return Correlations(random, claims, float(rho(actual, actual)), float(rho(-actual, actual)))

    @cached_property
    def regimes(self) -> list[Regime]:
        """For each state, the probing step and whether the changes that it makes are resolved and linear."""
        return [self._regime(l) for l in range(self.depth + 1)]

    def _regime(self, l: int) -> Regime:
        return self.probe.regime(l, self._trial(l))

    def _trial(self, l: int) -> Tensor:
        """Return one direction per example."""
        h = self.probe.state(l)
        return directions(tuple(h.shape), 1, self.generator("resolution", l), dtype=h.dtype, device=h.device)[0]

    def is_probed(self, l: int) -> bool:
        """Tell whether loss changes at a state stand above rounding, or the published procedure does not ask."""
        return not self.regimes[l].obstacle and (self.regimes[l].resolved or self.probe.published)

    @cached_property
    def agreements(self) -> list[float]:
        """For each state, ρ of the reference with central finite differences; NaN below resolution."""
        return [self._agreement(l) for l in range(self.depth + 1)]

    def _agreement(self, l: int) -> float:
        """By the trial that settled the step, where it is many pairs and linear; else by more, and shorter ones."""
        regime = self.regimes[l]
        if not self.is_probed(l) or self.probe.published:
            return math.nan
        change, h, g = self.probe.change(l), self.probe.state(l), self.reference[l]
        known = self.finite
        if regime.linear and regime.slope is not None and int(known.sum()) >= PAIRS:
            return float(rho(inner(self._trial(l)[None], g)[0, known], regime.slope[known]))
        return float(finite_difference_agreement(change, h, g, self.generator("agreement", l)).rho)

    @cached_property
    def reference_nudges(self) -> list[list[Tensor | None]]:
        """Loss changes after steps down the reference, by state and η."""
        return self.nudges(self.reference)

    def nudges(self, credits: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Return ℓᵢ(h_l − η·a/RMS(a)) − ℓᵢ(h_l) by state and η; None where no credit is given."""
        return [[self.nudge(l, a, eta) for eta in ETAS] for l, a in enumerate(credits)]

    def nudge(self, l: int, a: Tensor | None, eta: float) -> Tensor | None:
        """Return the loss change per example after a step of η·a/RMS(a) down a credit, None where it cannot be had."""
        h, change = self.probe.state(l), self.probe.change(l)
        if a is None or self.regimes[l].obstacle or (not self.probe.published and eta < COARSE * self.spacings[l]):
            return None
        steps = nudge_steps(a, eta).to(h.dtype)
        known = torch.isfinite(steps.flatten(1)).all(1)
        steps = steps.nan_to_num(0.0, 0.0, 0.0)[None]
        base = torch.zeros_like(self.replay.losses)
        return loss_changes(change, h, steps, chunk=self.settings.chunk, base=base)[0].masked_fill(~known, math.nan)

    @cached_property
    def again(self) -> tuple[Tensor, list[Tensor | None]]:
        """The output of a second look, under another random stream, and ‖f_l(h_l)‖ where the network exposes f_l."""
        hidden = self.cut.topology.hidden if self.cut.topology else ()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(self.settings.seed + 1)
            with undisturbed(self.cut.network), torch.no_grad(), self.cut.recorder("local") as record:
                output = pick_state(call(self.cut.network, self.x), None, "the network's output")
        return output, [
            None if name in hidden or point is None else norm(point.tensor)
            for name, point in zip(self.cut.blocks, record.branches, strict=True)
        ]

    @cached_property
    def spacings(self) -> list[float]:
        """The rounding of a typical entry of each state, in the probe's precision."""
        return [
            torch.finfo(h.dtype).eps * float(h.abs().nanmedian())
            for h in (self.probe.state(l) for l in range(self.depth + 1))
        ]

    def likeness(self, l: int, k: int) -> float:
        """Return the mean cosine of g_l and g_k, of one shape."""
        if (l, k) not in self._likeness:
            self._likeness[l, k] = self._likeness[k, l] = float(cosine(self.reference[l], self.reference[k]).nanmean())
        return self._likeness[l, k]

    @cached_property
    def _likeness(self) -> dict[tuple[int, int], float]:
        return {}

    def _errors(self) -> Tensor:
        """Return ∂ℓᵢ/∂outputᵢ in float64."""
        with torch.enable_grad():
            output = self.exact.output.detach().requires_grad_()
            losses = per_example(self.cut.loss, output, self._doubled_data()[1])
            return torch.autograd.grad(losses.sum(), output)[0]

    def certified(self) -> Iterator[Tensor]:
        """Yield g_l in the network's own precision from an exact, rescaled error: what backprop through it loses.

        The error e is taken in float64, scaled to its largest entry per example, and sent back in the network's
        precision. So neither the loss's own cancellation (softmax − onehot at a loss near zero) nor its smallness is
        charged to the network: only lost directions are. Scales cancel in the comparison.
        """
        errors = self._errors()
        scale = errors.abs().reshape(len(errors), -1).amax(1).clamp_min(torch.finfo(torch.float64).tiny)
        scale = scale.reshape(-1, *[1] * (errors.ndim - 1))
        unit = (errors / scale).to(self.native.output.dtype)
        linear = Cut(
            self.cut.network,
            self.cut.blocks,
            self.cut.head,
            self.cut.state,
            lambda output, _: (output * unit).reshape(len(output), -1).sum(1),
            self.cut.bypass,
            self.cut.topology,
        )
        lengths = scale.flatten()
        for g in linear.exact(self.x, self.y).gradients:
            yield g.double() * lengths.reshape(-1, *[1] * (g.ndim - 1))
