"""The source study's recipes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from creditscope.errors import UsageError
from creditscope.rules import BP, DFA, FA, Frozen, LocalRule, Shallow
from creditscope.rules.study import STUDY


def test_the_recipes_of_the_study():
    assert DFA.study() == DFA(normalise="example", normalise_floor=1e-6, drive="input")
    assert FA.study() == FA(level="block", normalise="example", normalise_floor=128e-6, drive="input")
    assert BP.study() == BP()
    assert Frozen.study() == Frozen(stem="dfa", normalise="example")
    assert Shallow.study() == Shallow()


def test_defaults_are_plain():
    plain = {"normalise": "none", "penalty": 0.0, "drive": "output", "scale": 1.0, "distribution": "normal"}
    for rule in (DFA(), FA(level="block")):
        assert {name: getattr(rule, name) for name in plain} == plain
    assert FA().level == "weight"


def test_each_gives_its_evidence():
    assert all(entry.evidence for entry in STUDY.values())


def test_a_rule_that_the_study_does_not_have():
    @dataclass(frozen=True)
    class Mine(LocalRule):
        """Mine."""

    with pytest.raises(UsageError, match="the source study has no recipe for"):
        Mine.study()
