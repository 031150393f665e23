"""MLP: the formula, and direct feedback alignment's update as the textbook writes it."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.nets import MLP

PHI = {"relu": torch.relu, "tanh": torch.tanh, "gelu": torch.nn.functional.gelu}


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def vectors(n, features):
    return torch.randn(n, features, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", PHI)
def test_forward_is_the_formula(activation):
    net, x = MLP(12, 8, depth=3, classes=5, activation=activation), vectors(6, 12)
    h = x
    for layer in [net.embed, *net.blocks]:
        h = PHI[activation](h @ layer.linear.weight.T + layer.linear.bias)
    torch.testing.assert_close(net(x), h @ net.out_head.weight.T + net.out_head.bias)


def test_norm_is_before_the_activation():
    net, x = MLP(12, 8, depth=2, norm=True), vectors(6, 12)
    z = net.embed.linear(x)
    normed = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(net.embed(x), normed.relu())


@pytest.mark.parametrize(("depth", "norm"), [(2, False), (4, True)])
def test_parameter_count_is_the_formula(depth, norm):
    inputs, d, classes = 12, 8, 5
    net = MLP(inputs, d, depth, classes, norm=norm)
    formula = inputs * d + d + (depth - 1) * (d**2 + d) + d * classes + classes + norm * 2 * d * depth
    assert sum(p.numel() for p in net.parameters()) == formula
    assert len(net.credit_blocks) == depth - 1


def test_credit_at_a_block_s_output_gives_the_textbook_update():
    """With a credit a at h = φ(z), autograd's update is (a ⊙ φ′(z)) hᵀ, the local rule of DFA."""
    net, x = MLP(12, 8, depth=3, activation="tanh"), vectors(6, 12)
    h = net.embed(x).detach()
    block, a = net.blocks[0], vectors(6, 8)
    out = block(h)
    (update,) = torch.autograd.grad(out, block.linear.weight, grad_outputs=a)
    torch.testing.assert_close(update, (a * (1 - out.detach() ** 2)).T @ h)


def test_bad_depth_and_activation_are_refused():
    with pytest.raises(UsageError, match="must be at least 2, not 1"):
        MLP(depth=1)
    with pytest.raises(UsageError, match="unknown activation 'rleu': did you mean 'relu'"):
        MLP(activation="rleu")  # type: ignore[arg-type]
