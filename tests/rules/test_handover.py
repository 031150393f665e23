"""One rule, then another: by updates of the network and not by calls."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import BP, DFA, FA, Handover, LastK
from tests.oracles import assert_close, assert_same, left
from tests.rules.bench import attached
from tests.zoo import BY_NAME

OUTSIDE = BY_NAME["outside"]
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused-sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused-adam": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "lbfgs-like": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def phases(learner, x, y, optimiser, steps, *, parts=1):
    seen = []
    for _ in range(steps):
        optimiser.zero_grad()
        for _ in range(parts):
            learner.backward(x, y, scale=1 / parts)
            seen.append(learner.phase[0])
        optimiser.step()
    return seen


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_the_second_rule_takes_over_after_its_share_of_the_updates(kind):
    learner, _, x, y = attached(Handover(DFA(), BP(), 0.4), OUTSIDE, training_steps=5)
    optimiser = OPTIMISERS[kind]([*learner.parameters()])
    assert phases(learner, x, y, optimiser, 5) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_accumulation_counts_once(kind):
    learner, _, x, y = attached(Handover(DFA(), BP(), 0.4), OUTSIDE, training_steps=5)
    optimiser = OPTIMISERS[kind]([*learner.parameters()])
    assert phases(learner, x, y, optimiser, 5, parts=3) == [0] * 6 + [1] * 9


def test_an_update_by_hand_counts():
    learner, net, x, y = attached(Handover(DFA(), BP(), 0.5), OUTSIDE, training_steps=4)
    seen = []
    for _ in range(4):
        net.zero_grad()
        learner.backward(x, y)
        seen.append(learner.phase[0])
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    assert seen == [0, 0, 1, 1]


def test_looking_and_another_networks_updates_do_not_count():
    learner, _, x, y = attached(Handover(DFA(), BP(), 0.5), OUTSIDE, training_steps=2)
    other = torch.nn.Linear(2, 2)
    elsewhere = torch.optim.AdamW(other.parameters(), fused=True)
    learner.backward(x, y)
    for _ in range(3):
        other(torch.ones(1, 2)).sum().backward()
        elsewhere.step()
        learner.credits(x, y)
        learner.states(x)
        learner.coverage(x, y)
        learner.eval()
        learner.train()
        learner.backward(x, y)
    assert learner.phase == (0,)


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_the_ends(at):
    learner, _, x, y = attached(Handover(DFA(), BP(), at), OUTSIDE, training_steps=3)
    optimiser = torch.optim.SGD(learner.parameters(), lr=0.1)
    assert phases(learner, x, y, optimiser, 3) == [int(at == 0.0)] * 3


def test_gradients_and_credits_are_the_active_rules():
    rule = Handover(DFA(drive="input"), LastK(FA(level="block", drive="input"), 1), 0.5)
    learner, net, x, y = attached(rule, OUTSIDE, training_steps=2)
    for name, inner in (("first", rule.first), ("second", rule.second)):
        feedback = [b.clone() for b in learner.pathway.get_submodule(name).buffers()]
        alone, twin, *_ = attached(inner, OUTSIDE, feedback=feedback)
        twin.load_state_dict(net.state_dict())
        net.zero_grad()
        learner.backward(x, y)
        alone.backward(x, y)
        assert_same(left(net), left(twin))
        assert_close(learner.credits(x, y), alone.credits(x, y))
        assert learner.exact_states == alone.exact_states
        with torch.no_grad():
            net.embed.weight.mul_(0.9)


def test_warm_ups_nest():
    rule = Handover(DFA(), Handover(BP(), FA(), 0.6), 0.2)
    learner, _, x, y = attached(rule, OUTSIDE, training_steps=10)
    optimiser = torch.optim.SGD(learner.parameters(), lr=0.01)
    seen = []
    for _ in range(10):
        optimiser.zero_grad()
        learner.backward(x, y)
        seen.append(learner.phase)
        optimiser.step()
    assert seen == [(0, 0)] * 2 + [(1, 0)] * 4 + [(1, 1)] * 4


def test_a_training_of_unknown_length_is_refused():
    with pytest.raises(UsageError, match="pass training_steps= to attach"):
        Handover(DFA(), BP()).attach(OUTSIDE.network(), example=OUTSIDE.batch()[0], **OUTSIDE.cut)


def test_both_drives_are_checked_at_once():
    with pytest.raises(UsageError, match="use drive='output'"):
        attached(Handover(BP(), DFA(drive="input")), BY_NAME["convolutional"])


def test_progress_is_saved_and_counts_an_update_that_is_yet_to_be_seen():
    learner, _, x, y = attached(Handover(DFA(), BP(), 0.5), OUTSIDE, training_steps=4)
    optimiser = torch.optim.AdamW(learner.parameters(), fused=True)
    phases(learner, x, y, optimiser, 2)
    other, *_ = attached(Handover(DFA(), BP(), 0.5), OUTSIDE, training_steps=4)
    other.load_state_dict(learner.state_dict())
    other.backward(x, y)
    assert other.phase == (1,)
    assert learner.phase == (1,)
