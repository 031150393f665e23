"""The cut against plain autograd, on every network of the zoo, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from creditscope.errors import UsageError
from creditscope.tape import Cut, cross_entropy
from tests.oracles import (
    assert_close,
    assert_same,
    backprop,
    changed,
    exact,
    left,
    local_step,
    loss_of,
    plain_output,
    snapshot,
    unrolled,
    untouched,
)
from tests.zoo import BY_NAME, CASES, D, Net

MODES = [
    pytest.param(case, mode, id=f"{case}-{mode}")
    for case in CASES
    for mode in (("eval", "train") if case.random else ("train",))
]


def prepared(case, mode="eval"):
    """Return a network, its cut, inputs and targets, and a function that puts the global generator where it was."""
    net = case.network()
    net.train(mode == "train" or not case.random)
    x, y = case.batch()
    cut = Cut.of(net, **case.cut)
    cut.settle(x)
    return net, cut, x, y


CALM = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
"""What torch says of reentrant checkpoints wherever gradients are off."""


def same_draws():
    torch.manual_seed(7)


@pytest.mark.parametrize(("case", "mode"), MODES)
def test_exact_credits_are_autograds(case, mode):
    net, cut, x, y = prepared(case, mode)
    same_draws()
    with untouched(net):
        found = cut.exact(x, y)
    same_draws()
    states, gradients = exact(net, x, y)
    assert_close(found.states, states)
    assert_close(found.gradients, gradients)
    same_draws()
    losses = loss_of(net)(plain_output(net, x), y)
    assert_close([found.losses, found.output], [losses, unrolled_output(net, x)])


def unrolled_output(net, x):
    same_draws()
    return unrolled(net, x)[1]


@pytest.mark.parametrize(("case", "mode"), MODES)
def test_exact_credit_is_backprop(case, mode):
    net, cut, x, y = prepared(case, mode)
    same_draws()
    expected = backprop(net, x, y)
    same_draws()
    gradients = cut.exact(x, y).gradients
    same_draws()
    with cut.tape(x, y) as tape:
        tape.backward(gradients, 1.0)
    assert_same(left(net), expected)


@pytest.mark.parametrize("leaf", [False, True], ids=["", "leaf"])
@pytest.mark.parametrize(("case", "mode"), MODES)
def test_any_credit_drives_its_own_segment_and_no_other(case, mode, leaf):
    if leaf and case.name == "reentrant-inside":
        pytest.skip("its head has a reentrant checkpoint, through which g_L cannot be taken")
    net, cut, x, y = prepared(case, mode)
    g = torch.Generator().manual_seed(3)
    shapes = cut.settle(x).shapes
    credits = [torch.randn(len(y), *shape, generator=g, dtype=torch.float64) for shape in shapes]
    same_draws()
    expected = local_step(net, x, y, lambda *_: credits, scale=0.7)
    same_draws()
    with cut.tape(x, y, leaf=leaf) as tape:
        if leaf:
            terminal = tape.terminal_gradient
        tape.backward(credits, 0.7)
    assert_same(left(net), expected)
    if leaf:
        same_draws()
        assert_close([terminal], [exact(net, x, y)[1][-1]])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_credit_leaves_a_segment_alone(case):
    net, cut, x, y = prepared(case)
    zeros = lambda states, *_: [torch.zeros_like(h) for h in states]  # noqa: E731
    expected = local_step(net, x, y, zeros)
    with cut.tape(x, y) as tape:
        tape.backward([None] * (cut.depth + 1), 1.0)
    assert_same(left(net), expected)


@CALM
@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_losses_and_states(case):
    net, cut, x, y = prepared(case)
    with cut.tape(x, y) as tape:
        output = plain_output(net, x).detach().requires_grad_()
        losses = loss_of(net)(output, y)
        (errors,) = torch.autograd.grad(losses.sum(), output)
        assert_close([tape.losses, tape.errors, tape.output], [losses, errors, output])
        assert not tape.losses.requires_grad
        assert not any(h.requires_grad for h in tape.states)
        states = [h.clone() for h in tape.states]
    assert_close(states, [h.detach() for h in unrolled(net, x)[0]])
    with untouched(net):
        found, output = cut.states(x)
    assert_close(found, states)


@pytest.mark.parametrize("case", [BY_NAME["outside"], BY_NAME["stages"], BY_NAME["dropout"]], ids=str)
def test_an_exception_in_the_forward_leaves_nothing_behind(case):
    net, cut, x, y = prepared(case)
    cut.settle(x)

    def fails(*_):
        raise ZeroDivisionError

    for name in (*case.blocks, "head"):
        handle = net.get_submodule(name).register_forward_hook(fails)
        with untouched(net):
            for look in (lambda: cut.exact(x, y), lambda: cut.states(x), lambda: cut.replay(x, y)):
                with pytest.raises(ZeroDivisionError):
                    look()
        handle.remove()
    handle = net.head.register_forward_hook(fails)
    before = snapshot(net)
    with pytest.raises(ZeroDivisionError), cut.tape(x, y):
        pass
    assert not [
        key for key in changed(before, snapshot(net)) if "running" not in key and "tracked" not in key and key != "rng"
    ]
    handle.remove()
    assert_close(cut.exact(x, y).gradients, cut.exact(x, y).gradients)  # and it goes on


def test_an_exception_in_the_tape_leaves_no_hook():
    net, cut, x, y = prepared(BY_NAME["outside"])
    with untouched(net), pytest.raises(ZeroDivisionError), cut.tape(x, y):
        raise ZeroDivisionError


def test_nothing_is_written_to_what_the_loss_holds():
    """A loss with parameters of its own, and targets that require grad, are not the network's to change."""
    net, _, x, y = prepared(BY_NAME["outside"])
    temperature = torch.ones((), dtype=torch.float64, requires_grad=True)
    cut = Cut.of(net, blocks=["blocks.0", "blocks.1"], loss=lambda output, y: cross_entropy(output * temperature, y))
    cut.exact(x, y)
    cut.replay(x, y).tail(1, cut.states(x)[0][1])
    assert temperature.grad is None


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output, y: F.cross_entropy(output, y), "shape ()"),
        (lambda output, y: output, "shape (6, 3)"),
        (lambda output, y: output.sum(1, keepdim=True), "shape (6, 1)"),
        (lambda output, y: 1.0, "float"),
        (lambda output, y: None, "NoneType"),
    ],
)
def test_a_loss_that_is_not_per_example(loss, got):
    net, _, x, y = prepared(BY_NAME["outside"])
    cut = Cut.of(net, blocks=["blocks.0", "blocks.1"], loss=loss)
    for look in (lambda: cut.exact(x, y), lambda: cut.replay(x, y)):
        with untouched(net), pytest.raises(UsageError, match=r"one value per example, shape \(6,\)") as caught:
            look()
        assert str(caught.value).endswith(f"it gave {got}")


