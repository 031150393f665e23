"""Feedback alignment by block against obvious autograd, and by weight against a network that is built for it."""

from __future__ import annotations

import copy

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import BP, FA
from creditscope.rules.fa import fa_credits
from tests.oracles import align, assert_close, assert_same, backprop, exact, left, local_step, untouched
from tests.rules.bench import CALM, DETERMINISTIC, SEVERAL, attached, keeps_shape, matrices
from tests.zoo import BY_NAME, CASES

UNIFORM = [case for case in CASES if keeps_shape(case) and case.name != "reentrant-inside"]
CHANGING = [case for case in CASES if not keeps_shape(case)]


# --- by block ---------------------------------------------------------------------------------------------------------


def by_hand(B):
    """a_L = g_L, a_l = B_l a_{l+1} for every token or position of every example."""

    def credits(states, _, terminal):
        a = [terminal]
        for matrix in reversed(B):
            before = a[0].movedim(1, -1) if a[0].ndim > 3 else a[0]
            moved = torch.stack([matrix @ one for one in before.reshape(-1, before.shape[-1])]).view(before.shape)
            a.insert(0, moved.movedim(-1, 1) if a[0].ndim > 3 else moved)
        return a

    return credits


@pytest.mark.parametrize("case", [case for case in UNIFORM if not case.random], ids=str)
def test_a_step_by_block(case):
    learner, net, x, y = attached(FA(level="block"), case)
    B = matrices(learner)
    assert len(B) == len(case.blocks)
    expected = local_step(net, x, y, by_hand(B), scale=0.25)
    learner.backward(x, y, scale=0.25)
    assert_same(left(net), expected)
    terminal = exact(net, x, y)[1][-1]
    assert_close(learner.credits(x, y), by_hand(B)(None, None, terminal))
    assert learner.exact_states == {len(case.blocks)}


@pytest.mark.parametrize("case", CHANGING, ids=str)
def test_blocks_that_change_shape_are_refused_by_name(case):
    with pytest.raises(UsageError, match=r"block '.*' changes the state's shape .* use FA\(level='weight'\)"):
        attached(FA(level="block"), case)


def test_a_reentrant_checkpoint_in_the_head_is_refused():
    learner, net, x, y = attached(FA(level="block"), BY_NAME["reentrant-inside"])
    with (
        untouched(net),
        pytest.raises(UsageError, match="g_L cannot be taken through a reentrant checkpoint in the head"),
    ):
        learner.backward(x, y)


@pytest.mark.parametrize("drive", ["output", "input"])
@pytest.mark.parametrize("how", ["example", "batch"])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_normalised_each_way_at_each_end(case, how, drive):
    learner, net, x, y = attached(FA(level="block", normalise=how, normalise_floor=1e-3, drive=drive), case)
    expected = local_step(net, x, y, by_hand(matrices(learner)), how=how, floor=1e-3, drive=drive)
    learner.backward(x, y)
    assert_same(left(net), expected)


@pytest.mark.parametrize("name", ["outside", "mask-positional", "adds-to-output", "written-between", "writes-chain"])
def test_the_penalty_by_block(name):
    learner, net, x, y = attached(FA(level="block", penalty=0.2), BY_NAME[name])
    expected = local_step(net, x, y, by_hand(matrices(learner)), penalty=0.2)
    learner.backward(x, y)
    assert_same(left(net), expected)


def test_blocks_that_are_all_frozen_leave_the_last_credit_exact():
    """No parameter makes h_L then, and still a_L is exact, by both heads."""
    learner, net, x, y = attached(FA(level="block"), BY_NAME["two-heads"])
    for parameter in (*net.embed.parameters(), *net.blocks.parameters()):
        parameter.requires_grad_(False)
    assert_close(learner.credits(x, y)[-1:], exact(net, x, y)[1][-1:])
    expected = local_step(net, x, y, by_hand(matrices(learner)))
    learner.backward(x, y)
    assert_same(left(net), expected)


@pytest.mark.parametrize("shape", [(4,), (5, 4), (4, 3, 2)])
def test_the_formula_takes_a_leading_axis(shape):
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=g, dtype=torch.float64)  # noqa: E731
    states, terminal, B = [draw(7, 6, *shape) for _ in range(3)], draw(7, 6, *shape), [draw(7, 4, 4) for _ in range(2)]
    together = fa_credits(states, B, terminal)
    for run in range(7):
        alone = fa_credits([h[run] for h in states], [b[run] for b in B], terminal[run])
        assert_close([a[run] for a in together], alone, 1e-12)
        assert_close(alone, by_hand([b[run] for b in B])(None, None, terminal[run]), 1e-12)


def test_identity_matrices_by_block_are_the_identity_path():
    learner, net, x, y = attached(FA(level="block"), BY_NAME["outside"], feedback=[torch.eye(4)] * 2)
    terminal = exact(net, x, y)[1][-1]
    assert_close(learner.credits(x, y), [terminal] * 3)


# --- by weight --------------------------------------------------------------------------------------------------------


def weights(learner):
    return {name.replace("/", "."): matrix for name, matrix in learner.pathway.named_buffers()}


