"""The moving average: once per change of its source."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from creditscope.estimators import EMA
from tests.oracles import assert_close


def source() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()


def move(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p))


def test_the_formula_and_that_it_counts_changes_not_calls():
    net = source()
    ema = EMA(net, 0.9)
    expected = [p.detach().clone() for p in net.parameters()]
    for calls in (1, 3, 0, 2):
        move(net)
        expected = (
            [0.9 * e + 0.1 * p.detach() for e, p in zip(expected, net.parameters(), strict=True)] if calls else expected
        )
        for _ in range(calls):
            ema.advance(net)
    assert_close(ema.average.buffers(), expected, 1e-12)


def test_the_change_of_one_entry_counts():
    net = source()
    ema = EMA(net, 0.5)
    with torch.no_grad():
        net[1].bias[2] += 1.0
    ema.advance(net)
    assert ema.average[1].bias[2] == net[1].bias[2] - 0.5


def test_at_first_it_is_its_source_and_it_sees_no_optimiser():
    net = source()
    ema = EMA(net)
    x = torch.randn(5, 3).double()
    assert torch.equal(ema(x), net(x))
    assert not ema(x).requires_grad
    assert not [*ema.parameters()]
    move(net)
    assert not torch.equal(ema(x), net(x))


@pytest.mark.parametrize("advanced", [False, True])
def test_a_saved_average_goes_on_bit_for_bit(advanced):
    net = source()
    ema = EMA(net, 0.7)
    move(net)
    if advanced:
        ema.advance(net)
    file = io.BytesIO()
    torch.save([net.state_dict(), ema.state_dict()], file)
    file.seek(0)
    twin = source()
    other = EMA(twin, 0.7)
    for module, state in zip((twin, other), torch.load(file, weights_only=True), strict=True):
        module.load_state_dict(state)
    for one, average in ((net, ema), (twin, other)):
        average.advance(one)
    assert all(torch.equal(a, b) for a, b in zip(ema.buffers(), other.buffers(), strict=True))
