"""Equilibrium propagation on feedforward networks: the credit is what nudged states leave unexplained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from creditscope.calling import (
    Inputs,
    RandomState,
    call,
    copied_buffers,
    copied_input,
    gradients_of,
    map_inputs,
    pick_state,
    random_state,
    replace_tensor,
    set_random_state,
    undisturbed,
)
from creditscope.recorder import Point
from creditscope.rules._base import Feedback, Outcome, Rule, Site, require
from creditscope.tape import Cut, Tape, per_example
from creditscope.topology import Topology


@dataclass(frozen=True)
class Energy:
    """E(h) = ½‖h_0 − stem(x)‖² + ½Σ_l ‖h_{l+1} − F_l(h_l)‖² + β Σᵢ ℓᵢ of one batch, β of either sign.

    F_l is all that the network does between state l and state l + 1, ε_l the prediction error of h_l. One pass of the
    network at given states makes every F_l(h_l) and, backwards, every ∂E/∂h_l = ε_l − J_lᵀ ε_{l+1} (at L: ε_L + β g_L).
    """

    cut: Cut
    x: Inputs
    y: Any
    beta: float = 0.0
    draws: RandomState | None = None
    """Where the random stream stood before the free phase: every pass drops what that one dropped."""

    @property
    def topology(self) -> Topology:
        """How the network is put together in its present mode."""
        assert self.cut.topology is not None
        return self.cut.topology

    def free_phase(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return h_0..h_L, the output and ℓᵢ of the forward pass: the minimum for β = 0, where every ε_l is zero."""
        with torch.no_grad(), self.cut.recorder("local") as record:
            output = self._forward()
            self.cut._check_fired(record)
            refuse_low_precision(record.states)
            return record.states, output, per_example(self.cut.loss, output, self.y)

    def relax(self, free: Sequence[Tensor], *, steps: int, lr: float, tolerance: float | None = None) -> list[Tensor]:
        """Descend from the free states, all at once: h_l ← h_l − lr ∂E/∂h_l, ``steps`` times.

        An example whose step overshoots, ‖Δ∂E‖ > 2‖∂E‖, has met a curvature c > 2/lr, along which E would grow from
        step to step: its lr becomes 1/c, and grows back by a tenth a step. With a tolerance each example stops by
        itself, where ‖∂E‖ is below tolerance·‖ε‖ or the rounding of h.
        """
        states, before = [h.clone() for h in free], [torch.zeros_like(h) for h in free]
        rate = torch.full_like(free[0][(slice(None), *[0] * (free[0].ndim - 1))], lr)
        with gradients_of([*self.cut.network.parameters()], False):
            for _ in range(steps):
                with self._pass(states, 1.0) as clamped:
                    down, negated = self._descent(clamped, 1.0), clamped.sent
                turned = _length(_minus(down, before)) / _length(before)
                overshot = (turned > 2) & turned.isfinite()  # not in the first step, which has none before it
                rate = torch.where(overshot, rate / turned, (rate * 1.1).clamp_max(lr))
                if tolerance is not None:
                    rounding = torch.finfo(rate.dtype).eps * _length(states)
                    moving = _length(down) > tolerance * _length(negated) + rounding
                    if not bool(moving.any()):
                        break
                    rate = rate * moving
                for h, d in zip(states, down, strict=True):
                    h.addcmul_(d, rate.view(-1, *[1] * (d.ndim - 1)))
                before = down
        return states

    def credits(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return −ε_l/β at given states."""
        with gradients_of([*self.cut.network.parameters()], False), self._pass(states, 1 / self.beta) as clamped:
            return clamped.sent

    def add_gradient(self, states: Sequence[Tensor], factor: float | Tensor) -> Tensor:
        """Add factor/β · ∂E/∂θ at given states to ``.grad``; return the residual ‖∂E/∂h‖/‖ε‖ there."""
        with self._pass(states, factor / self.beta) as clamped:
            down = self._descent(clamped, factor / self.beta)
        slope, error = (_length(parts).square().sum().sqrt() for parts in (down, clamped.sent))
        return slope / error.clamp_min(torch.finfo(error.dtype).tiny)

    @contextmanager
    def _pass(self, states: Sequence[Tensor], factor: float | Tensor) -> Iterator[Clamped]:
        """Run the network at given states, ready to send −factor·ε_l into each segment."""
        clamped = Clamped(self.cut, states, factor)
        if self.draws is not None:
            set_random_state(self.draws, states[0].device)
        with torch.enable_grad(), clamped:
            clamped.output = self._forward()
            self.cut._check_fired(clamped.record)
            yield clamped

    def _forward(self) -> Tensor:
        """Run the network on inputs of its own, since a state may be the input itself."""
        apart = self.topology.mutated or self.topology.recomputes
        own = map_inputs(self.x, copied_input if apart else torch.Tensor.detach)
        return pick_state(call(self.cut.network, own), None, "the network's output")

    def _descent(self, clamped: Clamped, factor: float | Tensor) -> list[Tensor]:
        """Run backward through all segments at once; return −factor·∂E/∂h_l."""
        require(
            clamped.output.requires_grad,
            "the loss is not differentiable at h_L: the output does not depend on the last state by autograd",
        )
        errors = Tape(self.cut, clamped.record, clamped.output, self.y, self.x).errors
        with clamped.record.backward_pass():
            torch.autograd.backward([clamped.output], [(errors * (self.beta * factor)).to(clamped.output.dtype)])
        return [a if g is None else a - g for a, g in zip(clamped.sent, clamped.arrived, strict=True)]


class Clamped:
    """One pass of a network whose states are given: what each segment makes of them, and the hooks that see to it.

    A state is given its value where it is met, so that all that read it see that: the block that it enters as well as a
    skip around it. Its place in the graph stays, and a hook there takes down what arrives from the segments behind it,
    factor·(∂E/∂h_l − ε_l), and sends −factor·ε_l on instead.
    """

    def __init__(self, cut: Cut, states: Sequence[Tensor], factor: float | Tensor):
        self.cut, self.states, self.factor = cut, states, factor
        self.record = cut.recorder("exact")
        self.sent: list[Tensor] = []
        self.arrived: list[Tensor | None] = [None] * len(states)
        self.output: Tensor
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        assert self.cut.topology is not None
        terminal, blocks = self.cut.topology.terminal, [*self.cut.blocks.values()]
        with ExitStack() as stack:
            for block in blocks:
                stack.callback(block.register_forward_hook(self._part).remove)
            stack.enter_context(self.record)  # its hooks take down what was predicted, those after them replace it
            for block in blocks:
                stack.callback(block.register_forward_pre_hook(self._meet).remove)
            if terminal is None:
                stack.callback(blocks[-1].register_forward_hook(self._meet).remove)
            else:
                stack.callback(self.cut.network.get_submodule(terminal).register_forward_pre_hook(self._meet).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _part(self, block: nn.Module, args: Any, value: Any) -> Any:
        """Keep two states apart where a block returns the very tensor that it was given."""
        out = pick_state(value, self.cut.state, "what a block returns")
        same = Point.at(out).is_edge_of(self.record.incoming[-1])
        return replace_tensor(value, out, out.clone(), "what a block returns") if same else None

    def _meet(self, *_: Any) -> None:
        """Give a state that was just recorded its value; hooks of other calls find none."""
        assert self.cut.topology is not None
        for l in range(len(self.sent), len(self.record.incoming)):
            h, value = self.record.incoming[l].tensor, self.states[l]
            self.sent.append((self.record.states[l] - value) * self.factor)
            h.data = value.clone() if l in self.cut.topology.mutated else value
            self._stack.callback(h.register_hook(partial(self._arrive, l)).remove)

    def _arrive(self, l: int, gradient: Tensor) -> Tensor:
        self.arrived[l] = gradient
        return self.sent[l]


def _minus(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [one - other for one, other in zip(a, b, strict=True)]


def _length(parts: Sequence[Tensor]) -> Tensor:
    """Return the norm of each example over all states, (B,)."""
    return torch.stack([h.flatten(1).square().sum(1) for h in parts]).sum(0).sqrt()


class Draws(nn.Module):
    """Whether the network draws in its forward: seen in every step but a captured one, which goes by it."""

    seen: bool = False


@dataclass(frozen=True)
class EP(Rule):
    """Equilibrium propagation: a_l = −ε_l/β, ε_l = h_l − F_{l−1}(h_{l−1}) at states nudged by β (stem(x) for l = 0).

    E(h) = ½‖h_0 − stem(x)‖² + ½Σ_l ‖h_{l+1} − F_l(h_l)‖² + β Σᵢ ℓᵢ, F_l the whole way from state l to state l + 1, its
    skip included. The free phase is the forward pass, where every ε_l = 0. The nudged phase descends E from there,
    h_l ← h_l − state_lr·∂E/∂h_l, on all states at once and each example by itself. The weights, those of the stem and
    the head too, get the gradient of the contrast, (∂E/∂θ at +β − ∂E/∂θ at −β)/2β over the batch's mean; one-sided,
    the free phase's share is zero. Where E is at rest, a_l = J_lᵀ a_{l+1} at the nudged states: for β → 0 it is
    backpropagation, with an error of order β (one-sided) or β² (centred).

    Scellier & Bengio, *Equilibrium Propagation*, Frontiers in Computational Neuroscience 11 (2017), for the contrast;
    Laborieux et al., Frontiers in Neuroscience 15 (2021), for the centred estimate; the energy of a feedforward network
    is that of Whittington & Bogacz, Neural Computation 29 (2017), eq. 2.2, nudged where theirs is clamped. Deviations:
    the states descend without a nonlinearity or bounds of their own, and an example whose step overshoots shortens it.

    **How far it relaxes.** Credit moves down one state a step and settles in about depth² steps: ``metrics()`` has the
    ``residual`` ‖∂E/∂h‖/‖ε‖ at the end of a step, 0 at rest. Until then deep credit points the right way and is too
    short (ResMLP 64 × 4 on the digits, as initialised, a_0 after 20 steps: cosine .999 with g_0, a third of its norm).
    An audit measures the credit of the same ``steps``.

    **Cost.** A relaxation step is one forward and one backward pass, without the gradients of the weights, in one call:
    .5 of two forwards and one backward (CPU time, ResMLP 512 × 12, batch 128), 1.0 where launches dominate (64 × 4). A
    training step takes 2·steps of them (one-sided: steps), a free forward pass and two (one) passes for the weights.

    **What it needs.** float32 or float64: ε_l is a difference of two states, of the size of β·g_l. Dropout masks are
    those of the free phase throughout, and buffers are updated once. Under BatchNorm in training mode the examples of a
    batch relax together, as they are normalised together. Steep networks (J far above 1: BatchNorm or post-norm on few
    features) relax slowly; the residual says so.

    Evidence: digits, ResMLP 64 × 4, 10 epochs, seeds 0, 1, 2, defaults of ``fit``: test accuracy .965 ± .006 (backprop
    .969 ± .007, DFA .677 ± .110).
    """

    beta: float = field(default=0.1, kw_only=True)
    """β. At .1 the centred bias is 1 to 3 % (digits, 2 to 4 blocks), and the rounding of ε_l in float32, about
    1e-7·‖h‖/(β‖g‖), stays small when the loss has gone down. Below .01 use float64."""
    steps: int = field(default=20, kw_only=True)
    """Steps of the nudged phase; ``credits`` may stop earlier. 20 reach the stem of 19 blocks, at 42 passes a step."""
    state_lr: float = field(default=0.4, kw_only=True)
    """The step of the nudged phase. A residual network has J ≈ I, and E curvatures of up to 4: steps are stable below
    .5. A little less is at rest after 400 steps for 4 blocks."""
    estimate: Literal["centred", "positive", "negative"] = field(default="centred", kw_only=True)
    """Both nudgings and their central difference, or one. Twice the work brings a bias of β² in place of β."""
    tolerance: float = field(default=1e-8, kw_only=True)
    """The residual at which ``credits`` stops relaxing an example; small enough to show β² down to β = 1e-4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta > 0, f"rule.beta must be positive, not {self.beta}: its sign is what rule.estimate says")
        require(self.steps >= 1, f"rule.steps must be at least 1, not {self.steps}")
        require(self.state_lr > 0, f"rule.state_lr must be positive, not {self.state_lr}")
        require(self.tolerance >= 0, f"rule.tolerance must not be negative, not {self.tolerance}")

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Check that every state can be given another value; there is nothing to draw."""
        super().build(site, generator, feedback)
        refuse_early(site.topology)
        return Draws()

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return a_0..a_L, relaxed for ``steps`` or to the tolerance."""
        refuse_early(site.cut.settle(x))
        with undisturbed(site.cut.network):
            energy = Energy(site.cut, x, y, draws=random_state(site.factory["device"]))
            free, *_ = energy.free_phase()
            options = {"steps": self.steps, "lr": self.state_lr, "tolerance": self.tolerance}
            found = [nudged.credits(nudged.relax(free, **options)) for nudged in self._nudged(energy)]
        return [torch.stack(both).mean(0) for both in zip(*found, strict=True)]

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Run the free phase, relax, and add the contrast's gradient."""
        assert isinstance(pathway, Draws)
        refuse_early(site.cut.settle(x))
        energy = Energy(site.cut, x, y)
        start = start_of(pathway, site.factory["device"])
        free, output, losses = energy.free_phase()
        if start is not None:
            pathway.seen = has_drawn(start, site.factory["device"])
        nudged = self._nudged(replace(energy, draws=start if pathway.seen else None))
        factor = scale / (output.shape[0] * len(nudged))
        with copied_buffers(site.cut.network):
            residuals = [e.add_gradient(e.relax(free, steps=self.steps, lr=self.state_lr), factor) for e in nudged]
        return Outcome(losses.mean(), output, {"residual": torch.stack(residuals).mean()})

    def _nudged(self, energy: Energy) -> list[Energy]:
        signs = {"centred": (1, -1), "positive": (1,), "negative": (-1,)}[self.estimate]
        return [replace(energy, beta=sign * self.beta) for sign in signs]


def start_of(draws: Draws, device: torch.device) -> RandomState | None:
    """Return where the random stream stands; in a captured step, which cannot ask, None."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return random_state(device)
    if draws.seen:
        raise RuntimeError("the network draws in its forward, and every relaxation step has to draw the same")
    return None


def has_drawn(start: RandomState, device: torch.device) -> bool:
    """Tell whether the random stream has moved on."""
    both = zip(start, random_state(device), strict=True)
    return any(a is not None and b is not None and not torch.equal(a, b) for a, b in both)


def refuse_early(topology: Topology) -> None:
    """A state that is read before it is met cannot be given another value in time."""
    early = min(topology.early, default=None)
    require(
        early is None,
        f"state {early} is read before it enters its module, so no other value can be put there in time and it cannot "
        "be relaxed; let the module be called first",
    )


def refuse_low_precision(states: Sequence[Tensor]) -> None:
    """ε_l is a difference of two states, of the size of β·g_l."""
    kind = states[0].device.type
    used = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [h.dtype for h in states]
    low = next((dtype for dtype in used if torch.finfo(dtype).bits < 32), None)
    require(
        low is None,
        f"the states are computed in {low}, whose rounding is larger than what EP nudges them by: train in float32 or "
        "float64",
    )
