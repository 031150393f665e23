"""A replayed tail against the same segments by hand, on every network of the zoo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from creditscope.errors import UsageError
from creditscope.tape import Cut
from tests.oracles import assert_close, exact, tail, untouched
from tests.test_tape import CALM, MODES, prepared, same_draws
from tests.zoo import BATCH, BY_NAME, CASES, TOKENS, D, Outside, cast

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


def test_a_state_that_is_read_before_it_is_met_is_refused():
    _, _, _, replay = replayed(BY_NAME["several-consumers"])
    for l in (0, 1):
        with pytest.raises(UsageError, match=f"state {l} is read before it enters its module"):
            replay.tail(l, replay.states[l])


def test_what_holds_for_one_example_by_chance_is_not_taken_for_granted():
    """On zeros, without biases, h + f(h), relu(h + f(h)) and tanh(h) are all one."""
    case = BY_NAME["relu-after-skip"]
    net = case.network()
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    x, y = case.batch()
    cut = Cut.of(net, **case.cut)
    cut.settle(torch.zeros_like(x))
    replay = cut.replay(x, y)
    h = torch.randn(BATCH, D, dtype=torch.float64)
    for l in range(3):
        assert_close([replay.tail(l, h)], [tail(net, x, y, l, h)])
    zeros = cut.replay(torch.zeros_like(x), y)
    for l in range(3):
        assert_close([zeros.tail(l, h)], [tail(net, torch.zeros_like(x), y, l, h)])


@pytest.mark.parametrize("name", ["dropout", "dropout-between"])
def test_a_network_settled_in_eval_mode_is_replayed_in_training_mode(name):
    case = BY_NAME[name]
    net = case.network()
    x, y = case.batch()
    cut = Cut.of(net, **case.cut)
    cut.settle(x)
    net.train()
    same_draws()
    replay = cut.replay(x, y)
    for l in range(3):
        h = replay.states[l] + 0.1
        found = replay.tail(l, h)
        drawn(net, x, l)
        assert_close([found], [tail(net, x, y, l, h)])


def test_what_a_context_around_the_blocks_changes_is_replayed_in_it():
    """Nothing in the graph shows that the user's forward runs its blocks twice as precise."""

    class Flushes(Outside):
        def forward(self, x):
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                return super().forward(x)
            finally:
                torch.set_default_dtype(before)

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)

        def forward(self, h):
            return self.a(h) * (1.0 if torch.get_default_dtype() is torch.float64 else 0.5)

    net = Flushes(Scales).double()
    x, y = BY_NAME["outside"].batch()
    replay = Cut.of(net, blocks=["blocks.0", "blocks.1"]).replay(x, y)
    assert not replay.direct
    for l in range(3):
        assert_close([replay.tail(l, replay.states[l])], [replay.losses], 1e-12)


def test_a_mask_with_as_many_rows_as_the_batch_is_not_repeated():
    case = BY_NAME["mask-positional"]
    net = case.network()
    x, y = case.batch(TOKENS)
    replay = Cut.of(net, **case.cut).replay(x, y)
    for l in range(3):
        h = torch.cat([replay.states[l], 2 * replay.states[l], -replay.states[l]])
        found = replay.tail(l, h)
        assert_close(found.chunk(3), [tail(net, x, y, l, part) for part in h.chunk(3)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_callers_value_is_left_as_it_is(case):
    _, _, _, replay = replayed(case)
    for l in tails(case):
        h = replay.states[l] + 0.1
        before = h.clone()
        replay.tail(l, h)
        assert torch.equal(h, before)


@pytest.mark.parametrize(
    ("l", "shape", "message"),
    [
        (3, (BATCH, D), "there is no state 3: the states are 0..2"),
        (-1, (BATCH, D), "there is no state -1"),
        (1, (BATCH, D + 1), rf"state 1 has shape \({BATCH}, {D}\); \({BATCH}, {D + 1}\) does not fit"),
        (1, (BATCH + 1, D), "does not fit"),
        (1, (0, D), "does not fit"),
        (1, (BATCH, D, 1), "does not fit"),
    ],
)
def test_wrong_states(l, shape, message):
    _, _, _, replay = replayed(BY_NAME["outside"])
    with pytest.raises(UsageError, match=message):
        replay.tail(l, torch.zeros(shape, dtype=torch.float64))


def test_an_exception_in_a_replay_leaves_nothing_behind():
    for name in ("outside", "relu-after-skip", "dropout"):
        net, _, _, replay = replayed(BY_NAME[name])

        def fails(*_):
            raise ZeroDivisionError

        handle = net.head.register_forward_hook(fails)
        with untouched(net):
            for l in range(3):
                with pytest.raises(ZeroDivisionError):
                    replay.tail(l, replay.states[l])
        handle.remove()
        assert_close([replay.tail(1, replay.states[1])], [replay.losses])
