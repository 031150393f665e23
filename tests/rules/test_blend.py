"""A blend is the weighted sum of two rules' gradients."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import BP, DFA, FA, Blend, Frozen, LastK
from tests.oracles import assert_close, assert_same, left
from tests.rules.bench import attached
from tests.zoo import BY_NAME

PAIRS = {
    "local": (DFA(normalise="example", penalty=0.1), FA(level="block", normalise="batch")),
    "local-twice": (DFA(penalty=0.2), DFA(scale=2.0, penalty=0.1)),
    "bp-dfa": (BP(), DFA()),
    "weight-block": (FA(), FA(level="block")),
    "wrapped": (LastK(DFA(), 1), Frozen(stem="bp")),
    "nested": (Blend(DFA(), BP(), 0.2), FA()),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["outside", "chain", "dropout"])
def test_gradients_and_credits_are_the_weighted_sum(name, pair, weight, mode):
    case, (first, second) = BY_NAME[name], PAIRS[pair]
    learner, net, x, y = attached(Blend(first, second, weight), case)
    learner.train(mode == "train")
    parts, credits = [], []
    for share, rule, part in ((weight, first, "first"), (1 - weight, second, "second")):
        feedback = [*learner.pathway.get_submodule(part).buffers()]
        alone, twin, *_ = attached(rule, case)
        for mine, blended in zip(alone.pathway.buffers(), feedback, strict=True):
            mine.copy_(blended)
        alone.train(mode == "train")
        torch.manual_seed(7)
        alone.backward(x, y)
        parts.append({n: None if g is None else share * g for n, g in left(twin).items()})
        torch.manual_seed(7)
        credits.append([share * a for a in alone.credits(x, y)])
    expected = {n: add(g, parts[1][n]) for n, g in parts[0].items()}
    torch.manual_seed(7)
    learner.backward(x, y)
    assert_same(left(net), expected)
    torch.manual_seed(7)
    assert_close(learner.credits(x, y), [a + b for a, b in zip(*credits, strict=True)])


def add(a, b):
    return b if a is None else a if b is None else a + b


def test_metrics_are_named_by_their_part():
    learner, _, x, y = attached(Blend(DFA(penalty=0.1), DFA(penalty=0.2)), BY_NAME["outside"])
    learner.backward(x, y)
    assert set(learner.metrics()) == {"first_penalty", "second_penalty"}
    learner, _, x, y = attached(Blend(BP(penalty=0.1), DFA(penalty=0.2)), BY_NAME["outside"])
    learner.backward(x, y)
    assert set(learner.metrics()) == {"first_penalty", "second_penalty"}


def test_its_feedback_is_a_pair():
    own = [torch.ones(4, 3)] * 3
    learner, *_ = attached(Blend(DFA(), FA(level="block")), BY_NAME["outside"], feedback={"first": own})
    assert all(bool((b == 1).all()) for b in learner.pathway.get_submodule("first").buffers())
    for wrong in (own, {"frist": own}):
        with pytest.raises(UsageError, match="feedback= of Blend must be a dict with the keys 'first' and 'second'"):
            attached(Blend(DFA(), FA(level="block")), BY_NAME["outside"], feedback=wrong)
    with pytest.raises(UsageError, match="must hold 2 matrices"):
        attached(Blend(DFA(), FA(level="block")), BY_NAME["outside"], feedback={"second": own})


def test_two_drives_are_refused():
    with pytest.raises(UsageError, match="the two rules drive blocks by different states"):
        attached(Blend(DFA(drive="input"), DFA()), BY_NAME["outside"])


def test_states_that_are_exact_in_both():
    learner, *_ = attached(Blend(BP(), FA(level="block")), BY_NAME["outside"])
    assert learner.exact_states == {2}
