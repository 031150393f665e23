"""Equilibrium propagation against plain autograd of its energy, and against backpropagation for β → 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import creditscope as cs
from creditscope.errors import UsageError
from creditscope.rules import BP, EP, Blend, Handover, LastK
from tests.oracles import assert_close, assert_same, backprop, exact, gradients, left, loss_of, unrolled, untouched
from tests.rules.bench import CALM, attached
from tests.zoo import BY_NAME, CASES

OUTSIDE = BY_NAME["outside"]
RELAXED = [case for case in CASES if case.name != "several-consumers"]
"""All but the one that reads a state before it can be given another value."""
CALMLY = pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")

SIGNS = {"centred": (1, -1), "positive": (1,), "negative": (-1,)}


# --- slow and obvious -------------------------------------------------------------------------------------------------


def energy(net, x, y, states, beta):
    """½‖h_0 − stem(x)‖² + ½Σ‖h_{l+1} − F_l(h_l)‖² + β Σᵢ ℓᵢ."""
    total = (states[0] - net.stem(x)).square().sum() / 2 + beta * loss_of(net)(net.rest(states[-1], x), y).sum()
    for l in range(net.depth):
        total = total + (states[l + 1] - net.segment(l, states[l], x)[0]).square().sum() / 2
    return total


def descended(net, x, y, beta, steps, lr):
    """Descend from the forward pass, by autograd of the energy."""
    states = [h.detach().clone() for h in unrolled(net, x)[0]]
    for _ in range(steps):
        leaves = [h.clone().requires_grad_() for h in states]
        slopes = torch.autograd.grad(energy(net, x, y, [h * 1 for h in leaves], beta), leaves)
        states = [h - lr * slope for h, slope in zip(states, slopes, strict=True)]
    return states


def credits_of(net, x, states, beta):
    """−ε_l/β."""
    predicted = [net.stem(x), *(net.segment(l, h.clone(), x)[0] for l, h in enumerate(states[:-1]))]
    return [((f - h) / beta).detach() for f, h in zip(predicted, states, strict=True)]


def gradient_of(net, x, y, nudged, scale):
    """Mean over the signs of (∂E/∂θ)/β at the nudged states, of the mean loss."""
    terms = [energy(net, x, y, [h.clone() for h in states], beta) / beta for beta, states in nudged]
    return gradients(net, sum(terms) / len(terms) * scale / len(y))


def off(found, expected):
    """‖found − expected‖/‖expected‖ over all states."""
    pairs = [*zip(found, expected, strict=True)]
    return math.sqrt(
        sum(float((a - g).square().sum()) for a, g in pairs) / sum(float(g.square().sum()) for _, g in pairs)
    )


# --- the definition ---------------------------------------------------------------------------------------------------


@CALM
@CALMLY
@pytest.mark.parametrize("case", RELAXED, ids=str)
def test_credits_and_a_step_on_any_network(case):
    beta, steps, lr = 0.05, 4, 0.02  # too short a step to overshoot anywhere
    learner, net, x, y = attached(EP(beta=beta, steps=steps, state_lr=lr, tolerance=0.0), case)
    net.train(not case.random)
    nudged = [(sign * beta, descended(net, x, y, sign * beta, steps, lr)) for sign in (1, -1)]
    plus, minus = (credits_of(net, x, states, b) for b, states in nudged)
    with untouched(net, learner.generator):
        found = learner.credits(x, y)
    assert_close(found, [(a + b) / 2 for a, b in zip(plus, minus, strict=True)], 1e-8)
    expected = gradient_of(net, x, y, nudged, 0.25)
    learner.backward(x, y, scale=0.25)
    assert_same(left(net), expected, 1e-9)


@pytest.mark.parametrize("estimate", SIGNS)
def test_estimates(estimate):
    learner, net, x, y = attached(EP(beta=0.02, steps=30, state_lr=0.1, tolerance=0.0, estimate=estimate), OUTSIDE)
    nudged = [(sign * 0.02, descended(net, x, y, sign * 0.02, 30, 0.1)) for sign in SIGNS[estimate]]
    by_sign = [credits_of(net, x, states, beta) for beta, states in nudged]
    assert_close(learner.credits(x, y), [sum(a) / len(a) for a in zip(*by_sign, strict=True)], 1e-8)
    expected = gradient_of(net, x, y, nudged, 3.0)
    learner.backward(x, y, scale=3.0)
    assert_same(left(net), expected)


def test_the_residual_is_that_of_the_energy():
    learner, net, x, y = attached(EP(beta=0.02, steps=3, state_lr=0.1, estimate="positive"), OUTSIDE)
    learner.backward(x, y)
    states = [h.requires_grad_() for h in descended(net, x, y, 0.02, 3, 0.1)]
    slopes = torch.autograd.grad(energy(net, x, y, states, 0.02), states)
    errors = [0.02 * a for a in credits_of(net, x, states, 0.02)]
    slope, error = (math.sqrt(sum(float(h.square().sum()) for h in parts)) for parts in (slopes, errors))
    assert float(learner.metrics()["residual"]) == pytest.approx(slope / error, rel=1e-9)
    assert slope / error > 0.1


# --- β → 0 ------------------------------------------------------------------------------------------------------------

SMOOTH = [BY_NAME[name] for name in ("inner-skip", "outside", "mask-keyword", "tied")]


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize(("estimate", "slope"), [("positive", 1), ("negative", 1), ("centred", 2)])
def test_credits_tend_to_backprops(case, estimate, slope):
    net = case.network()
    x, y = case.batch()
    g = exact(net, x, y)[1]

    def error(beta):
        rule = EP(beta=beta, steps=400, estimate=estimate, tolerance=1e-10)
        return off(rule.attach(net, example=x, **case.cut).credits(x, y), g)

    coarse, fine = error(1e-3), error(2.5e-4)
    assert math.log(coarse / fine, 4) == pytest.approx(slope, abs=0.15)


@pytest.mark.parametrize("case", [*SMOOTH, BY_NAME["chain"], BY_NAME["no-stem"]], ids=str)
def test_at_a_small_beta_it_is_backprop(case):
    learner, net, x, y = attached(EP(beta=1e-5, steps=400, estimate="positive"), case)
    assert off(learner.credits(x, y), exact(net, x, y)[1]) < 2e-4
    learner, net, x, y = attached(EP(beta=1e-5, steps=400), case)
    assert off(learner.credits(x, y), exact(net, x, y)[1]) < 1e-6
    expected = backprop(net, x, y)
    loss = learner.backward(x, y)
    assert_same(left(net), expected, 1e-6)
    assert float(loss) == pytest.approx(float(loss_of(net)(learner.outputs, y).mean()))


@pytest.mark.parametrize(("beta", "rest"), [(1e-3, 1e-4), (1e-2, 1e-4), (0.1, 1e-4), (1.0, 0.05)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_default_step_is_at_rest_after_400(depth, beta, rest):
    """At β = 1 the states go where the blocks' norms are steep, and settle more slowly."""
    net = cs.nets.ResMLP(7, 16, depth, 3).double()
    x, y = torch.randn(6, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    learner = EP(beta=beta, steps=400).attach(net)
    learner.backward(x, y)
    assert float(learner.metrics()["residual"]) < rest


@pytest.mark.parametrize("beta", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize("name", ["chain", "inner-skip"])
def test_without_norms_it_is_at_rest_at_any_beta(name, beta):
    learner, _, x, y = attached(EP(beta=beta, steps=400), BY_NAME[name])
    learner.backward(x, y)
    assert float(learner.metrics()["residual"]) < 1e-7


def test_a_step_that_is_too_long_is_shortened():
    """E has curvatures up to 4 here: plain descent at .9 diverges."""
    found, expected = (
        attached(EP(beta=1e-3, steps=steps, state_lr=lr), OUTSIDE)[0] for steps, lr in ((1000, 0.9), (1000, 0.2))
    )
    x, y = OUTSIDE.batch()
    assert off(found.credits(x, y), expected.credits(x, y)) < 1e-5
    plain = descended(OUTSIDE.network(), x, y, 1e-3, 200, 0.9)
    assert not all(float(h.abs().max()) < 1e3 for h in plain)


# --- what it promises -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [1e-8, 0.05])
def test_every_example_relaxes_by_itself(tolerance):
    learner, _, x, y = attached(EP(beta=0.01, steps=100, tolerance=tolerance), OUTSIDE)
    alone = [learner.credits(x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    assert_close(learner.credits(x, y), [torch.cat(parts) for parts in zip(*alone, strict=True)], 1e-9)


def test_credits_stop_early_and_training_does_not():
    calls = []
    learner, net, x, y = attached(EP(beta=0.01, steps=300, tolerance=0.01, estimate="positive"), OUTSIDE)
    net.head.register_forward_hook(lambda *_: calls.append(1))
    learner.credits(x, y)
    assert 10 < len(calls) < 200
    calls.clear()
    learner.backward(x, y)
    assert len(calls) == 302  # the free phase, the steps, and the pass for the weights


def test_in_float32_it_stops_where_the_states_hold_no_more():
    calls = []
    net, (x, y) = OUTSIDE.network(dtype=torch.float32), OUTSIDE.batch(dtype=torch.float32)
    net.head.register_forward_hook(lambda *_: calls.append(1))
    credits = EP(beta=0.1, steps=3000, estimate="negative").attach(net, example=x, **OUTSIDE.cut).credits(x, y)
    assert len(calls) < 2000
    assert all(a.dtype == torch.float32 for a in credits)


class Watched(TorchDispatchMode):
    """Takes down what a device would have to be waited for."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits.append(func)
        return func(*args, **(kwargs or {}))


def test_a_training_step_waits_for_nothing():
    learner, _, x, y = attached(EP(steps=3), OUTSIDE)
    with Watched() as watched:
        learner.backward(x, y)
    assert watched.waits == []
    with Watched() as watched:
        learner.credits(x, y)  # it looks whether it may stop
    assert watched.waits


@pytest.mark.parametrize("name", ["dropout", "dropout-between"])
def test_masks_are_those_of_the_free_phase(name):
    learner, net, x, y = attached(EP(beta=1e-5, steps=400), BY_NAME[name])
    net.train()
    torch.manual_seed(7)
    expected = backprop(net, x, y)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    assert off(learner.credits(x, y), _seeded(lambda: exact(net, x, y)[1])) < 1e-3
    torch.manual_seed(7)
    learner.backward(x, y)
    assert_same(left(net), expected, 1e-3)
    assert torch.equal(torch.get_rng_state(), after)


def _seeded(run):
    torch.manual_seed(7)
    return run()


def test_buffers_are_updated_once():
    case = BY_NAME["stages"]
    learner, net, x, y = attached(EP(steps=3), case)
    twin = case.network().train()
    twin(x)
    learner.backward(x, y)
    assert {name for name, _ in net.named_buffers()}
    for (name, got), want in zip(net.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(got, want), name


def test_with_other_rules():
    half, net, x, y = attached(Blend(EP(beta=1e-4, steps=400), BP(), 0.5), OUTSIDE)
    expected = backprop(net, x, y)
    half.backward(x, y)
    assert_same(left(net), expected, 1e-4)
    last, net, x, y = attached(LastK(EP(steps=3), 1), OUTSIDE)
    last.backward(x, y)
    assert {name for name, g in left(net).items() if g is None} == {
        n for n, _ in net.named_parameters() if "blocks.0" in n
    }
    handed, net, x, y = attached(Handover(EP(steps=3), BP(), at=0.5), OUTSIDE)
    handed.backward(x, y)
    assert "residual" in handed.metrics()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "rule.beta must be positive, not 0.0"),
        ({"beta": -0.1}, "rule.beta must be positive, not -0.1: its sign is what rule.estimate says"),
        ({"beta": float("nan")}, "rule.beta must be a finite number"),
        ({"steps": 0}, "rule.steps must be at least 1, not 0"),
        ({"steps": 2.5}, "rule.steps must be a whole number"),
        ({"state_lr": 0.0}, "rule.state_lr must be positive, not 0.0"),
        ({"tolerance": -1.0}, "rule.tolerance must not be negative"),
        ({"estimate": "centered"}, "unknown rule.estimate 'centered': did you mean 'centred'?"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError) as caught:
        EP(**options)
    assert message in str(caught.value)


def test_a_state_that_is_read_too_early_is_refused_by_name():
    with pytest.raises(UsageError, match="state 0 is read before it enters its module"):
        attached(EP(), BY_NAME["several-consumers"])


class Hard(nn.Module):
    """Its output is no function of the last state for autograd."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(self.stem(x)).detach())


@pytest.mark.parametrize("call", ["credits", "backward"])
def test_a_loss_that_is_not_differentiable_at_the_last_state(call):
    x, y = OUTSIDE.batch(dtype=torch.float32)
    learner = EP().attach(Hard(), blocks=["block"], example=x)
    with pytest.raises(UsageError, match="the loss is not differentiable at h_L"):
        getattr(learner, call)(x, y)
    counts = lambda output, y: (output.argmax(1) != y).float()  # noqa: E731
    learner = EP().attach(OUTSIDE.network(), **OUTSIDE.cut | {"loss": counts})
    with pytest.raises(UsageError, match="the loss does not depend on the output by autograd"):
        getattr(learner, call)(*OUTSIDE.batch())


@pytest.mark.parametrize("call", ["credits", "backward"])
def test_low_precision_is_refused(call):
    message = r"the states are computed in torch.bfloat16, .* train in float32 or float64"
    learner = EP().attach(OUTSIDE.network(dtype=torch.bfloat16), **OUTSIDE.cut)
    with pytest.raises(UsageError, match=message):
        getattr(learner, call)(*OUTSIDE.batch(dtype=torch.bfloat16))
    case = BY_NAME["no-stem"]  # whose states stay float32 under autocast, and its branches do not
    learner = EP().attach(case.network(dtype=torch.float32), **case.cut)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=message):
        getattr(learner, call)(*case.batch(dtype=torch.float32))


def test_there_are_no_feedback_matrices():
    with pytest.raises(UsageError, match="EP has no feedback matrices"):
        attached(EP(), OUTSIDE, feedback=[torch.ones(4, 4)])
