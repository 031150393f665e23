"""The teacher-student task against the formula in its docstring, and what its options do."""

import pytest
import torch
from torch import nn

import creditscope as cs
from creditscope.errors import UsageError
from creditscope.nets import StudentNet
from creditscope.rng import stream

SMALL = {"train": 400, "test": 100, "width": 12, "inputs": 5, "classes": 4}


def teacher(**options) -> cs.data.Dataset:
    return cs.data.load("teacher", **{**SMALL, **options})


def as_a_student(alpha: float, depth: int, seed: int) -> StudentNet:
    """The teacher's weights in a StudentNet: the promise that a student of its size can be the teacher."""
    net = StudentNet(SMALL["inputs"], SMALL["width"], depth, SMALL["classes"], alpha).double()
    generator = stream(seed, "teacher", "weights")
    maps = [net.embed, *(block.w for block in net.blocks), net.out_head]
    for linear in maps:
        assert isinstance(linear, nn.Linear)
        weight = torch.randn(linear.in_features, linear.out_features, generator=generator, dtype=torch.float64)
        linear.weight.data = (weight / linear.in_features**0.5).T
        nn.init.zeros_(linear.bias)
    return net


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("depth", [1, 3])
def test_labels_are_those_of_the_network_of_the_docstring(alpha, depth):
    data = teacher(alpha=alpha, depth=depth, seed=7)
    net = as_a_student(alpha, depth, seed=7)
    with torch.no_grad():
        train, test = net(data.train.x.double()), net(data.test.x.double())
    mean, std = train.mean(0), train.std(0, correction=0)
    assert torch.equal(((train - mean) / std).argmax(1), data.train.y)
    assert torch.equal(((test - mean) / std).argmax(1), data.test.y)


@pytest.mark.usefixtures("untouched_rng")
def test_the_seed_is_all_there_is():
    one, same, other = teacher(seed=1), teacher(seed=1), teacher(seed=2)
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert one.options == {**cs.data.load("teacher").options, **SMALL, "seed": 1}


def test_the_shape_and_kind_of_the_data():
    data = teacher()
    assert data.shape == (5,)
    assert data.train.x.dtype == torch.float32
    assert (len(data.train), len(data.test)) == (400, 100)
    assert data.mean is None
    assert data.classes == 4


def test_inputs_are_standard_normal():
    x = teacher(train=20_000).train.x
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02


def test_the_default_has_every_class():
    data = cs.data.load("teacher")
    shares = torch.bincount(data.train.y, minlength=10) / len(data.train)
    assert shares.min() > 0.05
    assert shares.max() < 0.2
    assert (len(data.train), len(data.test), data.inputs) == (20_000, 4_000, 8)


def test_more_test_examples_change_no_training_example():
    assert torch.equal(teacher(test=100).train.x, teacher(test=50).train.x)
    assert torch.equal(teacher(test=100).train.y, teacher(test=50).train.y)


def test_the_temperature_draws_labels_from_the_softmax():
    """Labels at temperature 1 are calibrated: the mean probability of a class is its share of the labels."""
    data, net = teacher(train=20_000, temperature=1.0), as_a_student(1.0, 4, seed=0)
    with torch.no_grad():
        z = net(data.train.x.double())
    probabilities = ((z - z.mean(0)) / z.std(0, correction=0)).softmax(1)
    picked = probabilities[torch.arange(len(z)), data.train.y]
    # Of labels drawn from p, the expected probability of the drawn label is the mean of Σp².
    assert abs(picked.mean() - (probabilities**2).sum(1).mean()) < 0.01
    assert not torch.equal(data.train.y, teacher(train=20_000).train.y)


def test_alpha_1_is_not_linear_and_alpha_0_is():
    for alpha, linear in ((0.0, True), (1.0, False)):
        x = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        net = as_a_student(alpha, 4, seed=0)
        with torch.no_grad():
            assert torch.allclose(net(3 * x), 3 * net(x)) == linear


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 1.5}, "alpha must lie between 0"),
        ({"classes": 1}, "classes must be a whole number of at least 2, not 1"),
        ({"train": 0}, "train must be a whole number of at least 2, not 0"),
        ({"width": 2.5}, "width must be a whole number of at least 1, not 2.5"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(UsageError, match=said):
        teacher(**options)
