"""On CIFAR-10: the study's degenerate network is flagged for its scale while its reference still holds."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import creditscope as cs
from creditscope.data import Loader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("CREDITSCOPE_DATA" not in os.environ, reason="CREDITSCOPE_DATA names no folder of real data"),
]
BATCH = 1024
FLOOR, GROWTH = 1e-7, 50.0


class SeenEnough(Exception):  # noqa: N818
    """The training may end."""


@dataclass
class Watch:
    """Audits at the end of each epoch; from epoch 0 to ``until``."""

    x: Any
    y: Any
    until: int
    audits: dict[int, Any] = field(default_factory=dict)

    def __call__(self, end: Any) -> None:
        if end.epoch <= self.until:
            tier: Any = "standard" if end.epoch == self.until else "quick"
            self.audits[end.epoch] = cs.audit(end.learner, self.x, self.y, tier=tier, nulls=50)
        if end.epoch == self.until:
            raise SeenEnough

    def first(self, fires: Any) -> int | None:
        return next((epoch for epoch, audit in sorted(self.audits.items()) if epoch and fires(audit.data)), None)


def reference_rule(data: Any) -> bool:
    """The published rule at B = 1024: the median norm of the mean-reduced gradient at h_L below 1e-7."""
    return float(data.published_reference_norm[-1]) * data.published_reference_norm.attrs["batch"] / BATCH < FLOOR


def growth_rule(data: Any) -> bool:
    return float(data.max_growth) > GROWTH


def watched(rule: Any, epochs: int, until: int, **options: Any) -> Watch:
    data = cs.data.load("cifar10")
    x, y = next(iter(Loader(data.test, dataset=data, batch=BATCH, augment="none").ordered()))
    watch = Watch(x, y, until)
    make = lambda: cs.nets.ResMLP(inputs=3072, width=256, depth=4)  # noqa: E731
    with torch.random.fork_rng(devices=[]), contextlib.suppress(SeenEnough):
        cs.fit(make, rule, data, epochs=epochs, seed=42, threads=2, callbacks=[watch], **options)
    assert until in watch.audits
    return watch


def test_dfa_at_a_constant_rate_unclipped_is_flagged_for_scale_and_not_for_its_reference():
    watch = watched(cs.rules.DFA(normalise="example"), 5, 5, schedule="constant")
    last = watch.audits[5]
    assert float(last.data.max_growth) > 50
    assert float(last.data.state_norm[-1]) > 1e5
    assert "scale-stability" in last.verdict.flags
    assert "reference-validity" not in last.verdict.flags
    assert float(last.data.precision_error.max()) < 1e-4
    fired = watch.first(reference_rule)
    assert fired is not None
    assert 1 <= fired <= 4


def test_dfa_in_the_studys_recipe_fires_when_the_study_says():
    watch = watched(cs.rules.DFA.study(), 100, 11, recipe=cs.recipes.study)
    reference, growth = watch.first(reference_rule), watch.first(growth_rule)
    assert reference in (3, 4, 5)
    assert growth in range(7, 12)


def test_backpropagation_passes_all():
    watch = watched(cs.rules.BP(), 100, 5, recipe=cs.recipes.study)
    assert watch.first(reference_rule) is None
    assert watch.first(growth_rule) is None
    assert watch.audits[5].verdict.passed
