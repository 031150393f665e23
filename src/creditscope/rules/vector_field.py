"""Vector field: learn the credit itself from directional finite differences of the true loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from creditscope.calling import plain_precision
from creditscope.estimators import VectorNet
from creditscope.rules._base import Feedback, Rule, Site, require
from creditscope.rules._learned import (
    Condition,
    Estimate,
    LearnedRule,
    by_layer,
    condition_of,
    condition_size,
    shaped,
    sizes_of,
    stacked,
    terminal_gradient,
)
from creditscope.tape import Tape


def direction_errors(credits: Tensor, directions: Tensor, targets: Tensor) -> Tensor:
    """(⟨a, v_m⟩ − D_m)²: a (…, B, d), v (…, M, B, d), D (…, M, B) -> (…, M, B)."""
    return ((credits.unsqueeze(-3) * directions).sum(-1) - targets).square()


@dataclass(frozen=True)
class VectorField(LearnedRule):
    """Vector field: a_l = a(h_l, l/L, s), a network that learns the credit itself, without any backward pass.

    It minimises mean (⟨a(h_l, l/L, s), v⟩ − D)² + w·mean ‖a(h_L, 1, s) − g_L‖² over the states 0..L, the batch and M
    random directions v ~ N(0, I), with D = (ℓ(h_l + εv) − ℓ(h_l − εv))/2ε the change of the true loss, the network
    run again from h_l. For directions of that size the first mean is ‖a − g_l‖² in expectation, so both terms are of
    one scale, and float32 resolves the differences.

    Hao, Wan & Zhai, arXiv 2606.21126 (2026), where M = 4 was enough. Deviations: ε = 1e-3, the size of v and fitting
    directions at h_L too are ours (the study states none of them). In training mode a replay keeps the dropout masks,
    and batch normalisation takes the statistics of the moved batches.
    """

    condition: Condition = field(default="error", kw_only=True)
    """s: the error e, or g_L, which is local to the head."""
    directions: int = field(default=4, kw_only=True)
    """M, random directions per example and state."""
    epsilon: float = field(default=1e-3, kw_only=True)
    """ε of the finite differences."""
    terminal_weight: float = field(default=1.0, kw_only=True)
    """w, of the match with g_L."""
    targets: Literal["central", "one-sided", "shuffled"] = field(default="central", kw_only=True)
    """Central differences; (ℓ(h + εv) − ℓ(h))/ε; or, as a control, central ones that were dealt to other examples,
    g_L with them, of which nothing can be learned but the mean."""

    needs_replay: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.directions >= 1, f"rule.directions must be at least 1, not {self.directions}")
        require(self.epsilon > 0, f"rule.epsilon must be positive, not {self.epsilon}")
        require(self.terminal_weight >= 0, f"rule.terminal_weight must not be negative, not {self.terminal_weight}")

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Draw the network, and begin the stream of directions."""
        Rule.build(self, site, generator, feedback)
        entries = condition_size(site, self.condition)
        net = VectorNet(sizes_of(site), entries, generator=generator, architecture=self.architecture)
        site.start_noise(generator)
        return net.to(**site.factory)

    def credit(self, site: Site, pathway: nn.Module, tape: Tape) -> Sequence[Tensor]:
        """a_l = a(h_l, l/L, s)."""
        with torch.no_grad(), plain_precision(tape.output):
            s = condition_of(tape, self.condition, pathway)
            batches = stacked(tape.states, range(len(tape.states)), pathway)
            return shaped(by_layer(batches, [pathway(b.h, b.t, s) for b in batches]), tape.states)

    def estimate(self, site: Site, pathway: nn.Module, tape: Tape) -> Estimate:
        """Return credits and loss from one forward pass of the network."""
        s = condition_of(tape, self.condition, pathway)
        batches = stacked(tape.states, range(len(tape.states)), pathway)
        credits = [pathway(b.h, b.t, s) for b in batches]
        generator = site.noise_on(s.device)
        draw = {"generator": generator, "device": s.device}
        directions = [
            torch.randn(len(b.layers), self.directions, *b.h.shape[1:], **draw, dtype=b.h.dtype) for b in batches
        ]
        changes = [self._change(tape, l, v) for l, v in enumerate(by_layer(batches, directions))]
        exact = terminal_gradient(tape).flatten(1).to(s.dtype)
        if self.targets == "shuffled":
            dealt = torch.rand(tape.batch, **draw).argsort()
            changes, exact = [change[:, dealt] for change in changes], exact[dealt]
        each = [
            direction_errors(a, v, torch.stack([changes[l] for l in b.layers]).to(a.dtype))
            for b, a, v in zip(batches, credits, directions, strict=True)
        ]
        given = by_layer(batches, credits)
        losses = {
            "direction_loss": torch.stack(by_layer(batches, each)).mean(),
            "terminal_loss": (given[-1] - exact).square().sum(-1).mean(),
        }
        total = losses["direction_loss"] + self.terminal_weight * losses["terminal_loss"]
        return Estimate(shaped([a.detach() for a in given], tape.states), total, losses)

    @torch.no_grad()
    def _change(self, tape: Tape, l: int, v: Tensor) -> Tensor:
        """D, (M, B): the change of the loss along each direction v (M, B, d), per unit of it."""
        replay = tape.replay
        h = tape.states[l].to(replay.states[l].dtype)
        step = self.epsilon * v.reshape(-1, *h.shape).to(h.dtype)
        tail = lambda at: replay.tail(l, at.flatten(0, 1)).view(v.shape[:2])  # noqa: E731
        if self.targets == "one-sided":
            # the unmoved batch as often as the moved one: so both meet the same dropout masks
            return (tail(h + step) - tail(h.expand_as(step))) / self.epsilon
        return (tail(h + step) - tail(h - step)) / (2 * self.epsilon)

    def capture_obstacle(self, site: Site) -> str | None:
        """Replays rewind the random state."""
        return "finite differences, for which the network is replayed with the random state put back"
