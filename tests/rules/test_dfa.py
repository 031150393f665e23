"""Direct feedback alignment against obvious autograd."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.rules import DFA
from creditscope.rules.dfa import dfa_credits
from creditscope.tape import Cut
from tests.oracles import assert_close, assert_same, left, local_step
from tests.rules.bench import CALM, DETERMINISTIC, SEVERAL, attached, matrices
from tests.zoo import BY_NAME, CASES


def by_hand(B):
    """a_l = B_l e, one example after another."""

    def credits(states, errors, _):
        return [
            torch.stack([(matrix @ e.flatten()).view(h.shape[1:]) for e in errors])
            for h, matrix in zip(states, B, strict=True)
        ]

    return credits


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_a_step(case):
    learner, net, x, y = attached(DFA(), case)
    B = matrices(learner)
    expected = local_step(net, x, y, by_hand(B), scale=0.25)
    learner.backward(x, y, scale=0.25)
    assert_same(left(net), expected)


@CALM
@pytest.mark.parametrize("case", CASES, ids=str)
def test_credits_are_the_formula_and_not_normalised(case):
    learner, _, x, y = attached(DFA(normalise="example", scale=3.0), case)
    with learner.cut.tape(x, y) as tape:
        expected = by_hand(matrices(learner))(tape.states, tape.errors, None)
    if not case.random:
        assert_close(learner.credits(x, y), expected)
    assert [a.shape for a in learner.credits(x, y)] == [h.shape for h in learner.states(x)]


@pytest.mark.parametrize("drive", ["output", "input"])
@pytest.mark.parametrize("how", ["none", "example", "batch"])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_normalised_each_way_at_each_end(case, how, drive):
    learner, net, x, y = attached(DFA(normalise=how, normalise_floor=1e-3, drive=drive), case)
    expected = local_step(net, x, y, by_hand(matrices(learner)), how=how, floor=1e-3, drive=drive)
    learner.backward(x, y)
    assert_same(left(net), expected)


@CALM
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "case", [c for c in DETERMINISTIC if c.name not in ("reentrant", "reentrant-outside")], ids=str
)
def test_the_penalty(case, reduction):
    rule = DFA(penalty=0.3, penalty_reduction=reduction)
    if attached(DFA(), case)[0].site.topology.hidden:
        with pytest.raises(UsageError, match="adds its skip inside, so its branch cannot be penalised"):
            attached(rule, case)
        return
    learner, net, x, y = attached(rule, case)
    expected = local_step(net, x, y, by_hand(matrices(learner)), penalty=0.3, reduction=reduction, scale=2.0)
    learner.backward(x, y, scale=2.0)
    assert_same(left(net), expected)
    branches = [net.segment(l, h, x)[1].detach() for l, h in enumerate(learner.states(x)[:-1])]
    sizes = [f.square().sum() / (len(y) * (1 if reduction == "sum" else f[0].numel())) for f in branches]
    assert float(learner.metrics()["penalty"]) == pytest.approx(0.3 * float(sum(sizes)))


@pytest.mark.parametrize("name", ["reentrant", "reentrant-outside"])
def test_the_penalty_needs_a_checkpoint_with_a_graph(name):
    with pytest.raises(UsageError, match="use_reentrant=False"):
        attached(DFA(penalty=0.3), BY_NAME[name])


@pytest.mark.parametrize("tokens", ["shared", "cls"])
def test_states_with_tokens(tokens):
    learner, net, x, y = attached(DFA(tokens=tokens), BY_NAME["mask-positional"])
    B = matrices(learner)
    assert [b.shape for b in B] == [(4, 3)] * 3

    def credits(states, errors, _):
        given = []
        for h, matrix in zip(states, B, strict=True):
            a = torch.zeros_like(h)
            for i, e in enumerate(errors):
                for t in range(h.shape[1]) if tokens == "shared" else [0]:
                    a[i, t] = matrix @ e
            given.append(a)
        return given

    expected = local_step(net, x, y, credits)
    learner.backward(x, y)
    assert_same(left(net), expected)


def test_states_with_channels_share_a_row_over_positions():
    learner, _, x, y = attached(DFA(tokens="shared"), BY_NAME["conv-outside"])
    B, errors = matrices(learner), None
    with learner.cut.tape(x, y) as tape:
        errors = tape.errors
    for matrix, a in zip(B, learner.credits(x, y), strict=True):
        assert_close([a], [(errors @ matrix.mT)[:, :, None, None].expand_as(a)])


def test_cls_needs_tokens():
    with pytest.raises(UsageError, match=r"state 0 has shape \(4, 6, 6\): tokens='cls' needs \(tokens, features\)"):
        attached(DFA(tokens="cls"), BY_NAME["conv-outside"])


def test_the_drive_at_the_input_needs_blocks_that_keep_the_shape():
    with pytest.raises(UsageError, match="block 'conv1' changes the state's shape from") as caught:
        attached(DFA(drive="input"), BY_NAME["convolutional"])
    assert "use drive='output'" in str(caught.value)


@pytest.mark.parametrize("tokens", ["dense", "shared", "cls"])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (4, 3, 2)])
def test_the_formula_takes_a_leading_axis(shape, tokens):
    if tokens == "cls" and len(shape) == 3:
        pytest.skip("no token 0 in an image")
    g = torch.Generator().manual_seed(0)
    rows = 24 if tokens == "dense" and len(shape) == 3 else 20 if tokens == "dense" and len(shape) == 2 else 4
    draw = lambda *size: torch.randn(size, generator=g)  # noqa: E731
    states, errors = [draw(7, 6, *shape) for _ in range(3)], draw(7, 6, 3)
    B = [draw(7, rows, 3) for _ in range(3)]
    together = dfa_credits(states, errors, B, tokens)
    for run in range(7):
        alone = dfa_credits([h[run] for h in states], errors[run], [b[run] for b in B], tokens)
        assert_close([a[run] for a in together], alone, 1e-6)


# --- the matrices -----------------------------------------------------------------------------------------------------


def test_matrices_are_drawn_in_block_order_from_the_generator():
    learner, *_ = attached(DFA(scale=2.0), BY_NAME["outside"], generator=torch.Generator().manual_seed(5))
    g = torch.Generator().manual_seed(5)
    expected = [(torch.randn(4, 3, generator=g) * (2 / 3**0.5)).double() for _ in range(3)]
    assert all(torch.equal(b, want) for b, want in zip(matrices(learner), expected, strict=True))


def test_no_generator_is_seed_0():
    learner, *_ = attached(DFA(), BY_NAME["outside"])
    same, *_ = attached(DFA(), BY_NAME["outside"], generator=torch.Generator().manual_seed(0))
    other, *_ = attached(DFA(), BY_NAME["outside"], generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(matrices(learner), matrices(same), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(matrices(learner), matrices(other), strict=True))


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_entries_have_the_scale_that_is_asked_for(distribution):
    case = BY_NAME["outside"]
    net = torch.nn.Sequential(torch.nn.Linear(7, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 25))
    rule = DFA(scale=1.5, distribution=distribution)
    learner = rule.attach(net, blocks=["1"], example=case.batch(dtype=torch.float32)[0])
    for b in matrices(learner):
        assert float(b.std()) == pytest.approx(1.5 / 5, rel=0.03)
        assert float(b.mean()) == pytest.approx(0, abs=0.01)
        assert (
            float(b.abs().max()) > 1.2 if distribution == "normal" else float(b.abs().max()) <= 1.5 / 5 * 3**0.5 + 1e-6
        )


def test_the_users_own_matrices():
    B = [torch.randn(4, 3) for _ in range(3)]
    learner, net, x, y = attached(DFA(), BY_NAME["outside"], feedback=B)
    expected = local_step(net, x, y, by_hand([b.double() for b in B]))
    B[0].zero_()  # they were copied
    learner.backward(x, y)
    assert_same(left(net), expected)


@pytest.mark.parametrize(
    ("feedback", "message"),
    [
        ([torch.ones(4, 3)] * 2, "feedback= of DFA must hold 3 matrices; it holds 2"),
        (
            [torch.ones(4, 3), torch.ones(3, 4), torch.ones(4, 3)],
            r"feedback[1] of DFA must have shape (4, 3); it has (3, 4)",
        ),
        ({"0": torch.ones(4, 3)}, "must be a list of 3 matrices, not dict"),
        (torch.ones(3, 4, 3), "must be a list of 3 matrices, not Tensor"),
        ([[[1.0, 2.0, 3.0]] * 4] * 3, "feedback[0] of DFA must be a tensor, not list"),
        ([torch.ones(4, 3, dtype=torch.long)] * 3, "feedback[0] of DFA must be floating point, not torch.int64"),
    ],
)
def test_wrong_matrices(feedback, message):
    with pytest.raises(UsageError) as caught:
        attached(DFA(), BY_NAME["outside"], feedback=feedback)
    assert message in str(caught.value)


def test_a_state_of_another_size_than_the_matrix_was_drawn_for_is_refused_by_name():
    case = BY_NAME["conv-outside"]
    learner, net, _, y = attached(DFA(), case)
    with pytest.raises(
        UsageError, match=r"state 0 has shape \(4, 8, 8\) now, 256 units, and its feedback matrix 144 rows"
    ):
        learner.backward(torch.randn(6, 2, 8, 8, dtype=torch.float64), y)
    shared, net, _, y = attached(DFA(tokens="shared"), case)
    shared.backward(torch.randn(6, 2, 8, 8, dtype=torch.float64), y)  # one row a channel fits every size
    assert Cut.of(net, **case.cut).depth == 2
