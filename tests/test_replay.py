"""A replayed tail against the same segments by hand, on every network of the zoo."""

from __future__ import annotations

import pytest
import torch

from tests.oracles import assert_close, exact, tail, untouched
from tests.test_tape import CALM, MODES, prepared, same_draws
from tests.zoo import CASES, cast

pytestmark = CALM
EARLY = {"several-consumers"}


def replayed(case, mode="eval", dtype=torch.float64):
    net, cut, x, y = prepared(case, mode)
    net, x, y = net.to(dtype), cast(x, dtype), cast(y, dtype)
    same_draws()
    with untouched(net):
        return net, x, y, cut.replay(x, y)


def drawn(net, x, upto):
    """Run the plain network up to a state, so that the global generator stands where the recorded pass had it."""
    same_draws()
    h = net.stem(x)
    for k in range(upto):
        h = net.segment(k, h, x)[0]


def tails(case):
    return range(len(case.blocks) + 1) if case.name not in EARLY else [len(case.blocks)]


@pytest.mark.parametrize(("case", "mode"), MODES)
def test_the_states_themselves_give_the_losses(case, mode):
    net, _x, _y, replay = replayed(case, mode)
    torch.manual_seed(99)  # what the user draws in between does not matter
    for l in tails(case):
        with untouched(net):
            assert_close([replay.tail(l, replay.states[l])], [replay.losses], 1e-12)


@pytest.mark.parametrize(("case", "mode"), MODES)
def test_other_states_give_what_the_segments_give(case, mode):
    net, x, y, replay = replayed(case, mode)
    g = torch.Generator().manual_seed(5)
    for l in tails(case):
        h = replay.states[l] + torch.randn(replay.states[l].shape, generator=g, dtype=torch.float64)
        found = replay.tail(l, h)
        drawn(net, x, l)
        assert_close([found], [tail(net, x, y, l, h)])


@pytest.mark.parametrize(("case", "mode"), MODES)
def test_the_slope_of_the_tail_is_the_exact_credit(case, mode):
    net, x, y, replay = replayed(case, mode)
    same_draws()
    gradients = exact(net, x, y)[1]
    g = torch.Generator().manual_seed(5)
    for l in tails(case):
        h, v = replay.states[l], torch.randn(replay.states[l].shape, generator=g, dtype=torch.float64)
        up, down = (replay.tail(l, h + e * v).sum().detach() for e in (1e-5, -1e-5))
        assert float((up - down) / 2e-5) == pytest.approx(float((gradients[l] * v).sum()), rel=1e-5, abs=1e-7)
        leaf = h.clone().requires_grad_()
        if not case.name.startswith("reentrant"):  # whose forward keeps no graph
            assert_close(torch.autograd.grad(replay.tail(l, leaf).sum(), leaf), [gradients[l]])


@pytest.mark.parametrize("case", [case for case in CASES if not case.batch_norm], ids=str)
def test_several_replays_side_by_side(case):
    _net, _x, _y, replay = replayed(case)
    g = torch.Generator().manual_seed(5)
    for l in tails(case):
        h = torch.stack(
            [replay.states[l], replay.states[l] * 1.5, torch.randn(replay.states[l].shape, generator=g).double()]
        )
        found = replay.tail(l, h.flatten(0, 1))
        assert_close([found.view(3, -1)], [torch.stack([replay.tail(l, one) for one in h])])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tail_of_a_float32_network_in_float64(case):
    if case.name == "encoder-layers":
        pytest.skip("its mask is a buffer of another dtype")
    net, _x, _y, replay = replayed(case, dtype=torch.float32)
    assert replay.losses.dtype == torch.float32
    torch.manual_seed(99)
    for l in tails(case):
        with untouched(net):
            found = replay.tail(l, replay.states[l].double())
        assert found.dtype == torch.float64
        assert_close([found.float()], [replay.losses], 1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.random], ids=str)
def test_another_precision_draws_its_own_masks_and_keeps_them(case):
    _net, _x, _y, replay = replayed(case, "train", torch.float32)
    torch.manual_seed(99)
    double = replay.astype(torch.float64)
    torch.manual_seed(100)
    for l in tails(case):
        assert_close([replay.tail(l, double.states[l])], [double.losses], 1e-12)
