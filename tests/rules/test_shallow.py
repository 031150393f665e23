"""The shallow baseline: the user's own forward with the blocks left out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from creditscope.errors import UsageError
from creditscope.rules import LastK, Shallow
from tests.oracles import assert_close, assert_same, backprop, left, plain_output, untouched
from tests.rules.bench import CALM, attached
from tests.zoo import BY_NAME, CASES

PACKED = ("tuple-output", "namedtuple-output", "dict-output", "dataclass-output")
CHANGING = ("convolutional", "no-head", "functional-head", "strided-states", "stages")


class Zero(nn.Module):
    def forward(self, h, *args, **kwargs):
        return 0 * h


class Same(nn.Module):
    def forward(self, h, *args, **kwargs):
        return h


def without_blocks(net, case):
    """Return a copy whose blocks add nothing, or give back what they take."""
    twin = copy.deepcopy(net)
    for name, join in zip(case.blocks, case.joins, strict=True):
        block = twin.get_submodule(name)
        for other in [n for n, module in twin.named_modules(remove_duplicate=False) if module is block]:
            twin.set_submodule(other, Zero() if join == "s" else Same())
    return twin


@CALM
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in (*PACKED, *CHANGING, "written-between")], ids=str
)
def test_it_is_backprop_without_the_blocks(case):
    learner, net, x, y = attached(Shallow(), case)
    twin = without_blocks(net, case)
    learner.eval()
    twin.eval()
    with untouched(net):
        output = learner(x)
    assert_close([output[0] if isinstance(output, tuple) else output], [plain_output(twin, x)])
    expected = backprop(twin, x, y)
    learner.backward(x, y)
    found = left(net)
    assert_same({name: found[name] for name in expected}, expected)
    assert not [name for name in found.keys() - expected.keys() if found[name] is not None]
    assert len(learner.credits(x, y)) == len(case.blocks) + 1


@pytest.mark.parametrize("name", PACKED)
def test_blocks_that_return_more_than_a_tensor_cannot_be_left_out(name):
    with pytest.raises(UsageError, match=r"block 'blocks.0' returns more than a tensor, so it cannot be left out"):
        attached(Shallow(), BY_NAME[name])


@pytest.mark.parametrize("name", CHANGING)
def test_states_of_other_shapes_do_not_fit(name):
    with pytest.raises(UsageError, match=r"without its blocks the network does not fit: h_0 is \(.*\), the head takes"):
        attached(Shallow(), BY_NAME[name])


def test_nothing_is_left_in_place_of_the_blocks():
    learner, net, x, y = attached(Shallow(), BY_NAME["outside"])
    learner.backward(x, y)
    assert "forward" not in net.blocks[0].__dict__
    assert not torch.allclose(net(x), learner(x))


def test_a_wrapper_of_it_is_as_shallow():
    learner, net, x, y = attached(LastK(Shallow(), 0), BY_NAME["outside"])
    plain, twin, *_ = attached(Shallow(), BY_NAME["outside"])
    assert_close([learner(x)], [plain(x)])
    learner.backward(x, y)
    plain.backward(x, y)
    assert_same(left(net), left(twin))
