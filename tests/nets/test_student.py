"""StudentNet: φ_α, the formula, and the bound on its branches."""

from __future__ import annotations

import pytest
import torch

from creditscope.errors import UsageError
from creditscope.nets import StudentNet
from creditscope.nets.student import phi


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def vectors(n, features):
    return torch.randn(n, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_phi_goes_from_linear_to_tanh(alpha):
    z = 3 * vectors(4, 5)
    torch.testing.assert_close(phi(z, alpha), (1 - alpha) * z + alpha * z.tanh())


@pytest.mark.parametrize("terminal_norm", [False, True])
def test_forward_is_the_formula(terminal_norm):
    net, x = StudentNet(12, 8, 3, 5, alpha=0.5, terminal_norm=terminal_norm).double(), vectors(6, 12)
    h = net.embed(x)
    for block in net.blocks:
        z = h @ block.w.weight.T + block.w.bias
        h = h + 0.5 * z + 0.5 * z.tanh()
    torch.testing.assert_close(net(x), net.out_head(net.out_ln(h)))
    assert net.credit_head == ("out_ln" if terminal_norm else "out_head")


def test_linear_student_is_affine():
    net = StudentNet(12, 8, 3, 5, alpha=0.0).double()
    x, y = vectors(1, 12), vectors(1, 12).flip(1)
    torch.testing.assert_close(net(0.3 * x + 0.7 * y), 0.3 * net(x) + 0.7 * net(y))


def test_tanh_branch_is_at_most_sqrt_d_long():
    net = StudentNet(alpha=1.0).double()
    with torch.no_grad():
        branch = net.blocks[0](1e6 * vectors(6, 128))
    assert branch.norm(dim=1).max() <= 128**0.5


@pytest.mark.parametrize("terminal_norm", [False, True])
def test_parameter_count_is_the_formula(terminal_norm):
    inputs, d, depth, classes = 12, 8, 3, 5
    net = StudentNet(inputs, d, depth, classes, terminal_norm=terminal_norm)
    formula = inputs * d + d + depth * (d**2 + d) + d * classes + classes + terminal_norm * 2 * d
    assert sum(p.numel() for p in net.parameters()) == formula


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_bad_alpha_is_refused(alpha):
    with pytest.raises(UsageError, match="alpha must lie between 0"):
        StudentNet(alpha=alpha)
