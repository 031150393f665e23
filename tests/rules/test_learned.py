"""What learned rules share, on every network of the zoo: the head by itself, credits that touch nothing, the step."""

from __future__ import annotations

import copy

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import DFA, Blend, CreditBridge, LastK, StateBridge, VectorField
from creditscope.rules._base import accumulate
from tests.oracles import assert_close, assert_same, left, local_step, loss_of, unrolled, untouched
from tests.rules.bench import CALM, DETERMINISTIC, attached
from tests.rules.learned import SMALL, estimator_grads
from tests.zoo import BY_NAME, CASES

LEARNED = [StateBridge(**SMALL), CreditBridge(**SMALL), VectorField(**SMALL)]
NAMED = [pytest.param(rule, id=type(rule).__name__) for rule in LEARNED]
OUTSIDE = BY_NAME["outside"]


def attached_or_skip(rule, case):
    try:
        learner, net, x, y = attached(rule, case)
        learner.credits(x, y)
        copy.deepcopy(learner).backward(copy.deepcopy(x), y)
    except UsageError as refusal:
        pytest.skip(str(refusal))
    return learner, net, x, y


@CALM
@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
@pytest.mark.parametrize("rule", NAMED)
def test_a_step_is_the_credits_and_nothing_of_the_estimators(rule, case):
    learner, net, x, y = attached_or_skip(rule, case)
    credits = learner.credits(copy.deepcopy(x), y)
    expected = local_step(net, copy.deepcopy(x), y, lambda *_: credits, scale=0.5)
    learner.backward(x, y, scale=0.5)
    assert_same(left(net), expected)
    assert any(bool(g.any()) for g in estimator_grads(learner))


@CALM
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rule", NAMED)
def test_credits_touch_nothing(rule, case):
    learner, net, x, y = attached_or_skip(rule, case)
    streams = [g for g in (learner.generator, learner.site.noise) if g is not None]
    state = {name: t.clone() for name, t in learner.pathway.state_dict().items()}
    for p in learner.parameters():
        p.grad = torch.ones_like(p)
    with untouched(net, *streams):
        learner.credits(copy.deepcopy(x), y)
        learner.coverage(copy.deepcopy(x), y)
    assert all(torch.equal(t, state[name]) for name, t in learner.pathway.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in learner.pathway.parameters())


@CALM
@pytest.mark.parametrize("case", [c for c in DETERMINISTIC if not c.name.startswith("reentrant")], ids=str)
def test_the_head_by_itself(case):
    net = case.network()
    x, y = case.batch()
    learner = DFA().attach(net, **case.cut)
    with learner.cut.tape(x, y) as tape:
        h = tape.states[-1]
        several = torch.cat([h, 2 * h, h + 1]).requires_grad_()
        expected = torch.cat([net.rest(part, x) for part in several.split(len(h))])
        before = {name: b.clone() for name, b in net.named_buffers()}
        try:
            output = tape.head(several)
        except UsageError as refusal:
            pytest.skip(str(refusal))
        losses = tape.head_losses(several)
        assert_close([output], [expected])
        wanted = torch.cat([loss_of(net)(part, y) for part in expected.split(len(h))])
        assert_close([losses], [wanted])
        (found,) = torch.autograd.grad(losses.sum(), several)
        assert_close([found], torch.autograd.grad(wanted.sum(), several))
        tape.head_losses(several).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())


@pytest.mark.parametrize("rule", NAMED)
def test_gradient_accumulation_and_scale(rule):
    learner, *_, x, y = attached(rule, OUTSIDE)
    start = copy.deepcopy(learner)
    learner.backward(x, y, scale=0.25)
    learner.backward(x, y, scale=torch.tensor(0.5))
    start.backward(x, y)
    first = estimator_grads(start)
    start.zero_grad()
    start.backward(x, y)
    assert_close(
        estimator_grads(learner), [0.25 * a + 0.5 * b for a, b in zip(first, estimator_grads(start), strict=True)]
    )


@pytest.mark.parametrize("rule", NAMED)
def test_a_frozen_network_trains_the_estimators_alone(rule):
    learner, net, x, y = attached(rule, OUTSIDE)
    expected = copy.deepcopy(learner)
    expected.backward(x, y)
    net.requires_grad_(False)
    learner.backward(x, y)
    assert all(p.grad is None for p in net.parameters())
    assert_close(estimator_grads(learner), estimator_grads(expected))


def test_estimators_that_the_user_freezes_stay_as_they_are():
    learner, net, x, y = attached(LEARNED[0], OUTSIDE)
    learner.pathway.requires_grad_(False)
    learner.backward(x, y)
    assert all(p.grad is None for p in learner.pathway.parameters())
    assert any(p.grad is not None for p in net.parameters())


def test_both_of_a_blend_learn_as_if_alone_each_at_its_own_rate():
    first, second = StateBridge(**SMALL, estimator_lr=0.1), CreditBridge(**SMALL, sigma=0.0, estimator_lr=0.2)
    learner, _, x, y = attached(Blend(first, LastK(second, 1), 0.3), OUTSIDE)
    both, _, x, y = attached(Blend(first, second, 0.3), OUTSIDE)
    assert [g["lr"] for g in learner.param_groups(lr=1.0)] == [1.0, 0.1, 0.2]
    for one in (learner, both):
        one.backward(x, y)
    for name, rule in (("first", first), ("second", second)):
        alone, *_ = attached(rule, OUTSIDE)
        alone.pathway.load_state_dict(both.pathway.get_submodule(name).state_dict())
        alone.backward(x, y)
        found = [p.grad for p in both.pathway.get_submodule(name).parameters()]
        assert_close(found, estimator_grads(alone))


def test_states_of_one_size_are_one_call():
    for rule in LEARNED:
        learner, _, x, y = attached(rule, BY_NAME["mask-keyword"])
        net = learner.pathway if not isinstance(rule, CreditBridge) else learner.pathway["value"]
        seen = []
        net.register_forward_hook(lambda m, args, out, seen=seen: seen.append(tuple(args[0].shape)))
        learner.backward(x, y)
        rows = {StateBridge: [2], CreditBridge: [2, 1], VectorField: [3]}[type(rule)]
        assert [shape[0] for shape in seen] == rows


def test_accumulating_into_nothing_and_into_something():
    p = torch.nn.Parameter(torch.zeros(2))
    accumulate([(p, torch.tensor([1.0, 2.0]))], 2.0)
    accumulate([(p, torch.tensor([1.0, 0.0]))], torch.tensor(0.5))
    assert p.grad.tolist() == [2.5, 4.0]


def test_the_noise_follows_the_network_and_is_saved_with_the_learner():
    learner, _, x, y = attached(CreditBridge(**SMALL), OUTSIDE)
    learner.backward(x, y)
    saved = learner.state_dict()["_extra_state"]
    assert {"generator", "step", "noise_cpu"} == saved.keys()
    other, *_ = attached(CreditBridge(**SMALL), OUTSIDE, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(other.site.noise.get_state(), learner.site.noise.get_state())
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.site.noise.get_state(), learner.site.noise.get_state())


def test_the_head_is_the_unrolled_networks(untouched_rng):
    net = OUTSIDE.network()
    x, y = OUTSIDE.batch()
    with DFA().attach(net, **OUTSIDE.cut).cut.tape(x, y) as tape:
        assert_close([tape.head(tape.states[-1])], [unrolled(net, x)[1].detach()])
