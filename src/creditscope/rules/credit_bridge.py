"""Credit Bridge: learn the loss to be expected from each state, and take its gradient for credit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from creditscope.calling import plain_precision
from creditscope.estimators import EMA, ValueNet
from creditscope.rules._base import Feedback, Rule, Site, require
from creditscope.rules._learned import (
    Batch,
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
from creditscope.rules.dfa import DFA
from creditscope.tape import Tape


def bridge_target(values: Tensor, temperature: float) -> Tensor:
    """V* = −λ·(logsumexp_k(−V_k/λ) − log K), the soft minimum over K samples: (K, …) -> (…)."""
    return -temperature * (torch.logsumexp(-values / temperature, dim=0) - math.log(len(values)))


def value_gradient(value: Tensor, h: Tensor, *, create_graph: bool = False) -> Tensor:
    """∇_h V per example; the graph of V is kept."""
    return torch.autograd.grad(value.sum(), h, retain_graph=True, create_graph=create_graph)[0]


@dataclass(frozen=True)
class CreditBridge(LearnedRule):
    """Credit Bridge: a_l = ∇_{h_l} V(h_l, l/L, s) for l = 0..L, where V learns the loss to be expected from a state.

    V minimises w·mean (V(h_L, 1, s) − ℓ)² + w'·mean ‖∇_h V(h_L, 1, s) − g_L‖² + (1/L) Σ_l mean (V(h_l, l/L, s) − V*_l)²
    with V*_l = −λ·(logsumexp_k(−V_ema(h_{l+1} + σε_k, (l+1)/L, s)/λ) − log K), ε_k ~ N(0, I), λ the temperature and
    V_ema a slow average of V that makes targets only. s is the error e, or g_L. For the first ``warmup`` of the
    training the network is trained by direct feedback alignment while V learns.

    Hao, Wan & Zhai, arXiv 2606.21126 (2026), where it is a probe in the spirit of synthetic gradients (Jaderberg et
    al., ICML 2017), with the soft backup of path-integral control (Kappen, 2005). Deviations: block l is driven by the
    credit at its output (the study: at its input). Without the terminal gradient the study found values right and
    gradients useless.
    """

    condition: Condition = field(default="error", kw_only=True)
    """s: the error e, or g_L, which is local to the head."""
    temperature: float = field(default=0.1, kw_only=True)
    """λ of the soft minimum: towards 0 a minimum, towards ∞ a mean."""
    samples: int = field(default=4, kw_only=True)
    """K, the noisy copies of the next state in a target."""
    sigma: float = field(default=0.05, kw_only=True)
    """σ of their noise; at 0 the target is the plain bootstrap V_ema(h_{l+1})."""
    ema: float = field(default=0.995, kw_only=True)
    """The momentum of the average that makes the targets."""
    terminal_weight: float = field(default=1.0, kw_only=True)
    """w, of the value at h_L."""
    terminal_grad_weight: float = field(default=1.0, kw_only=True)
    """w', of the gradient at h_L."""
    clip: float | None = field(default=1.0, kw_only=True)
    """The largest norm of V's gradient, of this call's unscaled mean loss."""
    warmup: float = field(default=0.0, kw_only=True)
    """The fraction of the training in which direct feedback alignment trains the network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, f"rule.temperature must be positive, not {self.temperature}")
        require(self.samples >= 1, f"rule.samples must be at least 1, not {self.samples}")
        require(self.sigma >= 0, f"rule.sigma must not be negative, not {self.sigma}")
        require(0 <= self.ema < 1, f"rule.ema is a momentum of at least 0 and below 1, not {self.ema}")
        require(0 <= self.warmup <= 1, f"rule.warmup is a fraction of the training, between 0 and 1, not {self.warmup}")
        for name in ("terminal_weight", "terminal_grad_weight"):
            require(getattr(self, name) >= 0, f"rule.{name} must not be negative, not {getattr(self, name)}")

    @property
    def has_feedback(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The warm-up's matrices."""
        return self.warmup > 0

    @cached_property
    def _before(self) -> DFA:
        """The rule of the warm-up; what is done with its credit is this rule's."""
        return DFA()

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Draw V, begin its average, and draw the matrices of the warm-up."""
        pathway = nn.ModuleDict()
        if self.warmup:
            site.fraction(self.warmup)
            pathway["warmup"] = self._before.build(site, generator, feedback)
        else:
            Rule.build(self, site, generator, feedback)
        entries = condition_size(site, self.condition)
        value = ValueNet(sizes_of(site), entries, generator=generator, architecture=self.architecture)
        pathway["value"] = value.to(**site.factory)
        pathway["average"] = EMA(pathway["value"], self.ema)
        if self.sigma:
            site.start_noise(generator)
        return pathway

    def warms_up(self, site: Site) -> bool:
        """Tell whether the network is still trained by direct feedback alignment."""
        return self.warmup > 0 and site.is_before(self.warmup)

    def credit(self, site: Site, pathway: nn.Module, tape: Tape) -> Sequence[Tensor]:
        """a_l = ∇_{h_l} V(h_l, l/L, s), or B_l e in the warm-up."""
        if self.warms_up(site):
            return self._before.credit(site, pathway.get_submodule("warmup"), tape)
        value, states = pathway.get_submodule("value"), tape.states
        with torch.enable_grad(), plain_precision(tape.output):
            s = condition_of(tape, self.condition, value)
            batches = stacked(states, range(len(states)), value)
            gradients = [value_gradient(value(b.h.requires_grad_(), b.t, s), b.h) for b in batches]
        return shaped(by_layer(batches, gradients), states)

    def estimate(self, site: Site, pathway: nn.Module, tape: Tape) -> Estimate:
        """Return credits and loss: V sees h_0..h_{L−1} in one call, and h_L, of which it learns more, in another."""
        value, states = pathway.get_submodule("value"), tape.states
        s = condition_of(tape, self.condition, value)
        inner = stacked(states, range(len(states) - 1), value)
        values = [value(b.h.requires_grad_(), b.t, s) for b in inner]
        (last,) = stacked(states, [len(states) - 1], value)
        at_last = value(last.h.requires_grad_(), last.t, s)
        matched = self.terminal_grad_weight > 0
        gradient = value_gradient(at_last, last.h, create_graph=matched)
        losses = {
            "terminal_loss": (at_last - tape.losses.to(s.dtype)).square().mean(),
            "bridge_loss": (torch.stack(by_layer(inner, values)) - self._targets(site, pathway, tape, s))
            .square()
            .mean(),
        }
        total = self.terminal_weight * losses["terminal_loss"] + losses["bridge_loss"]
        if matched:
            exact = terminal_gradient(tape).flatten(1).to(s.dtype)
            losses["terminal_grad_loss"] = (gradient - exact).square().sum(-1).mean()
            total = total + self.terminal_grad_weight * losses["terminal_grad_loss"]
        if self.warms_up(site):
            return Estimate(self.credit(site, pathway, tape), total, losses)
        inside = [value_gradient(v, b.h) for v, b in zip(values, inner, strict=True)]
        return Estimate(shaped([*by_layer(inner, inside), *gradient.detach()], states), total, losses)

    @torch.no_grad()
    def _targets(self, site: Site, pathway: nn.Module, tape: Tape, s: Tensor) -> Tensor:
        """V*_0..V*_{L−1}, (L, B): all samples of all states of one size in one call."""
        value, average = pathway.get_submodule("value"), pathway.get_submodule("average")
        assert isinstance(average, EMA)
        average.advance(value)
        following = stacked(tape.states, range(1, len(tape.states)), value)
        targets = [bridge_target(average(self._noisy(site, b), b.t, s), self.temperature) for b in following]
        return torch.stack(by_layer(following, targets))

    def _noisy(self, site: Site, batch: Batch) -> Tensor:
        """h + σε_k, (K, n, B, d); without noise one sample is all of them."""
        h = batch.h.unsqueeze(0)
        if not self.sigma:
            return h
        generator = site.noise_on(h.device)
        noise = torch.randn(self.samples, *batch.h.shape, generator=generator, device=h.device, dtype=h.dtype)
        return noise.mul_(self.sigma).add_(h)

    def phase(self, site: Site) -> tuple[int, ...]:
        """Whether the warm-up is over."""
        return (int(not self.warms_up(site)),) if self.warmup else ()
