"""Cutting any module: what is found out about the zoo, and what is refused, by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from creditscope.errors import UsageError
from creditscope.tape import Cut
from tests.oracles import assert_close, plain_output, unrolled, untouched
from tests.zoo import BATCH, BY_NAME, CASES, Branch, D, Net, Outside, vectors

JOINS = {"c": "chain", "s": "skip", "b": "between"}


def settled(net, x=None, **options):
    options = {"blocks": ["blocks.0", "blocks.1"]} | options
    cut = Cut.of(net.double(), **options)
    cut.settle(vectors(BATCH, torch.Generator().manual_seed(0)) if x is None else x)
    return cut


def refusal(net, x=None, **options):
    with pytest.raises(UsageError) as caught:
        settled(net, x, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_zoo_computes_twice_the_same(case):
    net = case.network()
    x, _ = case.batch()
    assert_close([unrolled(net, x)[1]], [plain_output(net, x)], 1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_joins_shapes_and_sections(case):
    net = case.network()
    x, _ = case.batch()
    cut = Cut.of(net, **case.cut)
    with untouched(net):
        topology = cut.settle(x)
    assert topology.joins == tuple(JOINS[join] for join in case.joins)
    assert topology.terminal == case.terminal
    states, output = unrolled(net, x)
    assert [*topology.shapes] == [h.shape[1:] for h in states]
    assert topology.output_shape == output.shape[1:]
    assert [*topology.sections] == ["stem", *case.blocks, "head"]
    sorted_in = [name for names in topology.sections.values() for name in names]
    assert sorted(sorted_in) == sorted(name for name, _ in net.named_parameters())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_own_forwards_are_left_as_they_were(case):
    """An exception in the user's forward, in every place, leaves no hook, switch or buffer behind."""
    net = case.network()
    x, _ = case.batch()
    cut = Cut.of(net, **case.cut)

    def fails(*_):
        raise ZeroDivisionError

    for module in [
        dict(net.named_modules())[name] for name in (case.blocks[-1], "head") if name in dict(net.named_modules())
    ]:
        handle = module.register_forward_hook(fails)
        with untouched(net), pytest.raises(ZeroDivisionError):
            cut.settle(x)
        handle.remove()


# --- what hides a branch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden"),
    {
        "chain": 0,
        "inner-skip": 2,
        "exposed-inner-skip": 0,
        "outside": 0,
        "inner-in-place": 2,
        "inner-post-norm": 2,
        "tuple-output": 2,
        "encoder-layers": 2,
        "stages": 0,
        "mask-positional": 0,
        "writes-chain": 0,
    }.items(),
)
def test_blocks_that_hide_their_branch(name, hidden):
    case = BY_NAME[name]
    topology = Cut.of(case.network(), **case.cut).settle(case.batch()[0])
    assert len(topology.hidden) == hidden


def test_a_branch_that_is_never_called_is_no_branch():
    class Named(Branch):
        def __init__(self):
            super().__init__()
            self.branch = nn.Linear(2, 2)

    assert settled(Net(Named)).topology.hidden == ("blocks.0", "blocks.1")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": []}, "blocks is empty: name at least one block"),
        ({"blocks": "blocks.0"}, "blocks must be a list of module names, not 'blocks.0'"),
        ({"blocks": 2}, "blocks must be a list of module names, not 2"),
        ({"blocks": [0, 1]}, "blocks must be a list of module names, not [0, 1]"),
        ({"blocks": ["block.0", "blocks.1"]}, "unknown block 'block.0': did you mean 'blocks.0'?"),
        ({"blocks": ["blocks.0", "blocks.2"]}, "unknown block 'blocks.2': did you mean"),
        ({"blocks": [""]}, "unknown block ''"),
        ({"blocks": ["blocks.0", "blocks.0"]}, "block 'blocks.0' is repeated"),
        (
            {"blocks": ["blocks.1", "blocks.0"]},
            "blocks are called in the order blocks.0, blocks.1; give them in that order",
        ),
        ({"blocks": ["blocks.0", "blocks.0.a"]}, "block 'blocks.0.a' lies inside block 'blocks.0'"),
        ({"blocks": ["blocks.0", "spare"]}, "block 'spare' was not called by the network's forward"),
        ({"blocks": None}, "does not name its blocks: pass blocks=[...]"),
        ({"head": "nrom"}, "unknown head 'nrom': did you mean 'norm'?"),
        ({"head": "spare"}, "head 'spare' is not called after the last block 'blocks.1'"),
        ({"head": "embed"}, "head 'embed' is not called after the last block 'blocks.1'"),
    ],
)
def test_wrong_names(options, message):
    net = Outside()
    net.spare = nn.Linear(2, 2)
    assert message in refusal(net, **options)