def transparent(net):
    """Return the network's own weights as its feedback."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@CALM
@pytest.mark.parametrize("case", [case for case in CASES if case.opaque], ids=str)
def test_opaque_weights_are_refused_by_name(case):
    with pytest.raises(UsageError, match=r"weight-level FA cannot reach '.*weight'.* use FA\(level='block'\) or DFA"):
        attached(FA(), case)


@pytest.mark.parametrize("case", [case for case in CASES if not case.opaque], ids=str)
def test_with_the_networks_own_weights_it_is_backprop(case):
    learner, net, x, y = attached(FA(), case)
    own = {name: dict(net.named_parameters())[name].detach() for name in weights(learner)}
    learner, net, x, y = attached(FA(), case, feedback=own)
    torch.manual_seed(7)
    expected = backprop(net, x, y, 0.25)
    torch.manual_seed(7)
    loss = learner.backward(x, y, scale=0.25)
    assert_same(left(net), expected)
    assert loss.shape == ()
    torch.manual_seed(7)
    reference = learner.cut.exact(x, y)
    torch.manual_seed(7)
    assert_close(learner.credits(x, y), reference.gradients)


@pytest.mark.parametrize(
    "case",
    [case for case in DETERMINISTIC if not case.opaque and not case.batch_norm and case.name != "tied"],
    ids=str,
)
def test_with_other_weights_it_is_a_network_built_for_it(case):
    learner, net, x, y = attached(FA(), case)
    twin = copy.deepcopy(net)
    align(twin, weights(learner))
    expected = backprop(twin, x, y)
    learner.backward(x, y)
    assert_same(left(net), expected)
    assert_close(learner.credits(x, y), exact(twin, x, y)[1])
    different = [
        name for name, g in backprop(net, x, y).items() if g is not None and not torch.allclose(g, left(net)[name])
    ]
    assert different, "feedback of its own makes no difference"


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", ["outside", "mask-positional", "convolutional", "adds-to-output", "written-between"])
def test_the_penalty_travels_by_the_same_matrices(name, reduction):
    case = BY_NAME[name]
    learner, net, x, y = attached(FA(penalty=0.3, penalty_reduction=reduction), case)
    twin = copy.deepcopy(net)
    align(twin, weights(learner))
    reference, *_ = attached(BP(), case)
    expected = penalised(twin, x, y, 0.3, reduction)
    learner.backward(x, y)
    assert_same(left(net), expected)
    assert reference.rule.penalty == 0


def penalised(net, x, y, penalty, reduction):
    """Backpropagate the mean loss and the penalty through the segments in one graph."""
    from tests.oracles import gradients, loss_of

    h, total = net.stem(x), 0
    for l in range(net.depth):
        h, f = net.segment(l, h, x)
        total = total + f.square().sum() / (len(y) * (1 if reduction == "sum" else f[0].numel()))
    return gradients(net, loss_of(net)(net.rest(h, x), y).mean() + penalty * total)


@pytest.mark.parametrize("option", [{"normalise": "example"}, {"drive": "input"}])
def test_options_of_a_credit_on_blocks_do_not_apply_to_weights(option):
    with pytest.raises(UsageError, match=r"FA\(level='weight'\) has none; use level='block'"):
        FA(**option)
    FA(level="block", **option)


def test_matrices_are_drawn_in_the_parameters_order_with_their_fan():
    learner, net, *_ = attached(FA(scale=2.0), BY_NAME["convolutional"])
    g = torch.Generator().manual_seed(0)
    named = dict(net.named_parameters())
    assert [*weights(learner)] == [name for name, p in named.items() if p.ndim > 1]
    for name, matrix in weights(learner).items():
        shape = named[name].shape
        fan = shape[0] * shape[2:].numel()
        assert torch.equal(matrix, (torch.randn(shape, generator=g) * (2 / fan**0.5)).double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("head.weight"), "feedback= of weight-level FA lacks a matrix for 'head.weight'"),
        (lambda given: given.update({"haed.weight": torch.ones(3, 4)}), "did you mean 'head.weight'?"),
        (lambda given: given.update({"head.weight": torch.ones(4, 3)}), "must have shape (3, 4); it has (4, 3)"),
        (lambda given: given.update({"head.weight": None}), "must be a tensor, not NoneType"),
    ],
)
def test_wrong_matrices_by_weight(change, message):
    given = {name: m.clone() for name, m in weights(attached(FA(), BY_NAME["outside"])[0]).items()}
    change(given)
    with pytest.raises(UsageError) as caught:
        attached(FA(), BY_NAME["outside"], feedback=given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "feedback", "message"),
    [
        (FA(), [torch.eye(4)] * 2, "must be a dict of parameter names, not list"),
        (FA(level="block"), {"blocks.0": torch.eye(4)}, "must be a list of 2 matrices, not dict"),
        (FA(level="block"), [torch.eye(4)] * 3, "must hold 2 matrices; it holds 3"),
        (BP(), [torch.eye(4)], "BP has no feedback matrices; feedback= does not apply"),
    ],
)
def test_wrong_kinds_of_feedback(rule, feedback, message):
    with pytest.raises(UsageError) as caught:
        attached(rule, BY_NAME["outside"], feedback=feedback)
    assert message in str(caught.value)
