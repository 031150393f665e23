"""State Bridge against one example after another."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import BP, StateBridge
from creditscope.rules.state_bridge import state_error, state_loss
from tests.estimators.by_hand import evaluated
from tests.oracles import assert_close, assert_same, exact, left, loss_of, unrolled
from tests.rules.bench import attached
from tests.rules.learned import (
    SHAPES,
    SMALL,
    Probe,
    assert_finite_differences,
    assert_learns,
    examples,
    in_shape,
    one,
)
from tests.zoo import BY_NAME


def by_hand(learner, net, x, y):
    """Return the credits, the loss of the prediction and its squared error."""
    rows, loss, error = [], torch.zeros((), dtype=torch.float64), 0.0
    shape = learner.states(x)[-1][:1].shape
    given = examples(net, x, y)
    for seen in given:
        credits, last = [], seen.states[-1]
        for l in range(seen.depth):
            h = seen.states[l].clone().requires_grad_()
            predicted = evaluated(learner.pathway, h, l, seen.depth, seen.error)
            output = net.rest(predicted.view(shape), one(x, seen.i))
            credits += torch.autograd.grad(loss_of(net)(output, one(y, seen.i)).sum(), h, retain_graph=True)
            away = ((predicted - last) ** 2).sum()
            loss = loss + away / max(float(last.norm()), 1.0) ** 2 / seen.depth / len(given)
            error += float(away.detach()) / seen.depth / len(given)
        rows.append([*credits, seen.terminal])
    return rows, loss, error


@pytest.mark.parametrize("at", [None, 0.01])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_credits_loss_and_what_the_estimator_learns(case, at):
    learner, net, x, y = attached(StateBridge(clip=at, **SMALL), case)
    rows, loss, error = by_hand(learner, net, x, y)
    assert_close(learner.credits(x, y), in_shape(rows, learner.states(x)), 1e-8)
    assert_learns(learner, x, y, loss, at)
    assert_close([learner.metrics()["state_error"]], [torch.tensor(error, dtype=torch.float64)], 1e-8)


def test_a_gradient_is_that_of_finite_differences():
    rule = StateBridge(**SMALL)
    learner, _, x, y = attached(rule, BY_NAME["outside"])
    assert_finite_differences(rule, learner, x, y)


@pytest.mark.parametrize("name", ["outside", "chain", "two-heads", "mask-keyword"])
def test_the_true_tail_gives_the_reference_and_its_step_is_backprop(name):
    case = BY_NAME[name]
    learner, net, x, y = attached(StateBridge(), case)

    def tail(h, t):
        state = h.view_as(learner.states(x)[0])
        for k in range(round(float(t) * net.depth), net.depth):
            state = net.segment(k, state, x)[0]
        return state.flatten(1)

    learner.pathway = Probe(tail)
    assert_close(learner.credits(x, y), exact(net, x, y)[1])
    learner.backward(x, y)
    assert float(learner.metrics()["state_error"]) < 1e-20
    found = left(net)
    reference, twin, *_ = attached(BP(), case)
    reference.backward(x, y)
    assert_same(found, left(twin))


def test_the_last_credit_is_exact_and_said_to_be():
    learner, net, x, y = attached(StateBridge(**SMALL), BY_NAME["outside"])
    assert learner.exact_states == {2}
    assert_close(learner.credits(x, y)[-1:], exact(net, x, y)[1][-1:])


def test_a_step_leaves_no_gradient_of_the_predictions_in_the_head():
    """The head's own gradient is that of the true loss, however far the predictions are off."""
    learner, net, x, y = attached(StateBridge(**SMALL), BY_NAME["outside"])
    learner.backward(x, y)
    expected = torch.autograd.grad(loss_of(net)(unrolled(net, x)[1], y).mean(), [*net.head.parameters()])
    assert_close([p.grad for p in net.head.parameters()], expected)


def test_batch_statistics_of_the_head_move_once():
    net = torch.nn.Sequential(
        torch.nn.Linear(7, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    ).double()
    x, y = BY_NAME["outside"].batch()
    learner = StateBridge(**SMALL).attach(net, blocks=["1"], example=x)
    assert learner.site.topology.rest == ("2", "3")
    h = net[1](net[0](x)).detach()
    learner.backward(x, y)
    assert int(net[2].num_batches_tracked) == 1
    assert_close([net[2].running_mean], [0.1 * h.mean(0)])


def test_the_formulas_take_a_leading_axis():
    g = torch.Generator().manual_seed(0)
    predicted, last = torch.randn(7, 3, 6, 4, generator=g), torch.randn(7, 6, 4, generator=g) * 0.4
    for formula in (state_loss, state_error):
        alone = torch.stack([formula(p, h) for p, h in zip(predicted, last, strict=True)])
        assert_close([formula(predicted, last)], [alone], 1e-6)
    assert state_loss(predicted, last).shape == (7,)
    assert state_error(predicted, last).shape == (7, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"estimator_lr": 0}, "rule.estimator_lr must be positive, not 0"),
        ({"clip": 0.0}, "rule.clip must be positive or None, not 0.0"),
        ({"layers": 1}, "rule.layers must be at least 2, not 1"),
        ({"hidden": -1}, "rule.hidden must be at least 1, not -1"),
        ({"activation": "gelo"}, "unknown rule.activation 'gelo': did you mean 'gelu'?"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(UsageError) as caught:
        StateBridge(**options)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_there_is_no_feedback_to_give():
    with pytest.raises(UsageError, match="StateBridge has no feedback matrices; feedback= does not apply"):
        attached(StateBridge(**SMALL), BY_NAME["outside"], feedback=[torch.ones(4, 3)] * 3)


def test_a_head_that_lets_no_gradient_through_is_refused():
    class Cold(torch.nn.Linear):
        def forward(self, h):
            return super().forward(h.detach())

    net = torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.Linear(4, 4), Cold(4, 3)).double()
    x, y = BY_NAME["outside"].batch()
    learner = StateBridge(**SMALL).attach(net, blocks=["1"], example=x)
    with pytest.raises(UsageError, match="does not depend on h_L by autograd, so no credit can come back"):
        learner.backward(x, y)
    with pytest.raises(UsageError, match="does not depend on h_L by autograd, so no credit can come back"):
        learner.credits(x, y)


def test_a_step_can_be_captured_where_the_head_is_a_chain():
    for name, obstacle in {"outside": None, "two-heads": "a head that is no chain of modules"}.items():
        rule = StateBridge(**SMALL)
        learner, *_ = attached(rule, BY_NAME[name])
        assert (rule.capture_obstacle(learner.site) or "").startswith(obstacle or "")
        assert (rule.capture_obstacle(learner.site) is None) == (obstacle is None)


def test_inputs_of_another_size_are_refused_by_name():
    learner, _, _, y = attached(StateBridge(**SMALL), BY_NAME["conv-outside"])
    with pytest.raises(UsageError, match="a state of 256 units: this estimator was made for states of 144 units"):
        learner.backward(torch.randn(6, 2, 8, 8, dtype=torch.float64), y)
