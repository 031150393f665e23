"""ViT against torch's own attention and encoder layer, and its cls token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from creditscope.errors import UsageError
from creditscope.nets import ViT


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def images(n, side=8):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def small(**options):
    return ViT(**{"image": 8, "width": 8, "depth": 2, "heads": 2, "classes": 4} | options).double()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_torch_s(heads):
    attention = small(heads=heads).blocks[0].attn
    theirs = nn.MultiheadAttention(8, heads, batch_first=True, dtype=torch.float64)
    theirs.in_proj_weight, theirs.in_proj_bias = attention.qkv.weight, attention.qkv.bias
    theirs.out_proj = attention.proj
    h = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(h), theirs(h, h, h)[0])


def test_block_with_its_skip_is_torch_s_pre_norm_encoder_layer():
    block = small().blocks[0]
    theirs = nn.TransformerEncoderLayer(
        8, 2, dim_feedforward=16, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True, dtype=torch.float64
    )
    theirs.norm1, theirs.norm2, theirs.linear1, theirs.linear2 = block.ln1, block.ln2, block.w1, block.w2
    theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias = block.attn.qkv.weight, block.attn.qkv.bias
    theirs.self_attn.out_proj = block.attn.proj
    h = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(h + block(h), theirs(h))


def test_tokens_are_the_cls_token_and_linear_maps_of_the_patches():
    net, x = small(), images(3)
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    embedded = patches @ net.embed.weight.flatten(1).T + net.embed.bias
    h = net.tokens(x)
    assert h.shape == (3, 5, 8)
    torch.testing.assert_close(h[:, 1:], embedded + net.pos[:, 1:])
    torch.testing.assert_close(h[:, 0], (net.cls + net.pos[:, :1])[:, 0].expand(3, -1))


def test_cls_token_is_short_at_initialisation_as_the_study_reports():
    net = ViT()
    h = net.tokens(images(2, 32).float())
    assert 0.25 < h[:, 0].norm(dim=-1).median() < 1.5
    assert h[:, 1:].norm(dim=-1).median() > 3


def test_head_reads_the_normed_cls_token_of_the_last_state():
    net, seen = small(), []
    net.out_ln.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    logits = net(images(3))
    h, normed = seen[0]
    assert h.shape == (3, 5, 8)
    torch.testing.assert_close(logits, net.out_head(normed[:, 0]))


def test_network_has_second_derivatives():
    net, x = small(), images(2).requires_grad_()
    (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    assert second.abs().max() > 0


@pytest.mark.parametrize("ratio", [1, 4])
def test_parameter_count_is_the_formula(ratio):
    d, tokens, depth = 8, 5, 2
    count = sum(p.numel() for p in small(mlp_ratio=ratio).parameters())
    block = (4 + 2 * ratio) * d**2 + (9 + ratio) * d
    assert count == d + tokens * d + 3 * 16 * d + d + depth * block + 2 * d + 4 * d + 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 3}, "patch must divide the image's side, 8; 3 does not"),
        ({"heads": 3}, "heads must divide the width, 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        small(**options)