def test_inference_mode_is_refused():
    net, cut, x, y = prepared(BY_NAME["outside"])
    for look in (lambda: cut.exact(x, y), lambda: cut.states(x), lambda: cut.replay(x, y)):
        with torch.inference_mode(), untouched(net), pytest.raises(UsageError, match=r"use torch.no_grad\(\)"):
            look()


def test_a_loss_without_a_graph_is_refused():
    net, _, x, y = prepared(BY_NAME["outside"])
    cut = Cut.of(net, blocks=["blocks.0", "blocks.1"], loss=lambda output, y: (output.argmax(1) != y).double())
    with pytest.raises(UsageError, match="no exact credit"):
        cut.exact(x, y)
    with pytest.raises(UsageError, match="does not depend on the output by autograd"), cut.tape(x, y) as tape:
        tape.errors  # noqa: B018


def test_not_a_number_is_no_crash():
    net, cut, x, y = prepared(BY_NAME["outside"])
    x[0] = float("nan")
    fresh = Cut.of(net, blocks=["blocks.0", "blocks.1"])
    for one in (cut, fresh):
        found = one.exact(x, y)
        assert found.losses[0].isnan()
        assert not torch.cat([g[1:].flatten() for g in found.gradients]).isnan().any()
        assert one.replay(x, y).tail(1, found.states[1])[0].isnan()
    assert fresh.settle(x).joins == ("skip", "skip")


def test_buffers_that_a_module_assigns_anew_are_put_back():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)
            self.register_buffer("mean", torch.zeros(D))
            self.register_buffer("seen", None)

        def forward(self, h):
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.seen = h.detach()
            return self.a(h)

    net = Net(Counts).double()
    cut = Cut.of(net, blocks=["blocks.0", "blocks.1"])
    x, y = BY_NAME["chain"].batch()
    mean = net.blocks[0].mean
    with untouched(net):
        cut.settle(x)
        cut.exact(x, y)
        cut.states(x)
        cut.replay(x, y).tail(0, cut.states(x)[0][0])
    assert net.blocks[0].mean is mean
    assert net.blocks[0].seen is None
    net(x)
    assert net.blocks[0].seen is not None


def test_a_module_that_is_called_directly_is_refused():
    class Direct(Net):
        def forward(self, x):
            return self.head(self.blocks[1].forward(self.blocks[0](self.embed(x))))

    with pytest.raises(UsageError, match=r"block 'blocks.1' was not called by the network's forward"):
        Cut.of(Direct().double(), blocks=["blocks.0", "blocks.1"]).settle(BY_NAME["chain"].batch()[0])


def test_a_block_that_is_left_out_now_and_then_is_refused_when_it_is():
    class Sometimes(Net):
        skipped = False

        def forward(self, x):
            h = self.embed(x)
            for block in self.blocks[: 1 if self.skipped else 2]:
                h = block(h)
            return self.head(h)

    net = Sometimes().double()
    x, y = BY_NAME["chain"].batch()
    cut = Cut.of(net, blocks=["blocks.0", "blocks.1"])
    cut.settle(x)
    net.skipped = True
    for look in (lambda: cut.exact(x, y), lambda: cut.states(x), lambda: cut.replay(x, y)):
        with untouched(net), pytest.raises(UsageError, match=r"'blocks.1' was not called"):
            look()