def test_a_module_under_two_names_is_one_block():
    case = BY_NAME["two-names"]
    net = case.network()
    assert "block 'blocks.0' is repeated: it is the module 'first'" in refusal(net, blocks=["first", "blocks.0"])
    assert settled(net, blocks=["first", "blocks.1"]).topology.joins == ("chain", "chain")


def test_a_network_names_its_own():
    class Own(Outside):
        credit_blocks = ("blocks.0", "blocks.1")
        credit_head = "norm"

    assert settled(Own(), blocks=None).topology.terminal == "norm"
    assert settled(Own(), blocks=["blocks.1"]).head is None  # other blocks than its own may have another head


# --- what cannot be cut -----------------------------------------------------------------------------------------------


class Rewired(Net):
    """Runs another forward on the parts of a small network."""

    def __init__(self, run, **modules):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def used_twice(net, x):
    h = net.embed(x)
    for _ in range(2):
        h = net.blocks[1](net.blocks[0](h))
    return net.head(h)


def functional_head(net, x):
    h = net.embed(x)
    for block in net.blocks:
        h = h + block(h)
    return h.mean(1, keepdim=True) * h[:, :3]


def functional_then_module(net, x):
    h = net.embed(x)
    for block in net.blocks:
        h = h + block(h)
    return net.head(net.norm(h[:, :4])) + h.mean(1, keepdim=True) + F.relu(h)[:, :3]


def unet(net, x):
    first = net.embed(x)
    h = net.blocks[1](net.blocks[0](first))
    return net.head(h + first)


def unet_over_a_block(net, x):
    first = net.blocks[0](net.embed(x))
    return net.head(net.norm(net.blocks[1](first))) + first[:, :3]


def memory_into_every_block(net, x):
    memory = torch.tanh(net.embed(x))
    h = net.norm(memory)
    for block in net.blocks:
        h = h + block(h * memory)
    return net.head(h)


def auxiliary_heads(net, x):
    h = net.embed(x)
    total = 0
    for block in net.blocks:
        h = h + block(h)
        total = total + net.head(h)
    return total


def sequence_first(net, x):
    h = net.embed(x)
    h = torch.stack([h, h, h])
    for block in net.blocks:
        h = h + block(h)
    return net.head(h.mean(0))


def sum_over_the_batch(net, x):
    h = net.embed(x)
    for block in net.blocks:
        h = block(h)
    return net.head(h).sum(0)


def draws_by_itself(net, x):
    h = net.embed(x)
    for block in net.blocks:
        h = block(h)
    net.count = getattr(net, "count", 0) + 1
    return net.head(h) * net.count


