"""Backpropagation through the learner is backpropagation."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import BP
from tests.oracles import assert_close, assert_same, backprop, exact, gradients, left, loss_of
from tests.rules.bench import CALM, DETERMINISTIC, attached
from tests.zoo import CASES


def penalised(net, x, y, penalty, reduction):
    """Return the gradient of the mean loss and of λ·mean Σ_l ‖f_l‖², in one graph over the segments."""
    h, total = net.stem(x), 0
    for l in range(net.depth):
        h, f = net.segment(l, h, x)
        total = total + f.square().sum() / (len(y) * (1 if reduction == "sum" else f[0].numel()))
    return gradients(net, loss_of(net)(net.rest(h, x), y).mean() + penalty * total)


@CALM
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_gradient_of_the_mean_loss(case):
    learner, net, x, y = attached(BP(), case)
    torch.manual_seed(7)
    expected = backprop(net, x, y, 0.25)
    torch.manual_seed(7)
    learner.backward(x, y, scale=0.25)
    assert_same(left(net), expected, 0.0)


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_credits_are_exact_for_every_state(case):
    learner, net, x, y = attached(BP(), case)
    assert_close(learner.credits(x, y), exact(net, x, y)[1])
    assert learner.exact_states == set(range(len(case.blocks) + 1))
    assert learner.driving_states == [*range(1, len(case.blocks) + 1)]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_the_penalty_travels_end_to_end(case, reduction):
    rule = BP(penalty=0.3, penalty_reduction=reduction)
    topology = attached(BP(), case)[0].site.topology
    if topology.hidden or topology.reentrant:
        with pytest.raises(UsageError, match=r"cannot be penalised|use_reentrant=False"):
            attached(rule, case)
        return
    learner, net, x, y = attached(rule, case)
    expected = penalised(net, x, y, 0.3, reduction)
    learner.backward(x, y)
    assert_same(left(net), expected)


def test_the_loss_that_is_returned_leaves_the_penalty_out():
    case = DETERMINISTIC[0]
    learner, *_, x, y = attached(BP(penalty=5.0), case)
    plain, *_ = attached(BP(), case)
    assert float(learner.backward(x, y)) == pytest.approx(float(plain.backward(x, y)))
    assert float(learner.metrics()["penalty"]) > 0
    assert plain.metrics() == {}
