"""Credit Bridge against one example after another."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import DFA, CreditBridge, Handover
from creditscope.rules.credit_bridge import bridge_target
from tests.estimators.by_hand import evaluated
from tests.oracles import assert_close, assert_same, exact, left, tail
from tests.rules.bench import attached, matrices
from tests.rules.learned import (
    SHAPES,
    SMALL,
    Probe,
    assert_finite_differences,
    assert_learns,
    estimator_grads,
    examples,
    in_shape,
)
from tests.zoo import BY_NAME

OUTSIDE = BY_NAME["outside"]


def noise_of(learner, x):
    """Return the noise that the next step will draw, by layer: states of one size together, sizes as they come."""
    stream = torch.Generator()
    stream.set_state(learner.site.noise.get_state())
    states = learner.states(x)
    sizes = dict.fromkeys(h[0].numel() for h in states[1:])
    found = {}
    for size in sizes:
        layers = [l for l, h in enumerate(states) if l and h[0].numel() == size]
        drawn = torch.randn(
            learner.rule.samples, len(layers), len(states[0]), size, generator=stream, dtype=torch.float64
        )
        found |= {l: drawn[:, n] for n, l in enumerate(layers)}
    return found


def by_hand(learner, net, x, y, average):
    """Return the credits, the parts of the loss, and their weighted sum."""
    rule, value = learner.rule, learner.pathway["value"]
    noise = noise_of(learner, x) if rule.sigma else None
    rows = []
    parts = {"terminal_loss": [], "terminal_grad_loss": [], "bridge_loss": []}
    for seen in examples(net, x, y):
        L = seen.depth
        s = seen.error if rule.condition == "error" else seen.terminal
        states = [h.clone().requires_grad_() for h in seen.states]
        values = [evaluated(value, h, l, L, s)[0] for l, h in enumerate(states)]
        slopes = [torch.autograd.grad(v, h, create_graph=True)[0] for v, h in zip(values, states, strict=True)]
        rows.append([slope.detach() for slope in slopes])
        parts["terminal_loss"].append((values[-1] - seen.loss) ** 2)
        parts["terminal_grad_loss"].append(((slopes[-1] - seen.terminal) ** 2).sum())
        for l in range(L):
            total = 0.0
            K = rule.samples if noise else 1
            for k in range(K):
                moved = seen.states[l + 1] + (rule.sigma * noise[l + 1][k, seen.i] if noise else 0)
                total += math.exp(-float(evaluated(average, moved, l + 1, L, s).detach()) / rule.temperature) / K
            parts["bridge_loss"].append((values[l] + rule.temperature * math.log(total)) ** 2)
    losses = {name: torch.stack(terms).mean() for name, terms in parts.items()}
    total = (
        rule.terminal_weight * losses["terminal_loss"]
        + losses["bridge_loss"]
        + rule.terminal_grad_weight * losses["terminal_grad_loss"]
    )
    return rows, losses, total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"condition": "terminal", "clip": None, "sigma": 0.3, "samples": 2},
        {"sigma": 0.0, "temperature": 1.0, "terminal_weight": 0.3, "terminal_grad_weight": 2.0},
    ],
    ids=["defaults", "terminal", "plain"],
)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_credits_losses_and_what_the_estimator_learns(case, options):
    rule = CreditBridge(**SMALL, **options)
    learner, net, x, y = attached(rule, case)
    rows, losses, total = by_hand(learner, net, x, y, learner.pathway["average"].average)
    assert_close(learner.credits(x, y), in_shape(rows, learner.states(x)), 1e-8)
    assert_learns(learner, x, y, total, rule.clip)
    found = learner.metrics()
    assert_close([found[name] for name in losses], [loss.detach() for loss in losses.values()], 1e-8)


def test_along_a_training_the_targets_come_from_the_average():
    rule = CreditBridge(**SMALL, ema=0.7)
    learner, net, x, y = attached(rule, OUTSIDE)
    average = copy.deepcopy(learner.pathway["value"])
    optimiser = torch.optim.Adam(learner.pathway.parameters(), lr=0.05)
    for _ in range(4):
        expected = by_hand(learner, net, x, y, average)[1]
        optimiser.zero_grad()
        learner.backward(x, y)
        found = learner.metrics()
        assert_close([found[name] for name in expected], [loss.detach() for loss in expected.values()], 1e-8)
        for _ in range(2):  # accumulated, or looked at: the average counts updates
            learner.backward(x, y)
            learner.coverage()
        optimiser.step()
        with torch.no_grad():
            for slow, p in zip(average.parameters(), learner.pathway["value"].parameters(), strict=True):
                slow.copy_(0.7 * slow + 0.3 * p)


def test_a_gradient_is_that_of_finite_differences():
    rule = CreditBridge(**SMALL, clip=None)
    learner, _, x, y = attached(rule, OUTSIDE)
    learner.pathway["average"].momentum = 1.0  # else it would move with the parameters
    assert_finite_differences(rule, learner, x, y)


@pytest.mark.parametrize("name", ["outside", "two-heads", "mask-keyword"])
def test_the_true_value_gives_the_true_credit(name):
    learner, net, x, y = attached(CreditBridge(sigma=0.0), BY_NAME[name])
    states = learner.states(x)

    def value(h, t):
        l = round(float(t) * net.depth)
        return tail(net, x, y, l, h.view_as(states[l]))

    learner.pathway["value"] = Probe(value)
    assert_close(learner.credits(x, y), exact(net, x, y)[1])
    learner.pathway["average"].forward = lambda h, t, s: learner.pathway["value"](h[0], t, s).unsqueeze(0)
    learner.pathway["average"].advance = lambda source: None
    learner.backward(x, y)
    assert all(float(loss) < 1e-20 for loss in learner.metrics().values())


# --- the target -------------------------------------------------------------------------------------------------------


def test_the_target_is_a_soft_minimum():
    values = torch.tensor([[5.0, 0.0], [6.0, 0.0], [9.0, 0.0]], dtype=torch.float64)
    by_definition = -0.3 * torch.log(torch.exp(-values / 0.3).mean(0))
    assert_close([bridge_target(values, 0.3)], [by_definition], 1e-12)
    assert_close([bridge_target(values, 1e9)], [values.mean(0)], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e4, -1e4])
def test_it_is_stable_at_low_temperature(size, dtype):
    values = torch.tensor([[3.0], [4.0]], dtype=dtype) * size
    expected = values.min() + 1e-3 * math.log(2)
    assert_close([bridge_target(values, 1e-3)], [expected.view(1)], 1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 10.0])
def test_one_sample_without_noise_is_the_plain_bootstrap(temperature):
    value = torch.randn(1, 7, dtype=torch.float64)
    assert_close([bridge_target(value, temperature)], [value[0]], 1e-12)
    for options in ({"samples": 1}, {"samples": 4}):
        learner, _, x, y = attached(CreditBridge(**SMALL, sigma=0.0, temperature=temperature, **options), OUTSIDE)
        assert learner.site.noise is None
        states, average = learner.states(x), learner.pathway["average"].average
        with learner.cut.tape(x, y) as tape:
            errors = tape.errors
        squares = [
            (evaluated(learner.pathway["value"], states[l][i], l, 2, errors[i])
             - evaluated(average, states[l + 1][i], l + 1, 2, errors[i])) ** 2
            for l in range(2) for i in range(len(y))
        ]  # fmt: skip
        learner.backward(x, y)
        assert_close([learner.metrics()["bridge_loss"]], [torch.stack(squares).mean().detach()], 1e-8)


def test_the_target_takes_more_axes():
    values = torch.randn(4, 3, 2, 6, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([bridge_target(values[:, run], 0.1) for run in range(3)])
    assert_close([bridge_target(values, 0.1)], [alone], 1e-6)


# --- the warm-up ------------------------------------------------------------------------------------------------------


def test_the_network_warms_up_by_dfa_while_the_value_learns():
    options = {"normalise": "example", "drive": "input", "penalty": 0.1}
    warm, net, x, y = attached(CreditBridge(**SMALL, **options, warmup=0.2), OUTSIDE)
    B = matrices(warm)[:3]
    feedback = [b.clone() for b in B]
    plain, twin, *_ = attached(DFA(**options), OUTSIDE, feedback=feedback)
    cold, other, *_ = attached(CreditBridge(**SMALL, **options), OUTSIDE)
    cold.pathway["value"].load_state_dict(warm.pathway["value"].state_dict())
    cold.pathway["average"].load_state_dict(warm.pathway["average"].state_dict())
    cold.site.noise.set_state(warm.site.noise.get_state())
    for step in range(4):
        assert warm.phase == (int(step >= 2),)
        expected = cold if step >= 2 else plain
        assert_close(warm.credits(x, y), expected.credits(x, y))
        for learner in (warm, plain, cold):
            learner.zero_grad()
            learner.backward(x, y)
        assert_same(left(net), left(expected.network))
        assert_close(estimator_grads(warm), estimator_grads(cold))
        assert warm.metrics().keys() == cold.metrics().keys()
        with torch.no_grad():
            for one in (net, twin, other):
                one.embed.bias += 0.1


def test_a_handover_trains_the_value_from_the_beginning():
    rule = Handover(DFA(), CreditBridge(**SMALL), 0.2)
    learner, net, x, y = attached(rule, OUTSIDE)
    alone, *_ = attached(CreditBridge(**SMALL), OUTSIDE)
    mine = learner.pathway.get_submodule("second")
    alone.pathway.load_state_dict(mine.state_dict())
    alone.site.noise.set_state(learner.site.noise.get_state())
    feedback = [b.clone() for b in learner.pathway.get_submodule("first").buffers()]
    dfa, twin, *_ = attached(DFA(), OUTSIDE, feedback=feedback)
    for one in (learner, alone, dfa):
        one.backward(x, y, scale=0.5)
    assert_same(left(net), left(twin), 0.0)
    assert_close([p.grad for p in mine.parameters()], estimator_grads(alone), 0.0)
    assert learner.metrics().keys() == alone.metrics().keys()
    assert [g["lr"] for g in learner.param_groups(lr=0.5)] == [0.5, 1e-3]


def test_the_warm_up_needs_a_length_and_takes_the_users_matrices():
    with pytest.raises(UsageError, match="pass training_steps= to attach"):
        attached(CreditBridge(**SMALL, warmup=0.2), OUTSIDE, training_steps=None)
    B = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    learner, _, x, y = attached(CreditBridge(**SMALL, warmup=0.2), OUTSIDE, feedback=B)
    with learner.cut.tape(x, y) as tape:
        assert_close(learner.credits(x, y), [tape.errors @ b.mT for b in B])
    with pytest.raises(UsageError, match="CreditBridge has no feedback matrices"):
        attached(CreditBridge(**SMALL), OUTSIDE, feedback=B)


def test_the_studys_recipe():
    rule = CreditBridge.study()
    assert (rule.normalise, rule.drive, rule.warmup) == ("example", "input", 0.2)
    assert (rule.temperature, rule.samples, rule.sigma, rule.ema) == (0.1, 4, 0.05, 0.995)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.0}, "rule.temperature must be positive, not 0.0"),
        ({"temperature": -1}, "rule.temperature must be positive, not -1"),
        ({"samples": 0}, "rule.samples must be at least 1, not 0"),
        ({"samples": 2.5}, "rule.samples must be a whole number, not 2.5"),
        ({"sigma": -0.1}, "rule.sigma must not be negative, not -0.1"),
        ({"ema": 1.0}, "rule.ema is a momentum of at least 0 and below 1, not 1.0"),
        ({"warmup": 1.5}, "rule.warmup is a fraction of the training, between 0 and 1, not 1.5"),
        ({"terminal_weight": -1.0}, "rule.terminal_weight must not be negative, not -1.0"),
        ({"condition": "eror"}, "unknown rule.condition 'eror': did you mean 'error'? There are error, terminal."),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(UsageError) as caught:
        CreditBridge(**options)
    assert str(caught.value) == said
