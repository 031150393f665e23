"""A weighted sum of two rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, undisturbed
from creditscope.rules._base import Feedback, Injection, LocalRule, Outcome, Rule, Site, accumulate, require


@dataclass(frozen=True)
class Pair(Rule):
    """Two rules on one network, each with its own feedback and estimators."""

    first: Rule
    """The one rule."""
    second: Rule
    """The other rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first", "second"):
            rule = getattr(self, name)
            require(isinstance(rule, Rule), f"{type(self).__name__}.{name} must be a rule, not {rule!r}")
            kind = type(rule).__name__
            require(not rule.bypasses_blocks, f"{type(self).__name__} cannot hold {kind}, which has no blocks")

    @property
    def has_feedback(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether either has."""
        return self.first.has_feedback or self.second.has_feedback

    @property
    def has_estimators(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether either has."""
        return self.first.has_estimators or self.second.has_estimators

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Build both pathways; ``feedback`` is a dict of "first" and "second"."""
        given = feedback if feedback is not None else {}
        require(
            isinstance(given, Mapping) and set(given) <= {"first", "second"},
            f"feedback= of {type(self).__name__} must be a dict with the keys 'first' and 'second'",
        )
        assert isinstance(given, Mapping)
        return nn.ModuleDict(
            {
                name: rule.build(site, generator, given.get(name))
                for name, rule in (("first", self.first), ("second", self.second))
            }
        )

    def prepare(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> dict[str, Tensor]:
        """Train the estimators of both."""
        first = self.first.prepare(site, pathway.get_submodule("first"), x, y, scale)
        second = self.second.prepare(site, pathway.get_submodule("second"), x, y, scale)
        return {**_named("first", first), **_named("second", second)}

    def estimator_groups(self, pathway: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of both, each at its own rate."""
        first, second = pathway.get_submodule("first"), pathway.get_submodule("second")
        return self.first.estimator_groups(first) + self.second.estimator_groups(second)

    def refuse(self, site: Site) -> None:
        """Both must be defined, and driven by the same states."""
        self.first.refuse(site)
        self.second.refuse(site)
        super().refuse(site)

    def frozen(self, site: Site) -> set[str]:
        """Return what both leave alone."""
        return self.first.frozen(site) & self.second.frozen(site)

    def exact_states(self, site: Site) -> set[int]:
        """Return the states where both are exact."""
        return self.first.exact_states(site) & self.second.exact_states(site)

    def driving_states(self, site: Site) -> list[int]:
        """Return the first rule's; the second's must be the same."""
        first, second = self.first.driving_states(site), self.second.driving_states(site)
        require(
            first == second,
            f"{type(self).__name__}: the two rules drive blocks by different states ({first} and {second}); give both "
            "the same drive",
        )
        return first

    def phase(self, site: Site) -> tuple[int, ...]:
        """Both phases."""
        return (*self.first.phase(site), *self.second.phase(site))

    def capture_obstacle(self, site: Site) -> str | None:
        """Return what stands in the way of either."""
        return self.first.capture_obstacle(site) or self.second.capture_obstacle(site)


@dataclass(frozen=True)
class Blend(Pair):
    """weight × first + (1 − weight) × second: of the credits, and so of the gradients.

    Each rule normalises its own credit first. Two local rules share one forward and one backward pass; others take
    one pass each, with the same random draws, and their gradients are added.
    """

    weight: float = 0.5
    """The share of the first rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.weight <= 1, f"Blend.weight must lie between 0 and 1, not {self.weight}")

    @property
    def _parts(self) -> list[tuple[str, Rule, float]]:
        return [("first", self.first, self.weight), ("second", self.second, 1 - self.weight)]

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return the weighted sum of both credits, on the same random draws."""
        both = []
        for name, rule, weight in self._parts:
            with undisturbed(site.cut.network):
                both.append([weight * a for a in rule.credits(site, pathway.get_submodule(name), x, y)])
        return [a + b for a, b in zip(*both, strict=True)]

    def drives(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> Injection:
        """Return the weighted sum of what drives each segment."""
        parts = []
        for name, rule, weight in self._parts:
            with undisturbed(site.cut.network):
                parts.append((name, rule.drives(site, pathway.get_submodule(name), x, y), weight))
        return _sum(parts)

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Take one step for both where they are local, one each otherwise."""
        first, second = self.first, self.second
        if isinstance(first, LocalRule) and isinstance(second, LocalRule) and self._is_one_step:
            return self._one_step(site, pathway, x, y, scale, [first, second])
        network = site.cut.network
        with undisturbed(network):
            before = first.step(site, pathway.get_submodule("first"), x, y, scale * self.weight)
        after = second.step(site, pathway.get_submodule("second"), x, y, scale * (1 - self.weight))
        return Outcome(
            after.loss, after.outputs, {**_named("first", before.metrics), **_named("second", after.metrics)}
        )

    @property
    def _is_one_step(self) -> bool:
        """Whether both take the common step of local rules, which they can then take together."""
        return all(isinstance(rule, LocalRule) and _is_plain(rule) for rule in (self.first, self.second))

    def _one_step(
        self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor, rules: list[LocalRule]
    ) -> Outcome:
        leaf = any(rule.needs_terminal_gradient for rule in rules)
        with site.cut.tape(x, y, leaf=leaf, replayed=any(rule.needs_replay for rule in rules)) as tape:
            parts = [
                (name, rule.injection(site, pathway.get_submodule(name), tape), weight)
                for (name, _, weight), rule in zip(self._parts, rules, strict=True)
            ]
            joint = _sum(parts)
            tape.backward(joint.credits, scale, branch=joint.branch)
        accumulate(joint.estimators, scale)
        return Outcome(tape.losses.mean(), tape.output.detach(), joint.metrics)

    def capture_obstacle(self, site: Site) -> str | None:
        """Two passes rewind the random state in between, which a graph cannot."""
        aside = None if self._is_one_step else "a blend of rules that need a pass each"
        return super().capture_obstacle(site) or aside


def _is_plain(rule: Rule) -> bool:
    """Tell whether a local rule takes the common step (weight-level FA does not)."""
    return getattr(rule, "level", "block") == "block"


def _named(part: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}_{name}": value for name, value in metrics.items()}


def _sum(parts: list[tuple[str, Injection, float]]) -> Injection:
    """Return the weighted sum of injections; a branch without penalty counts as zero."""
    credits = [
        sum(weight * a for a, weight in zip(at, [w for _, _, w in parts], strict=True) if a is not None)
        for at in zip(*(part.credits for _, part, _ in parts), strict=True)
    ]
    penalised = [(part.branch, weight) for _, part, weight in parts if part.branch]
    layers = range(len(credits) - 1) if penalised else ()
    branch = [sum(weight * terms[l] for terms, weight in penalised) for l in layers]
    metrics = {key: value for name, part, _ in parts for key, value in _named(name, part.metrics).items()}
    estimators = [pair for _, part, _ in parts for pair in part.estimators]  # which learn alike whatever the weights
    return Injection(credits, branch, metrics, estimators)  # pyright: ignore[reportArgumentType]
