"""Estimators: the formula, one example after another; where their entries come from; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from creditscope.errors import UsageError
from creditscope.estimators import Architecture, StateNet, ValueNet, VectorNet
from tests.estimators.by_hand import evaluated
from tests.oracles import assert_close

SMALL = Architecture(time_embed_dim=6, hidden=7, layers=3)
KINDS = [ValueNet, StateNet, VectorNet]


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "tanh"])
@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_formula(kind, layers, activation):
    sizes, L = [4, 5, 5, 3], 3
    net = kind(sizes, 2, generator=stream(), architecture=Architecture(6, 7, layers, activation)).double()
    for norm in net.norms.values():
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    h, s = torch.randn(2, 6, 5).double(), torch.randn(6, 2).double()
    t = torch.tensor([[1 / 3], [2 / 3]]).double()
    t[:] = torch.tensor([[1.0], [2.0]], dtype=torch.float64) / L
    expected = torch.stack(
        [torch.stack([evaluated(net, h[n, i], l, L, s[i], activation) for i in range(6)]) for n, l in enumerate((1, 2))]
    )
    expected = expected.squeeze(-1) if kind is ValueNet else expected
    assert expected.shape[2:] == {ValueNet: (), StateNet: (3,), VectorNet: (5,)}[kind]
    assert_close([net(h, t, s)], [expected], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_another_size_share_the_middle_alone(kind):
    net = kind([4, 5, 4], 2, generator=stream(), architecture=SMALL)
    s = torch.randn(6, 2)
    net(torch.randn(6, 4), torch.zeros(6), s).sum().backward()
    touched = {name for name, p in net.named_parameters() if p.grad is not None}
    assert touched == {name for name, _ in net.named_parameters() if ".5." not in name}
    assert any(name.startswith("middle") for name in touched)


def test_entries_are_torchs_own_distribution_drawn_from_the_generator(untouched_rng):
    net = ValueNet([300], 10, generator=stream(3), architecture=Architecture(hidden=400))
    again = ValueNet([300], 10, generator=stream(3), architecture=Architecture(hidden=400))
    other = ValueNet([300], 10, generator=stream(4), architecture=Architecture(hidden=400))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    assert not torch.equal(net.first["300"].weight, other.first["300"].weight)
    for layer in (net.requires_grad_(False).first["300"], net.middle[1]):
        bound = layer.in_features**-0.5
        assert layer.weight.abs().max() <= bound
        assert float(layer.weight.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
        assert bound / 2 < layer.bias.abs().max() <= bound
    assert torch.equal(net.norms["300"].weight, torch.ones(300))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_embed_dim": 3}, "time_embed_dim must be an even number of at least 2, not 3"),
        ({"time_embed_dim": 0}, "time_embed_dim must be an even number of at least 2, not 0"),
        ({"hidden": 0}, "hidden must be at least 1, not 0"),
        ({"layers": 1}, "layers must be at least 2, not 1"),
        ({"activation": "gelo"}, "unknown activation 'gelo': did you mean 'gelu'? There are gelu, silu, relu, tanh."),
    ],
)
def test_sizes_that_make_no_network(options, said):
    with pytest.raises(UsageError) as caught:
        Architecture(**options)
    assert str(caught.value) == said


def test_a_state_of_a_size_that_it_was_not_made_for():
    net = VectorNet([4, 5], 2, generator=stream(), architecture=SMALL)
    with pytest.raises(UsageError, match="a state of 6 units: this estimator was made for states of 4, 5 units"):
        net(torch.randn(2, 6), torch.zeros(2), torch.randn(2, 2))
