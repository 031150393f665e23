"""ρ of the reference and of a random credit in every regime, and the name of the regime."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import creditscope as cs
from creditscope.auditing.probe import cross_entropy_change
from tests.auditing import planted
from tests.zoo import BY_NAME

Data = tuple[nn.Module, Any, Tensor, dict[str, Any]]


def random_credits(shapes: list[torch.Size], n: int, seed: int) -> list[Tensor]:
    """Per example, of unit norm."""
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(n, *shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [a / a.flatten(1).norm(dim=1).reshape(-1, *[1] * (a.ndim - 1)) for a in drawn]


def audited(net: nn.Module, x: Any, y: Any, seed: int, **options: Any) -> Any:
    from creditscope.tape import Cut

    cut = Cut.of(net, **{key: options.get(key) for key in ("blocks", "head", "state", "loss")})
    shapes = list(cut.settle(x).shapes)
    fns = {
        "reference": lambda x, y: cut.exact(x, y).gradients,
        "random": lambda x, y: random_credits(shapes, len(y), seed),
    }
    return cs.audit(net, x, y, credits=fns, nulls=2, **options), [s.numel() for s in shapes]


def at_start(seed: int) -> Data:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cs.nets.ResMLP(inputs=16, width=32, depth=3, classes=4), *planted.task(seed, 256), {}


def after_training(seed: int) -> Data:
    return planted.residual(seed), *planted.task(seed, 256), {}


def at_a_loss_of_1e_12(seed: int) -> Data:
    net = planted.residual(seed)
    x, y = planted.task(seed, 512)
    with torch.no_grad():
        x, y = (t[net(x).argmax(1) == y] for t in (x, y))
        best = net(x).topk(2).values
        for p in (net.out_head.weight, net.out_head.bias):
            p *= 30 / (best[:, 0] - best[:, 1]).median()
    return net, x, y, {}


def exploded(power: int) -> Callable[[int], Data]:
    def make(seed: int) -> Data:
        net = planted.residual(seed)
        with torch.no_grad():
            net.embed.weight *= 10.0**power
            net.embed.bias *= 10.0**power
        return net, *planted.task(seed, 256), {}

    make.__name__ = f"states_of_1e{power}"
    return make


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - F.one_hot(y, 4)).square().sum(1) / 2


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none", label_smoothing=0.1)


def with_loss(loss: Any) -> Callable[[int], Data]:
    def make(seed: int) -> Data:
        net, x, y, _ = after_training(seed)
        return net, x, y, {"loss": loss}

    make.__name__ = loss.__name__
    return make


def from_zoo(name: str) -> Callable[[int], Data]:
    def make(seed: int) -> Data:
        case = BY_NAME[name]
        return case.network(seed, dtype=torch.float32), *case.batch(200, seed, dtype=torch.float32), case.cut

    make.__name__ = name
    return make


def of_width(width: int) -> Callable[[int], Data]:
    def make(seed: int) -> Data:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = cs.nets.ResMLP(inputs=16, width=width, depth=1, classes=4)
        return net, *planted.task(seed, 64), {}

    make.__name__ = f"d_{width}"
    return make


REGIMES = [
    at_start,
    after_training,
    at_a_loss_of_1e_12,
    *(exploded(power) for power in (3, 6, 9, 12)),
    with_loss(squared),
    with_loss(smoothed),
    *(
        from_zoo(name)
        for name in ("mask-positional", "convolutional", "stages", "embedding", "token-output", "scalar-output")
    ),
    *(of_width(width) for width in (4, 4096)),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make", REGIMES, ids=lambda f: f.__name__)
def test_rho_of_the_reference_and_of_random(make: Callable[[int], Data], seed: int):
    net, x, y, options = make(seed)
    audit, sizes = audited(net, x, y, seed, **options)
    data, n = audit.data, len(y)
    for l, d in enumerate(sizes):
        if data.reference_norm.values[l] == 0:  # units that are off for most examples
            continue
        assert (data.rho_regime.values[:, l] == "resolved").all(), data.rho_regime.values
        assert data.rho.sel(credit="reference").values[l] > 0.99
        assert abs(data.rho.sel(credit="random").values[l]) < 4 * math.sqrt((1 / 32 + 1 / d) / n)
    assert (data.reference_rho.values[data.reference_norm.values > 0] > 0.99).all()


def test_below_resolution_is_said_and_not_read_as_a_finding():
    net = planted.residual(0)
    with torch.no_grad():
        net.out_head.weight.zero_()
    data = cs.audit(net, *planted.task(0), credits=planted.true_credits(net)).data
    assert data.rho.isnull().all()
    assert all("below resolution" in text for text in data.rho_regime.values)


def test_a_loss_that_bends_over_a_step_is_said():
    net = planted.residual(0)
    data = cs.audit(net, *planted.task(0), credits=planted.true_credits(net), epsilon=50.0).data
    assert any("not linear" in text for text in data.rho_regime.values)


def test_a_state_that_is_read_too_early_is_said():
    case = BY_NAME["several-consumers"]
    net = case.network(dtype=torch.float32)
    audit = cs.audit(cs.rules.BP().attach(net, **case.cut), *case.batch(64, dtype=torch.float32))
    assert "read before it enters" in str(audit.data.rho_regime.values[0])
    assert math.isnan(audit.data.rho.values[0])
    assert not math.isnan(audit.data.cosine.values[0])


def test_change_of_cross_entropy_against_many_digits():
    """Where the loss is 1e-13, and where it is large; against 400 bits."""
    from decimal import Decimal, getcontext

    getcontext().prec = 120
    g = torch.Generator().manual_seed(0)
    output = torch.cat([torch.randn(20, 4, generator=g), 30 * torch.eye(4), -40 * torch.eye(4)]).double()
    y = torch.cat([torch.randint(4, (20,), generator=g), torch.arange(4), torch.arange(4)])
    for size in (1e-12, 1e-6, 1e-2, 10.0, 100.0):
        change = size * torch.randn(output.shape, generator=g).double()

        def loss(row: list[float], delta: list[float], label: int) -> Decimal:
            z = [Decimal(a) + Decimal(b) for a, b in zip(row, delta, strict=True)]
            return sum((v - z[label]).exp() for v in z).ln()

        for row, delta, label, found in zip(
            output.tolist(), change.tolist(), y.tolist(), cross_entropy_change(output, change, y).tolist(), strict=True
        ):
            exact = loss(row, delta, label) - loss(row, [0.0] * 4, label)
            assert abs(Decimal(found) - exact) <= Decimal("1e-9") * abs(exact) + Decimal("1e-28")
