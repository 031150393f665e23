import json
from collections import OrderedDict

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import creditscope as cs
from creditscope.errors import UsageError
from creditscope.runs import flatten, unflatten

TENSORS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]).flatmap(
    lambda dtype: st.lists(st.integers(0, 1), max_size=3).map(lambda values: torch.tensor(values, dtype=dtype))
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | TENSORS
KEYS = st.integers(-3, 3) | st.text("ab.'", max_size=3)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
)


def assert_identical(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one is other
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_identical(left, right)
    else:
        assert repr(one) == repr(other)  # -0.0 is not 0.0, and NaN is itself


@given(STATES)
def test_what_goes_in_comes_out(state):
    tensors, structure = flatten(state)
    assert_identical(unflatten(tensors, json.loads(json.dumps(structure))), state)


def test_names_are_the_joined_keys():
    tensors, _ = flatten({"optimiser": {"state": {0: {"exp_avg": torch.ones(1)}}}, "list": [None, torch.zeros(1)]})
    assert list(tensors) == ["optimiser.state.0.exp_avg", "list.1"]


def test_names_that_would_collide():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.ones(2), "1": torch.ones(3)}
    tensors, structure = flatten(state)
    assert len(tensors) == 4
    assert_identical(unflatten(tensors, structure), state)


def test_a_state_that_is_one_tensor():
    tensor = torch.ones(2)
    tensors, structure = flatten(tensor)
    assert list(tensors) == ["tensor"]
    assert unflatten(tensors, structure) is tensor


def test_an_ordered_dict_becomes_a_dict():
    tensors, structure = flatten(OrderedDict(b=1, a=2))
    assert_identical(unflatten(tensors, structure), {"b": 1, "a": 2})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": numpy.ones(2)}}, "a.b: a ndarray cannot be kept in a checkpoint"),
        ({"a": [1, {1, 2}]}, "a.1: a set cannot be kept"),
        ({"a": numpy.float64(1)}, "a: a float64 cannot be kept"),
        (object(), "the state: a object cannot be kept"),
        ({"a": {(1, 2): 3}}, r"a: the key \(1, 2\) is neither a string nor an integer"),
        ({None: 3}, "the state: the key None is neither"),
        ({True: 3}, "the state: the key True is neither"),
    ],
)
def test_what_cannot_be_kept_is_named(state, message):
    with pytest.raises(UsageError, match=message):
        flatten(state)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_training_goes_on_with_the_same_bits(kind):
    """A learner and its optimiser, with a tensor learning rate, through the flat form and back."""
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3

    def made(seed):
        torch.manual_seed(seed)
        net = cs.nets.MLP(inputs=6, width=5, depth=2, classes=3)
        learner = cs.rules.DFA().attach(net, generator=torch.Generator().manual_seed(seed))
        options = {"lr": torch.tensor(0.01), "fused": True} if kind == "AdamW" else {"lr": 0.1, "momentum": 0.9}
        return learner, getattr(torch.optim, kind)(learner.parameters(), **options)

    def steps(learner, optimiser, count):
        for _ in range(count):
            optimiser.zero_grad()
            learner.backward(x, y)
            optimiser.step()

    learner, optimiser = made(0)
    steps(learner, optimiser, 3)
    tensors, structure = flatten({"learner": learner.state_dict(), "optimiser": optimiser.state_dict()})
    tensors, structure = {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(structure)
    steps(learner, optimiser, 3)

    again, its_optimiser = made(1)
    state = unflatten(tensors, json.loads(structure))
    again.load_state_dict(state["learner"])
    its_optimiser.load_state_dict(state["optimiser"])
    steps(again, its_optimiser, 3)
    for one, other in zip(learner.state_dict().values(), again.state_dict().values(), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
