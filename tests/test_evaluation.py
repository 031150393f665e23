"""Scores and norms against the obvious way to compute them, and that looking changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import creditscope as cs
from creditscope.data import Loader
from creditscope.evaluation import evaluate, evaluating, median_norm, norms
from tests import fits


class Noisy(nn.Module):
    """Dropout, BatchNorm, a module that stays in eval mode, and a tuple as output."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(fits.FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.block = nn.Linear(8, 8)
        self.kept = nn.Dropout(0.5).eval()
        self.out = nn.Linear(8, fits.CLASSES)

    def forward(self, x):
        h = self.kept(torch.relu(self.block(self.stem(x))))
        return self.out(h), h


@pytest.fixture
def noisy():
    return cs.rules.BP().attach(Noisy(), blocks=["block"])


def test_scores_are_the_means_over_unequal_batches(noisy):
    data = fits.task()
    loss, accuracy = evaluate(noisy, Loader(data.test, dataset=data, batch=7).ordered())
    with torch.no_grad(), evaluating(noisy.network):
        outputs, _ = noisy.network(data.test.x)
    assert loss == pytest.approx(float(F.cross_entropy(outputs, data.test.y)), rel=1e-6)
    assert accuracy == int((outputs.argmax(1) == data.test.y).sum()) / len(data.test)


def test_accuracy_is_nan_without_classes():
    learner = cs.rules.BP().attach(fits.net()(), loss=lambda output, y: (output.sum(1) - y).square())
    x, y = torch.randn(4, fits.FEATURES), torch.randn(4)
    scores = evaluate(learner, [(x, y)])
    assert math.isnan(scores.accuracy)
    assert math.isfinite(scores.loss)


def test_nothing_to_evaluate_is_nan(noisy):
    assert all(math.isnan(score) for score in evaluate(noisy, []))


def test_evaluation_touches_nothing(noisy):
    noisy.network.train()
    noisy.network.kept.eval()
    modes = [m.training for m in noisy.network.modules()]
    before = {name: t.clone() for name, t in noisy.network.state_dict().items()}
    data, stream = fits.task(), torch.get_rng_state()
    evaluate(noisy, [(data.test.x, data.test.y)])
    norms(noisy, data.test.x, data.test.y)
    assert torch.equal(torch.get_rng_state(), stream)
    assert [m.training for m in noisy.network.modules()] == modes
    assert all(torch.equal(t, before[name]) for name, t in noisy.network.state_dict().items())
    assert all(p.grad is None for p in noisy.network.parameters())


def test_modes_come_back_after_an_error(noisy):
    noisy.network.train()
    with pytest.raises(ZeroDivisionError), evaluating(noisy.network):
        raise ZeroDivisionError
    assert noisy.network.training
    assert noisy.network.stem.training


def test_norms_against_autograd():
    learner = cs.rules.DFA().attach(fits.net(depth=3)())
    data = fits.task()
    net = learner.network
    h = net.embed(data.test.x).detach().requires_grad_()
    states = [h]
    for block in net.blocks:
        states.append(states[-1] + block(states[-1]))
    output = net.out_head(net.out_ln(states[-1]))
    gradients = torch.autograd.grad(F.cross_entropy(output, data.test.y, reduction="sum"), states)
    found = norms(learner, data.test.x, data.test.y)
    for side, tensors in zip(found, (states, gradients), strict=True):
        expected = [sorted(t.norm(dim=1).tolist())[(len(t) - 1) // 2] for t in tensors]
        assert side == pytest.approx(expected, rel=1e-4)


def test_norms_of_the_reference_do_not_hang_on_the_batch():
    learner = cs.rules.BP().attach(fits.net()())
    data = fits.task()
    once = norms(learner, data.test.x, data.test.y)
    twice = norms(learner, data.test.x.repeat(2, 1), data.test.y.repeat(2))
    assert once[1] == pytest.approx(twice[1], rel=1e-5)


def test_the_median_is_the_lower_one_over_all_axes_of_an_example():
    t = torch.tensor([[[3.0, 0], [0, 4]], [[1, 0], [0, 0]], [[6, 0], [8, 0]], [[0, 2], [0, 0]]])
    assert float(median_norm(t)) == 2.0  # of 1, 2, 5, 10