def integers(net, x):
    h = (net.embed(x) > 0).long()
    for block in net.blocks:
        h = block(h.double())
        h = h.long()
    return net.head(h.double())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (used_twice, "block 'blocks.0' is used twice in one forward: its credit would be ambiguous"),
        (functional_head, "cannot tell h_L: the skip around the last block 'blocks.1' is added outside it"),
        (functional_then_module, "so the state there is not the whole state"),
        (unet, "so the state there is not the whole state"),
        (unet_over_a_block, "so the state there is not the whole state"),
        (memory_into_every_block, "so the state there is not the whole state"),
        (auxiliary_heads, "so the state there is not the whole state"),
        (sequence_first, "the batch must come first"),
        (sum_over_the_batch, "the batch must come first"),
        (draws_by_itself, "its forward is not deterministic"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(run, message):
    assert message in refusal(Rewired(run))


def test_the_remedy_of_a_functional_head_works():
    class Rest(nn.Module):
        def forward(self, h):
            return h.mean(1, keepdim=True) * h[:, :3]

    def remedied(net, x):
        h = net.embed(x)
        for block in net.blocks:
            h = h + block(h)
        return net.rest_of_it(h)

    assert "name it with head=" in refusal(Rewired(functional_head))
    assert settled(Rewired(remedied, rest_of_it=Rest())).topology.terminal == "rest_of_it"


def test_a_state_that_is_no_float_tensor_needs_state():
    class Packed:
        def __init__(self, h):
            self.h = h

    class Packs(Branch):
        def forward(self, packed):
            return Packed(super().forward(packed.h))

    class Net2(Net):
        def forward(self, x):
            packed = Packed(self.embed(x))
            for block in self.blocks:
                packed = block(packed)
            return self.head(packed.h)

    assert "say which tensor it is with state=fn" in refusal(Net2(Packs))
    state = lambda value: (value[0] if isinstance(value, tuple) else value).h  # noqa: E731
    assert "cannot be rebuilt with another tensor" in refusal(Net2(Packs), state=state)
    assert "state= must return a floating-point tensor" in refusal(Net2(Packs), state=lambda value: None)


def test_a_float_mask_or_input_beside_the_state_is_no_bypass():
    def run(net, x):
        mask = torch.sigmoid(x[:, :1])
        h = net.embed(x)
        for block in net.blocks:
            h = h + block(h) * mask
        return net.head(h) * mask

    assert settled(Rewired(run)).topology.joins == ("skip", "skip")


def test_a_compiled_network_hides_its_blocks():
    net = Outside().double()
    compiled = torch.compile(net, backend="eager")
    names = ["_orig_mod.blocks.0", "_orig_mod.blocks.1"]
    assert "the network is compiled, which hides its blocks" in refusal(compiled, blocks=names)
    assert "use learner.compile()" in refusal(nn.Sequential(compiled), blocks=[f"0.{name}" for name in names])
    net.compile(backend="eager")
    assert "the network is compiled, which hides its blocks" in refusal(net)


def test_a_block_compiled_in_place_hides_itself():
    net = Outside().double()
    net.blocks[1].compile(backend="eager")
    assert "'blocks.1' is compiled, which hides its blocks" in refusal(net)


def test_a_network_compiled_after_it_was_cut_is_refused_at_the_next_call():
    net = Outside()
    cut = settled(net)
    net.compile(backend="eager")
    x = vectors(BATCH, torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match="the network is compiled"):
        cut.states(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_block_that_wraps_a_compiled_module_is_cut_as_it_is():
    net = Outside().double()
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    assert settled(net).topology.joins == ("skip", "skip")


def test_what_is_settled_in_one_mode_is_looked_at_anew_in_the_other():
    case = BY_NAME["dropout-between"]
    net = case.network()
    x, _ = case.batch()
    cut = Cut.of(net, **case.cut)
    assert cut.settle(x).joins == ("chain", "chain")
    net.train()
    assert cut.settle(x).joins == ("between", "chain")
    net.eval()
    assert cut.settle(x).joins == ("chain", "chain")


def test_the_users_own_input_is_not_written_into():
    case = BY_NAME["writes-outside"]
    net = case.network()
    net.embed = nn.Identity()
    x = torch.randn(BATCH, D, dtype=torch.float64)
    before = x.clone()
    cut = settled(net, x)
    cut.exact(x, torch.zeros(BATCH, dtype=torch.long))
    cut.replay(x, torch.zeros(BATCH, dtype=torch.long)).tail(0, x)
    assert torch.equal(x, before)
