"""The first L − k blocks stay, whatever the rule."""

from __future__ import annotations

import pytest

from creditscope.errors import UsageError
from creditscope.rules import BP, DFA, FA, LastK
from tests.oracles import assert_same, left
from tests.rules.bench import DETERMINISTIC, attached
from tests.zoo import BY_NAME

INNER = {"bp": BP(), "dfa": DFA(), "fa": FA(), "fa-block": FA(level="block")}


@pytest.mark.parametrize("case", [BY_NAME[n] for n in ("chain", "outside", "convolutional", "stages", "tied")], ids=str)
@pytest.mark.parametrize("name", INNER)
def test_what_is_trained_is_as_the_inner_rule_has_it(name, case):
    rule = INNER[name]
    for k in range(len(case.blocks) + 1):
        try:
            inner, net, x, y = attached(rule, case)
            inner.backward(x, y)
        except UsageError:
            return
        expected = left(net)
        for block in case.blocks[: len(case.blocks) - k]:
            expected |= dict.fromkeys(inner.sections[block])
        learner, net, x, y = attached(LastK(rule, k), case)
        learner.backward(x, y)
        assert_same(left(net), expected)
        assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("case", [c for c in DETERMINISTIC if c.name not in ("tied", "user-frozen")], ids=str)
def test_all_blocks_is_the_rule_itself(case):
    learner, net, x, y = attached(LastK(DFA(), len(case.blocks)), case)
    inner, twin, *_ = attached(DFA(), case)
    learner.backward(x, y)
    inner.backward(x, y)
    assert_same(left(net), left(twin), 0.0)
    assert learner.rule.frozen(learner.site) == set()


def test_more_blocks_than_there_are():
    with pytest.raises(UsageError, match=r"LastK.k is 3, but the network has 2 blocks"):
        attached(LastK(DFA(), 3), BY_NAME["outside"])


def test_wrapped_twice_the_smaller_k_counts():
    learner, net, x, y = attached(LastK(LastK(DFA(), 1), 2), BY_NAME["outside"])
    other, twin, *_ = attached(LastK(LastK(DFA(), 2), 1), BY_NAME["outside"])
    once, third, *_ = attached(LastK(DFA(), 1), BY_NAME["outside"])
    for one in (learner, other, once):
        one.backward(x, y)
    assert_same(left(net), left(third), 0.0)
    assert_same(left(twin), left(third), 0.0)


def test_it_speaks_for_the_inner_rule():
    learner, *_ = attached(LastK(FA(level="block", drive="input"), 1), BY_NAME["outside"])
    assert learner.driving_states == [0, 1]
    assert learner.exact_states == {2}
    assert learner.rule.has_feedback
    assert len([*learner.pathway.buffers()]) == 2
    assert not LastK(BP(), 1).has_feedback
