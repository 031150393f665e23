"""The gradients of FA and DFA are BioTorch's, for the same weights and feedback matrices.

BioTorch 0.0.16 keeps a map's feedback as ``weight_backward``: of the weight's shape for FA, and for DFA of shape
(outputs, inputs) on the layer *behind* the one that it trains.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from creditscope.rules import DFA, FA

biomodule = pytest.importorskip(
    "biotorch.module.biomodule", reason="BioTorch is not installed (pip install --no-deps biotorch)"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # its hooks are of a kind that torch has deprecated


def mlp(activation):
    """Stem, two blocks, head; every state is taken behind an activation, where BioTorch's DFA sends its signal."""
    widths = [7, 6, 5, 4]
    hidden = [nn.Sequential(nn.Linear(a, b), activation()) for a, b in pairwise(widths)]
    return nn.Sequential(*hidden, nn.Linear(4, 3))


def cnn():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 3, 3, stride=2), nn.Tanh()),
        nn.Sequential(nn.Conv2d(3, 2, 2), nn.ReLU(), nn.Flatten()),
        nn.Linear(2, 3),
    )


def converted(net, mode):
    """Return BioTorch's version of a network, and ours with the same weights."""
    theirs = biomodule.BioModule(copy.deepcopy(net), mode=mode, copy_weights=True, output_dim=3)
    for p, q in zip(trained(theirs).values(), net.parameters(), strict=True):
        p.data.copy_(q.data)
    return theirs.train(), net


def trained(theirs):
    return {n: p for n, p in theirs.module.named_parameters() if p.requires_grad}


def feedback(theirs):
    return {
        n.removesuffix("_backward"): p for n, p in theirs.module.named_parameters() if n.endswith("weight_backward")
    }


def assert_equal(net, theirs):
    expected = trained(theirs)
    assert [*expected] == [name for name, _ in net.named_parameters()]
    for name, p in net.named_parameters():
        assert torch.allclose(p.grad, expected[name].grad, rtol=1e-5, atol=1e-6), name
        assert p.grad.any(), name


@pytest.mark.parametrize("make", [lambda: mlp(nn.ReLU), lambda: mlp(nn.Tanh), cnn], ids=["relu", "tanh", "cnn"])
def test_feedback_alignment(make):
    torch.manual_seed(3)
    theirs, net = converted(make(), "fa")
    x = torch.randn(8, 2, 6, 6) if isinstance(net[0][0], nn.Conv2d) else torch.randn(8, 7)
    y = torch.randint(3, (8,))
    F.cross_entropy(theirs(x), y).backward()
    own = feedback(theirs)
    assert own.keys() == {name for name, p in net.named_parameters() if p.ndim > 1}
    learner = FA().attach(net, blocks=["1", "2"], example=x, feedback=own)
    learner.backward(x, y)
    assert_equal(net, theirs)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_direct_feedback_alignment(activation):
    torch.manual_seed(4)
    theirs, net = converted(mlp(activation), "dfa")
    x, y = torch.randn(8, 7), torch.randint(3, (8,))
    loss = nn.CrossEntropyLoss()
    loss(theirs(x, y, loss), y).backward()
    behind = [matrix.T for name, matrix in feedback(theirs).items() if name != "0.0.weight"]
    learner = DFA().attach(net, blocks=["1", "2"], example=x, feedback=behind)
    learner.backward(x, y)
    assert_equal(net, theirs)
