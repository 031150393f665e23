"""One rule first, another after a fraction of the training: warm-ups and hand-overs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, undisturbed
from creditscope.rules._base import Feedback, Injection, Outcome, Rule, Site, require
from creditscope.rules.blend import Pair


@dataclass(frozen=True)
class Handover(Pair):
    """``first`` for the first ``at`` × training_steps updates, ``second`` from then on.

    An update is a change of the network's parameters between two calls of ``backward``, so gradient accumulation
    counts once. The progress is saved with the learner. Where the second rule has estimators they learn from the
    beginning, in a pass of their own while the first rule trains the network.
    """

    at: float = 0.2
    """The fraction of the training at which the second rule takes over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.at <= 1, f"Handover.at is a fraction of the training, between 0 and 1, not {self.at}")

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Check that the training has a length, and build both pathways."""
        site.fraction(self.at)
        return super().build(site, generator, feedback)

    def active(self, site: Site) -> tuple[str, Rule]:
        """Return the rule whose turn it is, and its name."""
        return ("first", self.first) if site.is_before(self.at) else ("second", self.second)

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return the active rule's credits."""
        name, rule = self.active(site)
        return rule.credits(site, pathway.get_submodule(name), x, y)

    def drives(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> Injection:
        """Return what the active rule drives each segment by."""
        name, rule = self.active(site)
        return rule.drives(site, pathway.get_submodule(name), x, y)

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Take the active rule's step; meanwhile the second rule's estimators learn for their turn."""
        name, rule = self.active(site)
        if name == "second" or not self.second.has_estimators:
            return rule.step(site, pathway.get_submodule(name), x, y, scale)
        with undisturbed(site.cut.network):
            learned = self.second.prepare(site, pathway.get_submodule("second"), x, y, scale)
        outcome = rule.step(site, pathway.get_submodule(name), x, y, scale)
        ahead = {f"second_{key}" if key in outcome.metrics else key: value for key, value in learned.items()}
        return replace(outcome, metrics={**outcome.metrics, **ahead})

    def frozen(self, site: Site) -> set[str]:
        """As the active rule."""
        return self.active(site)[1].frozen(site)

    def exact_states(self, site: Site) -> set[int]:
        """As the active rule."""
        return self.active(site)[1].exact_states(site)

    def driving_states(self, site: Site) -> list[int]:
        """As the active rule; both are checked when the rule is attached."""
        self.first.driving_states(site)
        self.second.driving_states(site)
        return self.active(site)[1].driving_states(site)

    def phase(self, site: Site) -> tuple[int, ...]:
        """Which rule is active."""
        return (int(self.active(site)[0] == "second"), *super().phase(site))

    def capture_obstacle(self, site: Site) -> str | None:
        """A second pass rewinds the random state, which a graph cannot."""
        aside = "estimators that learn before their rule's turn, in a pass of their own"
        return super().capture_obstacle(site) or (aside if self.second.has_estimators else None)
