"""ResMLP against an independent copy of the source study's class, and its norms at initialisation."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from creditscope.errors import UsageError
from creditscope.nets import ResMLP


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln, self.w1, self.w2 = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)
        nn.init.normal_(self.w2.weight, 0.0, 0.01)
        nn.init.zeros_(self.w2.bias)

    def forward(self, h):
        return self.w2(F.gelu(self.w1(self.ln(h))))


class ResidualMLP(nn.Module):
    """The study's class as its description gives it."""

    def __init__(self, input_dim, d_hidden, num_classes, num_blocks):
        super().__init__()
        self.embed = nn.Linear(input_dim, d_hidden)
        self.blocks = nn.ModuleList([Block(d_hidden) for _ in range(num_blocks)])
        self.out_ln = nn.LayerNorm(d_hidden)
        self.out_head = nn.Linear(d_hidden, num_classes)

    def forward(self, x, return_hidden=False):
        h = self.embed(x)
        hidden = [h]
        for block in self.blocks:
            h = h + block(h)
            hidden.append(h)
        logits = self.out_head(self.out_ln(h))
        return (logits, hidden) if return_hidden else logits


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def vectors(n, features):
    return torch.randn(n, features, generator=torch.Generator().manual_seed(1))


def test_state_dict_of_the_study_loads_and_gives_its_states():
    theirs = ResidualMLP(12, 8, 5, 3)
    ours = ResMLP(inputs=12, width=8, depth=3, classes=5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = vectors(6, 12)
    logits, states = ours(x, return_hidden=True)
    expected, hidden = theirs(x, return_hidden=True)
    assert torch.equal(logits, expected)
    assert torch.equal(logits, ours(x))
    assert len(states) == 4
    assert all(torch.equal(ours_l, theirs_l) for ours_l, theirs_l in zip(states, hidden, strict=True))


def test_same_seed_gives_the_study_class_s_weights():
    torch.manual_seed(42)
    theirs = ResidualMLP(12, 8, 5, 3).state_dict()
    torch.manual_seed(42)
    ours = ResMLP(inputs=12, width=8, depth=3, classes=5).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("inputs", "d", "depth", "classes"), [(3072, 512, 12, 10), (7, 5, 1, 3)])
def test_parameter_count_is_the_formula(inputs, d, depth, classes):
    with torch.device("meta"):
        net = ResMLP(inputs, d, depth, classes)
        bare = ResMLP(inputs, d, depth, classes, terminal_norm=False)
    formula = inputs * d + d + depth * (2 * d**2 + 4 * d) + 2 * d + d * classes + classes
    assert sum(p.numel() for p in net.parameters()) == formula
    assert sum(p.numel() for p in bare.parameters()) == formula - 2 * d


def test_without_terminal_norm_the_head_reads_the_last_state():
    net = ResMLP(12, 8, 2, 5, terminal_norm=False)
    logits, states = net(vectors(6, 12), return_hidden=True)
    assert torch.equal(logits, net.out_head(states[-1]))
    assert net.credit_head == "out_head"
    assert not any(name.startswith("out_ln") for name in net.state_dict())


def test_without_residual_a_block_s_output_is_the_state():
    net = ResMLP(12, 8, 2, 5, residual=False, branch_std=0.5)
    _, states = net(vectors(6, 12), return_hidden=True)
    for l, block in enumerate(net.blocks):
        assert torch.equal(states[l + 1], block(states[l]))


@pytest.mark.parametrize("std", [0.0, 0.01, 0.5])
def test_branch_std_is_the_spread_of_w2(std):
    net = ResMLP(inputs=4, width=256, depth=2, branch_std=std)
    for block in net.blocks:
        assert block.w2.weight.std().item() == pytest.approx(std, rel=0.02)
        assert not block.w2.bias.any()


@pytest.mark.parametrize("std", [-0.1, float("nan"), float("inf")])
def test_bad_branch_std_is_refused(std):
    with pytest.raises(UsageError, match="branch_std must be a number of at least 0"):
        ResMLP(branch_std=std)


def cifar_like(n):
    """Return smooth images of varying brightness and contrast, normalised by channel as CIFAR-10 is."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randn(n, 3, 8, 8, generator=generator)
    contrast = 1 + 0.2 * torch.randn(n, 1, 1, 1, generator=generator)
    brightness = 0.3 * torch.randn(n, 1, 1, 1, generator=generator)
    x = contrast * F.interpolate(coarse, size=32, mode="bilinear") + brightness
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


def check_norms_at_initialisation(x, y):
    """The study's ‖h_0‖ 8.4-9.2, ‖f_l‖/‖h_l‖ .09-.105, ‖g_L‖ .9-1.1: medians over examples, sum-reduced loss."""
    net = ResMLP()
    logits, states = net(x.flatten(1), return_hidden=True)
    (g,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), states[-1])
    assert 8.4 <= states[0].norm(dim=1).median() <= 9.2
    for h, after in pairwise(states):
        assert 0.09 <= ((after - h).norm(dim=1) / h.norm(dim=1)).median() <= 0.105
    assert 0.9 <= g.norm(dim=1).median() <= 1.1


@pytest.mark.parametrize("seed", [42, 123, 456])
def test_norms_at_initialisation_on_cifar_like_images(seed):
    torch.manual_seed(seed)
    labels = torch.randint(10, (512,), generator=torch.Generator().manual_seed(3))
    check_norms_at_initialisation(cifar_like(512), labels)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 123, 456])
def test_norms_at_initialisation_on_cifar10(seed):
    path = Path(os.environ.get("CREDITSCOPE_DATA", "")) / "cifar-10-batches-bin" / "test_batch.bin"
    if not path.is_file():
        pytest.skip("CIFAR-10 is not under CREDITSCOPE_DATA")
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)[:1024])
    x = records[:, 1:].reshape(-1, 3, 32, 32).float() / 255
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    torch.manual_seed(seed)
    check_norms_at_initialisation(x, records[:, 0].long())
