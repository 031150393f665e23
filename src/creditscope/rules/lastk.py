"""Freeze the first blocks and train the rest by any rule: the rungs of a depth ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, gradients_of
from creditscope.rules._base import Feedback, Injection, Outcome, Rule, Site, require


@dataclass(frozen=True)
class Wrapper(Rule):
    """A rule that changes another rule's step and leaves its credit alone."""

    @property
    def inner(self) -> Rule:
        """The rule that makes the credit."""
        raise NotImplementedError

    @property
    def has_feedback(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the inner rule."""
        return self.inner.has_feedback

    @property
    def has_estimators(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the inner rule."""
        return self.inner.has_estimators

    @property
    def bypasses_blocks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the inner rule."""
        return self.inner.bypasses_blocks

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Build the inner rule's pathway."""
        return self.inner.build(site, generator, feedback)

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return the inner rule's credits."""
        return self.inner.credits(site, pathway, x, y)

    def drives(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> Injection:
        """Return what the inner rule drives each segment by."""
        return self.inner.drives(site, pathway, x, y)

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Take the inner rule's step with the frozen parameters switched off."""
        parameters = dict(site.cut.network.named_parameters())
        with gradients_of([parameters[name] for name in sorted(self.frozen(site))], False):
            return self.inner.step(site, pathway, x, y, scale)

    def prepare(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> dict[str, Tensor]:
        """Train the inner rule's estimators."""
        return self.inner.prepare(site, pathway, x, y, scale)

    def estimator_groups(self, pathway: nn.Module) -> list[dict[str, Any]]:
        """As the inner rule."""
        return self.inner.estimator_groups(pathway)

    def refuse(self, site: Site) -> None:
        """As the inner rule."""
        self.inner.refuse(site)

    def frozen(self, site: Site) -> set[str]:
        """As the inner rule."""
        return self.inner.frozen(site)

    def exact_states(self, site: Site) -> set[int]:
        """As the inner rule."""
        return self.inner.exact_states(site)

    def driving_states(self, site: Site) -> list[int]:
        """As the inner rule."""
        return self.inner.driving_states(site)

    def phase(self, site: Site) -> tuple[int, ...]:
        """As the inner rule."""
        return self.inner.phase(site)

    def capture_obstacle(self, site: Site) -> str | None:
        """As the inner rule."""
        return self.inner.capture_obstacle(site)


@dataclass(frozen=True)
class LastK(Wrapper):
    """The first L − k blocks stay as they are; the stem, the last k blocks and the head are trained by ``rule``.

    k = 0 is the rule's own frozen baseline: what it reaches without any of its depth.
    """

    rule: Rule
    """The rule that trains the rest."""
    k: int = 0
    """The number of blocks, counted from the last, that are trained."""

    @property
    def inner(self) -> Rule:
        """The rule that trains the rest."""
        return self.rule

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.rule, Rule), f"LastK.rule must be a rule, not {self.rule!r}")
        require(self.k >= 0, f"LastK.k must not be negative, not {self.k}")

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Check k against the depth and build the inner rule's pathway."""
        require(self.k <= site.cut.depth, f"LastK.k is {self.k}, but the network has {site.cut.depth} blocks")
        return super().build(site, generator, feedback)

    def frozen(self, site: Site) -> set[str]:
        """Return the parameters of the first L − k blocks, and what the inner rule freezes."""
        first = [*site.cut.blocks][: site.cut.depth - self.k]
        return {name for block in first for name in site.topology.sections[block]} | self.rule.frozen(site)
