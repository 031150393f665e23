"""ViT: a small vision transformer with a cls token, pre-norm blocks and a terminal norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.errors import UsageError
from creditscope.nets._base import ImageNetwork, require_sizes


class Attention(nn.Module):
    """Multi-head self-attention, softmax(Q Kᵀ/√d_head) V, from two plain linear maps.

    Not ``nn.MultiheadAttention``: its weights are used inside one opaque call, where weight-level feedback alignment
    cannot see them. The product is written out, since of the kernels behind ``F.scaled_dot_product_attention`` some are
    not deterministic in their backward on a GPU, some have no second derivative, and which one runs depends on the
    machine; with the few tokens of this network they gain little.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return the attended tokens (batch, tokens, width)."""
        qkv = self.qkv(h).unflatten(-1, (3, self.heads, -1))  # (batch, tokens, 3, heads, d_head)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each (batch, heads, tokens, d_head)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """The branch of a pre-norm block, a + MLP(LN(h + a)) with a = attention(LN(h)); the skip is added by the network.

    So h + f(h) is the usual h′ = h + attention(LN(h)), h″ = h′ + MLP(LN(h′)).
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.w1 = nn.Linear(width, mlp_ratio * width)
        self.w2 = nn.Linear(mlp_ratio * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return the branch f(h), attention's and the MLP's contributions together."""
        a = self.attn(self.ln1(h))
        return a + self.w2(F.gelu(self.w1(self.ln2(h + a))))


class ViT(ImageNetwork):
    """Vision transformer: h_0 = [cls; patches] + pos, h_{l+1} = h_l + f_l(h_l), output = out_head(out_ln(h_L)[cls]).

    ====================  ===================================================  ===========================
    part                  layers                                               parameters
    ====================  ===================================================  ===========================
    ``cls``, ``pos``      the cls token; one position vector a token           d + T·d
    ``embed``             Conv2d(channels, d, patch, stride patch)             channels·patch²·d + d
    ``blocks.{l}``        ``ln1``, ``attn.qkv``, ``attn.proj``, ``ln2``,       (4 + 2r)d² + (9 + r)d each
                          ``w1``, GELU, ``w2``; L of them
    ``out_ln``            LayerNorm(d)                                         2d
    ``out_head``          Linear(d, classes), on the cls token                 d·classes + classes
    ====================  ===================================================  ===========================

    With d = ``width``, L = ``depth``, r = ``mlp_ratio`` and T = (image/patch)² + 1 tokens the count is the sum of the
    table, at the default sizes (65 tokens) 546,186 parameters.

    States are all tokens, (batch, T, d), cls first; h_L enters ``out_ln`` whole and the cls token is taken after it, so
    states have one shape throughout.

    After Dosovitskiy et al. (2020, arXiv:2010.11929). The source study's ViT-Mini has 4 blocks, d = 128, a cls token,
    pre-norm and a terminal norm; patch size 4, 4 heads, MLP ratio 2, learned positions and the initialisation are
    not given by it and are ours. ``cls`` and ``pos`` start as a normal of std 0.02 cut at ±2, drawn in this order and
    before the rest, which follows torch's defaults in the order of the table; the cls token of h_0 is then about 0.3
    long, the small cls norm (0.3 to 1.5) that the study reports.
    """

    def __init__(
        self,
        image: int = 32,
        channels: int = 3,
        patch: int = 4,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: int = 2,
        classes: int = 10,
    ):
        require_sizes(image=image, channels=channels, patch=patch, width=width, depth=depth)
        require_sizes(heads=heads, mlp_ratio=mlp_ratio, classes=classes)
        if image % patch:
            raise UsageError(f"patch must divide the image's side, {image}; {patch} does not")
        if width % heads:
            raise UsageError(f"heads must divide the width, {width}; {heads} does not")
        super().__init__()
        self.input_shape = (channels, image, image)
        self.cls = nn.Parameter(torch.empty(1, 1, width))
        self.pos = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        nn.init.trunc_normal_(self.cls, std=0.02)
        nn.init.trunc_normal_(self.pos, std=0.02)
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, mlp_ratio) for _ in range(depth))
        self.out_ln = nn.LayerNorm(width)
        self.out_head = nn.Linear(width, classes)

    @property
    def credit_head(self) -> str:
        """The module that h_L enters, all of its tokens: the terminal norm."""
        return "out_ln"

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        h = self.tokens(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out_head(self.out_ln(h)[:, 0])

    def tokens(self, x: Tensor) -> Tensor:
        """Return h_0, the cls token and the patches with their positions (batch, tokens, width)."""
        patches = self.embed(self._checked(x)).flatten(2).mT
        return torch.cat([self.cls.expand(len(patches), -1, -1), patches], 1) + self.pos
