"""The vector field against one example after another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from creditscope.errors import UsageError
from creditscope.rules import VectorField
from creditscope.rules.vector_field import direction_errors
from tests.estimators.by_hand import evaluated
from tests.oracles import assert_close, exact
from tests.rules.bench import attached
from tests.rules.learned import SHAPES, SMALL, after, assert_finite_differences, assert_learns, examples, in_shape
from tests.zoo import BY_NAME

OUTSIDE = BY_NAME["outside"]


def drawn(learner, x):
    """Return the directions of the next step by layer, (M, B, d), and who is dealt whose targets."""
    stream = torch.Generator()
    stream.set_state(learner.site.noise.get_state())
    states, M = learner.states(x), learner.rule.directions
    found = {}
    for size in dict.fromkeys(h[0].numel() for h in states):
        layers = [l for l, h in enumerate(states) if h[0].numel() == size]
        rows = torch.randn(len(layers), M, len(states[0]), size, generator=stream, dtype=torch.float64)
        found |= dict(zip(layers, rows, strict=True))
    return found, torch.rand(len(states[0]), generator=stream).argsort().tolist()


def by_hand(learner, net, x, y):
    """Return the credits and the parts of the loss."""
    rule = learner.rule
    directions, dealt = drawn(learner, x)
    given = examples(net, x, y)
    rows, change = [], {}
    for seen in given:
        for l, h in enumerate(seen.states):
            for m in range(rule.directions):
                v = directions[l][m, seen.i]
                at = lambda e, l=l, h=h, v=v, i=seen.i: float(after(net, x, y, i, l, h + e * v).detach())  # noqa: E731
                e = rule.epsilon
                one_sided = rule.targets == "one-sided"
                change[seen.i, l, m] = (at(e) - at(0)) / e if one_sided else (at(e) - at(-e)) / (2 * e)
    squares, terminal = [], []
    for seen in given:
        other = dealt[seen.i] if rule.targets == "shuffled" else seen.i
        s = seen.error if rule.condition == "error" else seen.terminal
        row = [evaluated(learner.pathway, h, l, seen.depth, s) for l, h in enumerate(seen.states)]
        for l, a in enumerate(row):
            for m in range(rule.directions):
                squares.append(((a * directions[l][m, seen.i]).sum() - change[other, l, m]) ** 2)
        terminal.append(((row[-1] - given[other].terminal) ** 2).sum())
        rows.append([a.detach() for a in row])
    return rows, torch.stack(squares).mean(), torch.stack(terminal).mean()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"targets": "one-sided", "directions": 2, "terminal_weight": 0.0, "clip": 0.01},
        {"targets": "shuffled", "condition": "terminal", "terminal_weight": 4.0},
    ],
    ids=["central", "one-sided", "shuffled"],
)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_credits_losses_and_what_the_estimator_learns(case, options):
    rule = VectorField(**SMALL, **options)
    learner, net, x, y = attached(rule, case)
    rows, along, terminal = by_hand(learner, net, x, y)
    assert_close(learner.credits(x, y), in_shape(rows, learner.states(x)), 1e-8)
    assert_learns(learner, x, y, along + rule.terminal_weight * terminal, rule.clip)
    found = learner.metrics()
    assert_close([found["direction_loss"], found["terminal_loss"]], [along.detach(), terminal.detach()], 1e-8)


def test_a_gradient_is_that_of_finite_differences():
    rule = VectorField(**SMALL)
    learner, _, x, y = attached(rule, OUTSIDE)
    assert_finite_differences(rule, learner, x, y)


@pytest.mark.parametrize("targets", ["central", "one-sided"])
def test_with_dropout_both_ends_of_a_difference_meet_the_same_masks(targets):
    learner, _, x, y = attached(VectorField(**SMALL, targets=targets), BY_NAME["dropout"])
    learner.backward(x, y)
    # other masks would make a difference of the order of the loss over ε
    assert float(learner.metrics()["direction_loss"]) < 1e3


class LinearNet(nn.Module):
    """Three linear maps: the reference is a linear function of the error."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(n, m) for n, m in ((5, 4), (4, 4), (4, 4), (4, 3)))

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


class LinearField(nn.Module):
    """a_l = M_l s, which can be the reference of a linear network."""

    def __init__(self):
        super().__init__()
        self.M = nn.Parameter(torch.zeros(3, 4, 3, dtype=torch.float64))

    def forward(self, h, t, s):
        return torch.einsum("ldc,bc->lbd", self.M, s)


@pytest.mark.parametrize("targets", ["central", "shuffled"])
def test_on_a_linear_network_it_becomes_the_reference_and_shuffled_it_does_not(targets):
    net = LinearNet().double()
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 5, generator=g).double(), 3 * torch.randn(32, 3, generator=g).double()
    squared = lambda output, y: 0.5 * (output - y).square().sum(1)  # noqa: E731
    rule = VectorField(targets=targets, terminal_weight=0.0, directions=8)
    learner = rule.attach(net, blocks=["b", "c"], loss=squared, example=x)
    learner.pathway = LinearField()
    optimiser = torch.optim.SGD(learner.pathway.parameters(), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        learner.backward(x, y)
        optimiser.step()
    found, reference = learner.credits(x, y), learner.cut.exact(x, y).gradients
    away = [float((a - g).norm() / g.norm()) for a, g in zip(found, reference, strict=True)]
    assert max(away) < 1e-3 if targets == "central" else min(away) > 0.5, away


def test_the_formula_takes_a_leading_axis():
    g = torch.Generator().manual_seed(0)
    a, v, D = (torch.randn(shape, generator=g) for shape in ((7, 6, 4), (7, 3, 6, 4), (7, 3, 6)))
    alone = torch.stack([direction_errors(a[run], v[run], D[run]) for run in range(7)])
    assert_close([direction_errors(a, v, D)], [alone], 1e-6)
    assert float(alone[2, 1, 3]) == pytest.approx(float((a[2, 3] * v[2, 1, 3]).sum() - D[2, 1, 3]) ** 2, rel=1e-4)


def test_a_step_cannot_be_captured_and_says_so():
    rule = VectorField(**SMALL)
    learner, net, x, y = attached(rule, OUTSIDE)
    assert "replayed with the random state put back" in rule.capture_obstacle(learner.site)
    assert learner.exact_states == set()
    assert exact(net, x, y)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"directions": 0}, "rule.directions must be at least 1, not 0"),
        ({"epsilon": 0.0}, "rule.epsilon must be positive, not 0.0"),
        ({"terminal_weight": -1.0}, "rule.terminal_weight must not be negative, not -1.0"),
        ({"targets": "centrl"}, "unknown rule.targets 'centrl': did you mean 'central'?"),
        ({"condition": "none"}, "unknown rule.condition 'none'"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(UsageError) as caught:
        VectorField(**options)
    assert str(caught.value).startswith(said)


def test_the_study_states_no_recipe():
    with pytest.raises(UsageError, match="the source study has no recipe for 'vector-field'"):
        VectorField.study()
