"""A zoo of tiny networks, one for each way in which a module can be put together around its blocks.

Each has a ``forward`` as its author might have written it, and the same computation once more as segments (``stem``,
``segment``, ``rest``), out of place and without hooks: what the oracles of the tests differentiate.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D, TOKENS, CLASSES, BATCH = 4, 5, 3, 6  # all different, so that a mistaken axis shows

Stream = tuple[Tensor, Tensor | None]
"""The next state, and the branch f_l where the network exposes it."""


class Branch(nn.Module):
    """f(h) = W₂ tanh(W₁ h + b₁) + b₂."""

    def __init__(self, d: int = D, out: int | None = None):
        super().__init__()
        self.a, self.b = nn.Linear(d, d + 1), nn.Linear(d + 1, out or d)

    def forward(self, h):
        return self.b(torch.tanh(self.a(h)))


class PreActivation(nn.Module):
    """f(h) = W relu(h) + b: keeps nothing of h for the backward pass, so that h may be written into."""

    def __init__(self, d: int = D):
        super().__init__()
        self.a = nn.Linear(d, d)

    def forward(self, h):
        return self.a(torch.relu(h))


class InnerSkip(Branch):
    """h + f(h)."""

    def forward(self, h):
        return h + super().forward(h)


class Exposed(nn.Module):
    """h + f(h), f being the submodule ``branch``."""

    def __init__(self):
        super().__init__()
        self.branch = Branch()

    def forward(self, h):
        return h + self.branch(h)


class Writes(nn.Module):
    """Begins by writing into its input."""

    def __init__(self, d: int = D):
        super().__init__()
        self.a = nn.Linear(d, d)

    def forward(self, h):
        return self.a(h.mul_(0.7).tanh_())


class Net(nn.Module):
    """A stem, two blocks that follow each other, a head."""

    depth = 2

    def __init__(self, block: Callable[[], nn.Module] = Branch, depth: int = 2):
        super().__init__()
        self.depth = depth
        self.embed = nn.Linear(7, D)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def stem(self, x: Any) -> Tensor:
        return self.embed(x)

    def segment(self, l: int, h: Tensor, x: Any) -> Stream:
        out = self.blocks[l](h)
        return out, out

    def rest(self, h: Tensor, x: Any) -> Tensor:
        return self.head(h)


class Hidden(Net):
    """The skip inside the block, which hides its branch."""

    def __init__(self, depth: int = 2):
        super().__init__(InnerSkip, depth)

    def segment(self, l, h, x):
        return self.blocks[l](h), None


class ExposedInner(Net):
    """The skip inside the block, which shows its branch."""

    def __init__(self, depth: int = 2):
        super().__init__(Exposed, depth)

    def segment(self, l, h, x):
        f = self.blocks[l].branch(h)
        return h + f, f


class Outside(Net):
    """The skip outside: h = h + block(h), then a terminal norm."""

    def __init__(self, block=Branch, depth: int = 2):
        super().__init__(block, depth)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h))

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return h + f, f

    def rest(self, h, x):
        return self.head(self.norm(h))


class OutsideDirect(Outside):
    """The skip outside, the sum straight into a linear head."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) + h
        return self.head(h)

    def rest(self, h, x):
        return self.head(h)


class AddsInPlace(Outside):
    """h += block(h)."""

    def __init__(self):
        super().__init__(PreActivation)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h += block(h)
        return self.head(self.norm(h))


class AddsToOutput(Outside):
    """out = block(h); out += h."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            out = block(h)
            out += h
            h = out
        return self.head(self.norm(h))


class Scaled(Outside):
    """h = h + ½ block(h)."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + 0.5 * block(h)
        return self.head(self.norm(h))

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return h + 0.5 * f, f


class PostNorm(Net):
    """h = norm_l(h + block(h)): the last state enters the last norm."""

    def __init__(self, depth: int = 2):
        super().__init__(Branch, depth)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(depth))

    def forward(self, x):
        h = self.embed(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            h = norm(h + block(h))
        return self.head(h)

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return self.norms[l](h + f) if l < self.depth - 1 else h + f, f

    def rest(self, h, x):
        return self.head(self.norms[-1](h))


class ReluBetween(Net):
    """h = relu(block(h) + 1): the last state is the last block's output."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = F.relu(block(h) + 1)
        return self.head(h)

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return F.relu(f + 1) if l < self.depth - 1 else f, f

    def rest(self, h, x):
        return self.head(F.relu(h + 1))


class ReluAfterSkip(Outside):
    """h = relu(h + block(h)), the activation a function, and a norm that takes what comes of it."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = F.relu(h + block(h))
        return self.head(self.norm(h))

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return F.relu(h + f), f


class WrittenBetween(Net):
    """A block's output is written into before the next block and before the head."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            F.leaky_relu_(h)
        return self.head(h)

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return F.leaky_relu(f) if l < self.depth - 1 else f, f

    def rest(self, h, x):
        return self.head(F.leaky_relu(h))


class Convolutional(Net):
    """Activations, pooling and a flatten between blocks that change shape, from images to vectors."""

    depth = 3

    def __init__(self):
        nn.Module.__init__(self)
        self.conv0 = nn.Conv2d(2, 3, 3, padding=1)
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(4, 5, 3)
        self.fc = nn.Linear(5, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = F.relu(self.conv0(x))
        h = F.avg_pool2d(F.relu(self.conv1(h)), 2)
        h = F.relu(self.conv2(h)).flatten(1)
        return self.head(F.relu(self.fc(h)))

    def stem(self, x):
        return F.relu(self.conv0(x))

    def segment(self, l, h, x):
        if l == 0:
            f = self.conv1(h)
            return F.avg_pool2d(F.relu(f), 2), f
        f = self.conv2(h) if l == 1 else self.fc(h)
        return F.relu(f).flatten(1) if l == 1 else f, f

    def rest(self, h, x):
        return self.head(F.relu(h))


class ResidualStage(nn.Module):
    """A BatchNorm stage that halves the map and carries its own projection."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, h):
        f = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(h)))))
        return F.relu(f + self.short(h))


class Stages(Net):
    """BatchNorm stages that change shape, global pooling behind them."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([ResidualStage(3, 3, 1), ResidualStage(3, D, 2)])
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))

    def rest(self, h, x):
        return self.head(h.mean((2, 3)))


class ConvOutside(Net):
    """Images with the skip outside."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Conv2d(2, D, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(D, D, 3, padding="same", padding_mode="circular") for _ in range(2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.pool(h).flatten(1))

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return h + f, f

    def rest(self, h, x):
        return self.head(self.pool(h).flatten(1))


class Attention(nn.Module):
    """One head of self-attention under a mask."""

    def __init__(self, d: int = D):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, h, mask):
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out(scores @ v)


class Transformer(Net):
    """Tokens (batch, T, d) through attention blocks; ``how`` is the way in which mask and result are handed over."""

    def __init__(self, how: str = "positional"):
        nn.Module.__init__(self)
        self.how = how
        self.embed = nn.Linear(7, D)
        self.pos = nn.Parameter(torch.randn(1, TOKENS, D))
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())
        self.blocks = nn.ModuleList(WRAPPED[how]() for _ in range(2))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.embed(x) + self.pos
        for block in self.blocks:
            if self.how == "positional":
                h = h + block(h, self.mask)
            elif self.how == "keyword":
                h = h + block(mask=self.mask, h=h)
            elif self.how == "tuple":
                h = block((h, self.mask))[0]
            elif self.how == "named":
                h = block(h, mask=self.mask).hidden
            elif self.how == "dict":
                h = block(h, mask=self.mask)["hidden"]
            elif self.how == "dataclass":
                h = block(Stated(h, self.mask)).h
        return self.head(self.norm(h)[:, 0])

    def stem(self, x):
        return self.embed(x) + self.pos

    def segment(self, l, h, x):
        block = self.blocks[l]
        attention = block.attention if hasattr(block, "attention") else block
        f = attention(h, self.mask)
        return h + f, f if self.how in ("positional", "keyword") else None

    def rest(self, h, x):
        return self.head(self.norm(h)[:, 0])


Named = namedtuple("Named", ["hidden", "weights"])


@dataclass
class Stated:
    """What a block may take and return that is no container of torch's."""

    h: Tensor
    mask: Tensor


class TupleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, pair):
        h, mask = pair
        return h + self.attention(h, mask), mask


class NamedBlock(TupleBlock):
    def forward(self, h, mask):
        return Named(h + self.attention(h, mask), None)


class DictBlock(TupleBlock):
    def forward(self, h, mask):
        return {"ids": torch.zeros(2, dtype=torch.long), "hidden": h + self.attention(h, mask)}


class DataclassBlock(TupleBlock):
    def forward(self, stated):
        return Stated(stated.h + self.attention(stated.h, stated.mask), stated.mask)


WRAPPED = {
    "positional": Attention,
    "keyword": Attention,
    "tuple": TupleBlock,
    "named": NamedBlock,
    "dict": DictBlock,
    "dataclass": DataclassBlock,
}


def stated(value: Any) -> Tensor:
    """Find the state in what a dataclass block takes (a tuple of arguments) and returns."""
    value = value[0] if isinstance(value, tuple) else value
    return value.h if isinstance(value, Stated) else value


class EncoderLayers(Net):
    """torch's own encoder layers, with a mask."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Linear(7, D)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, src_mask=self.mask)
        return self.head(h.mean(1))

    def segment(self, l, h, x):
        return self.blocks[l](h, src_mask=self.mask), None

    def rest(self, h, x):
        return self.head(h.mean(1))


class Nested(Net):
    """Blocks deep inside containers."""

    def __init__(self):
        nn.Module.__init__(self)
        towers = nn.ModuleDict({"main": nn.Sequential(nn.Sequential(Branch(), Branch()), nn.Identity())})
        self.body = nn.ModuleList([nn.Linear(7, D), towers])
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.body[1]["main"](self.body[0](x)))

    def stem(self, x):
        return self.body[0](x)

    def segment(self, l, h, x):
        out = self.body[1]["main"][0][l](h)
        return out, out


class Checkpointed(Net):
    """Blocks under activation checkpointing."""

    def __init__(self, reentrant: bool, outside: bool):
        super().__init__()
        self.reentrant, self.outside = reentrant, outside

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            out = checkpoint(block, h, use_reentrant=self.reentrant)
            h = h + out if self.outside else out
        return self.head(h)

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return (h + f if self.outside else f), None if self.reentrant else f


class InnerCheckpoint(nn.Module):
    """Part of the block is under reentrant checkpointing."""

    def __init__(self):
        super().__init__()
        self.f, self.g = Branch(), nn.Linear(D, D)

    def forward(self, h):
        return self.g(checkpoint(self.f, h, use_reentrant=True))


class InnerCheckpoints(Outside):
    """Blocks and head with reentrant checkpoints in them."""

    def __init__(self):
        super().__init__(InnerCheckpoint)
        self.head = nn.Sequential(InnerCheckpoint(), nn.Linear(D, CLASSES))

    def segment(self, l, h, x):
        f = self.blocks[l].g(self.blocks[l].f(h))
        return h + f, f

    def rest(self, h, x):
        return self.head[1](self.head[0].g(self.head[0].f(self.norm(h))))


class WritesChain(Net):
    """Blocks that write into their input, no skip."""

    def __init__(self):
        super().__init__(Writes)

    def segment(self, l, h, x):
        f = self.blocks[l].a((h * 0.7).tanh())
        return f, f


class WritesOutside(Outside):
    """Blocks that write into their input; the skip around them reads what they wrote."""

    def __init__(self):
        super().__init__(Writes)

    def segment(self, l, h, x):
        written = (h * 0.7).tanh()
        f = self.blocks[l].a(written)
        return written + f, f


class WrittenBehind(Outside):
    """A state is written into behind its block's back, before the skip reads it."""

    def __init__(self):
        super().__init__(PreActivation)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            f = block(h)
            h.mul_(0.5)
            h = h + f
        return self.head(self.norm(h))

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return 0.5 * h + f, f


class DropBlock(nn.Module):
    """A branch with dropout, dropped as a whole for some examples."""

    def __init__(self, p: float = 0.4):
        super().__init__()
        self.a, self.p = nn.Linear(D, D), p

    def forward(self, h):
        f = F.dropout(torch.tanh(self.a(h)), self.p, self.training)
        if not self.training:
            return f
        keep = torch.rand(len(h), *[1] * (h.ndim - 1), dtype=h.dtype) > 0.3
        return f * keep


class Dropped(Outside):
    """Dropout in the stem, stochastic depth in the blocks, dropout in the head."""

    def __init__(self):
        super().__init__(DropBlock)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(self.embed(x))
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.drop(self.norm(h)))

    def stem(self, x):
        return self.drop(self.embed(x))

    def rest(self, h, x):
        return self.head(self.drop(self.norm(h)))


class DroppedBetween(Net):
    """Dropout by function around the blocks: nothing in eval mode, and something in training."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = F.dropout(block(h), 0.5, self.training)
        return self.head(h)

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return F.dropout(f, 0.5, self.training) if l < self.depth - 1 else f, f

    def rest(self, h, x):
        return self.head(F.dropout(h, 0.5, self.training))


class TwoNames(Net):
    """One block is registered under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.blocks[0]


class TwoInputs(Net):
    """Takes two tensors, by position or by keyword; the second reaches every block."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Linear(7, D)
        self.blocks = nn.ModuleList(nn.Bilinear(D, 2, D) for _ in range(2))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x, z):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h, z)
        return self.head(h)

    def stem(self, x):
        return self.embed(x["x"] if isinstance(x, dict) else x[0])

    def segment(self, l, h, x):
        f = self.blocks[l](h, x["z"] if isinstance(x, dict) else x[1])
        return h + f, f


class Embedded(Net):
    """Integer inputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, D)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)[:, -1]

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return h + f, f

    def rest(self, h, x):
        return self.head(h)[:, -1]


class NoStem(Net):
    """h_0 is the input."""

    def __init__(self):
        super().__init__()
        del self.embed

    def forward(self, x):
        h = x
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)

    def stem(self, x):
        return x * 1.0

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return h + f, f


class NoHead(Net):
    """The last block's output is the network's."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Linear(7, D)
        self.blocks = nn.ModuleList([Branch(), Branch(out=CLASSES)])

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h

    def rest(self, h, x):
        return h * 1.0


class FunctionalHead(NoHead):
    """A head without parameters."""

    def forward(self, x):
        return F.log_softmax(super().forward(x), -1)

    def rest(self, h, x):
        return F.log_softmax(h, -1)


class HeadGiven(Outside):
    """The first module called after the last block does not take h_L: it has to be named."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(7, D)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        gate = torch.sigmoid(self.gate(x))
        return self.head(self.norm(h) * gate)

    def rest(self, h, x):
        return self.head(self.norm(h) * torch.sigmoid(self.gate(x)))


class NormServesTwice(Outside):
    """The norm that takes h_L also ends the stem."""

    def forward(self, x):
        h = self.norm(self.embed(x))
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h))

    def stem(self, x):
        return self.norm(self.embed(x))


class SeveralConsumers(Outside):
    """A state is read by a block, by the skip and by a map beside the block."""

    def __init__(self):
        super().__init__()
        self.side = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        h = self.embed(x)
        for block, side in zip(self.blocks, self.side, strict=True):
            beside = torch.tanh(side(h))
            h = h + block(h) + beside
        return self.head(self.norm(h))

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        return h + f + torch.tanh(self.side[l](h)), f


class Tied(Outside):
    """Two blocks share a weight; embedding and head share theirs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, D)
        self.head = nn.Linear(D, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].a.weight = self.blocks[0].a.weight


class UserFrozen(Outside):
    """The user keeps a bias of a block, and the stem, as they are."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].a.bias.requires_grad_(False)


class IdentityBlock(Net):
    """One of the blocks gives back the tensor that it takes."""

    depth = 3

    def __init__(self):
        super().__init__(depth=3)
        self.blocks[1] = nn.Identity()

    def segment(self, l, h, x):
        out = self.blocks[l](h) * 1.0
        return out, out


class TokenOutput(Outside):
    """An output for every token."""

    def forward(self, x):
        return super().forward(x)

    @staticmethod
    def loss(output, y):
        return F.cross_entropy(output.mT, y, reduction="none").mean(1)


class ScalarOutput(Outside):
    """One number an example, shape (batch,)."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(D, 1)

    def forward(self, x):
        return super().forward(x).squeeze(-1)

    def rest(self, h, x):
        return super().rest(h, x).squeeze(-1)

    @staticmethod
    def loss(output, y):
        return (output - y).square()


class WrittenInHead(Outside):
    """A head whose activation is written in place between two of its modules."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(F.relu(self.fc(self.norm(h)), inplace=True))

    def rest(self, h, x):
        return self.head(F.relu(self.fc(self.norm(h))))


class WritingHead(Outside):
    """A head that begins by writing into what it takes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, CLASSES))

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)

    def rest(self, h, x):
        return self.head[1](F.relu(h))


class TwoHeads(Outside):
    """Two heads read the last state."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h) + torch.tanh(self.second(h))

    def rest(self, h, x):
        return self.head(h) + torch.tanh(self.second(h))


class AddsInside(nn.Module):
    """h += f(h) inside the block."""

    def __init__(self):
        super().__init__()
        self.f = PreActivation()

    def forward(self, h):
        h += self.f(h)
        return h


class InnerInPlace(Net):
    """The skip inside the block, added in place."""

    def __init__(self):
        super().__init__(AddsInside)

    def segment(self, l, h, x):
        return h + self.blocks[l].f(h), None


class PostNormInside(nn.Module):
    """norm(h + f(h))."""

    def __init__(self):
        super().__init__()
        self.f, self.norm = Branch(), nn.LayerNorm(D)

    def forward(self, h):
        return self.norm(self.f(h) + h)


class InnerPostNorm(Net):
    """The skip inside the block, with a norm behind it."""

    def __init__(self):
        super().__init__(PostNormInside)

    def segment(self, l, h, x):
        return self.blocks[l](h), None


class CheckpointedHead(Outside):
    """A head under activation checkpointing."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return checkpoint(self.head, h, use_reentrant=False)

    def rest(self, h, x):
        return self.head(h)


class WritesNoStem(WritesOutside):
    """Blocks write into the network's own input."""

    def __init__(self):
        super().__init__()
        del self.embed

    def forward(self, x):
        h = x
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h))

    def stem(self, x):
        return x * 1.0


class EmbeddedWrites(Embedded):
    """Blocks write into an embedding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Writes() for _ in range(2))

    def segment(self, l, h, x):
        written = (h * 0.7).tanh()
        f = self.blocks[l].a(written)
        return written + f, f


class Returns(Net):
    """The network's output is the first of a tuple."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h), h.detach()


class Transposed(Net):
    """States that are views with other strides, and blocks that end in one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(TOKENS, TOKENS) for _ in range(2))

    def forward(self, x):
        h = self.embed(x).mT
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h.mT.mean(1))

    def stem(self, x):
        return self.embed(x).mT

    def segment(self, l, h, x):
        f = self.blocks[l](h)
        following = h + torch.tanh(f)
        return (following if l == 0 else following.mT.mean(1)), f  # what enters the head is the mean over tokens


# --- the cases --------------------------------------------------------------------------------------------------------


def vectors(n, g):
    return torch.randn(n, 7, generator=g, dtype=torch.float64)


def states(n, g):
    return torch.randn(n, D, generator=g, dtype=torch.float64)


def tokens(n, g):
    return torch.randn(n, TOKENS, 7, generator=g, dtype=torch.float64)


def images(n, g):
    return torch.randn(n, 2, 6, 6, generator=g, dtype=torch.float64)


def ids(n, g):
    return torch.randint(11, (n, TOKENS), generator=g)


def classes(n, g):
    return torch.randint(CLASSES, (n,), generator=g)


def two(n, g):
    return vectors(n, g), torch.randn(n, 2, generator=g, dtype=torch.float64)


def two_by_name(n, g):
    return dict(zip("xz", two(n, g), strict=True))


def token_classes(n, g):
    return torch.randint(CLASSES, (n, TOKENS), generator=g)


def numbers(n, g):
    return torch.randn(n, generator=g, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A network of the zoo, how it is cut, and what the cut should find."""

    name: str
    make: Callable[[], nn.Module]
    joins: str
    """How each state follows: c(hain), s(kip), b(etween)."""
    terminal: str | None = None
    inputs: Callable[[int, torch.Generator], Any] = vectors
    targets: Callable[[int, torch.Generator], Tensor] = classes
    blocks: tuple[str, ...] = ("blocks.0", "blocks.1")
    head: str | None = None
    state: Callable[[Any], Tensor] | None = None
    random: bool = False
    """Its training mode draws."""
    opaque: bool = False
    """Weight-level feedback alignment refuses it."""
    batch_norm: bool = False

    @property
    def cut(self) -> dict[str, Any]:
        """The options of ``attach`` and of ``Cut.of``."""
        network = type(self.network(check=False))
        return {
            "blocks": [*self.blocks],
            "head": self.head,
            "state": self.state,
            "loss": getattr(network, "loss", None),
        }

    def network(self, seed: int = 0, dtype: torch.dtype = torch.float64, check: bool = True) -> Any:
        """Make the network, in eval mode where its training mode draws."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self.make().to(dtype)
        return network.eval() if self.random else network

    def batch(self, n: int = BATCH, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
        """Draw inputs and targets."""
        g = torch.Generator().manual_seed(seed)
        x, y = self.inputs(n, g), self.targets(n, g)
        return cast(x, dtype), cast(y, dtype)

    def __str__(self) -> str:
        return self.name


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of an input."""
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    if isinstance(value, dict):
        return {key: cast(part, dtype) for key, part in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


NESTED = ("body.1.main.0.0", "body.1.main.0.1")
CASES = [
    Case("chain", Net, "cc"),
    Case("inner-skip", Hidden, "cc"),
    Case("exposed-inner-skip", ExposedInner, "cc"),
    Case("outside", Outside, "ss", "norm"),
    Case("outside-direct", OutsideDirect, "ss", "head"),
    Case("adds-in-place", AddsInPlace, "ss", "norm"),
    Case("adds-to-output", AddsToOutput, "ss", "norm"),
    Case("scaled-branch", Scaled, "ss", "norm"),
    Case("post-norm", PostNorm, "ss", "norms.1"),
    Case("relu-between", ReluBetween, "bc"),
    Case("relu-after-skip", ReluAfterSkip, "ss", "norm"),
    Case("written-between", WrittenBetween, "bc"),
    Case("convolutional", Convolutional, "bbc", inputs=images, blocks=("conv1", "conv2", "fc")),
    Case("stages", Stages, "cc", inputs=images, batch_norm=True),
    Case("conv-outside", ConvOutside, "ss", "pool", inputs=images),
    Case("mask-positional", Transformer, "ss", "norm", inputs=tokens),
    Case("mask-keyword", lambda: Transformer("keyword"), "ss", "norm", inputs=tokens),
    Case("tuple-output", lambda: Transformer("tuple"), "cc", inputs=tokens),
    Case("namedtuple-output", lambda: Transformer("named"), "cc", inputs=tokens),
    Case("dict-output", lambda: Transformer("dict"), "cc", inputs=tokens),
    Case("dataclass-output", lambda: Transformer("dataclass"), "cc", inputs=tokens, state=stated),
    Case("encoder-layers", EncoderLayers, "cc", inputs=tokens, opaque=True),
    Case("nested", Nested, "cc", blocks=NESTED),
    Case("checkpointed", lambda: Checkpointed(False, False), "cc", opaque=True),
    Case("checkpointed-outside", lambda: Checkpointed(False, True), "ss", "head", opaque=True),
    Case("reentrant", lambda: Checkpointed(True, False), "cc", "head", opaque=True),
    Case("reentrant-outside", lambda: Checkpointed(True, True), "ss", "head", opaque=True),
    Case("reentrant-inside", InnerCheckpoints, "ss", "norm", opaque=True),
    Case("writes-chain", WritesChain, "cc"),
    Case("writes-outside", WritesOutside, "ss", "norm"),
    Case("written-behind", WrittenBehind, "ss", "norm"),
    Case("dropout", Dropped, "ss", "norm", random=True),
    Case("dropout-between", DroppedBetween, "cc", random=True),
    Case("two-names", TwoNames, "cc", blocks=("first", "blocks.1")),
    Case("tuple-input", TwoInputs, "ss", "head", inputs=two, opaque=True),
    Case("dict-input", TwoInputs, "ss", "head", inputs=two_by_name, opaque=True),
    Case("embedding", Embedded, "ss", "head", inputs=ids),
    Case("no-stem", NoStem, "ss", "head", inputs=states),
    Case("no-head", NoHead, "cc"),
    Case("functional-head", FunctionalHead, "cc"),
    Case("head-given", HeadGiven, "ss", "norm", head="norm"),
    Case("norm-serves-twice", NormServesTwice, "ss", "norm"),
    Case("norm-serves-twice-named", NormServesTwice, "ss", "norm", head="norm"),
    Case("several-consumers", SeveralConsumers, "ss", "norm"),
    Case("tied", Tied, "ss", "norm", inputs=classes),
    Case("user-frozen", UserFrozen, "ss", "norm"),
    Case("identity-block", IdentityBlock, "ccc", blocks=("blocks.0", "blocks.1", "blocks.2")),
    Case("token-output", TokenOutput, "ss", "norm", inputs=tokens, targets=token_classes),
    Case("scalar-output", ScalarOutput, "ss", "norm", targets=numbers),
    Case("written-in-head", WrittenInHead, "ss", "norm"),
    Case("writing-head", WritingHead, "ss", "head"),
    Case("two-heads", TwoHeads, "ss", "head"),
    Case("inner-in-place", InnerInPlace, "cc"),
    Case("inner-post-norm", InnerPostNorm, "cc"),
    Case("checkpointed-head", CheckpointedHead, "ss", "head", opaque=True),
    Case("embedded-writes", EmbeddedWrites, "ss", "head", inputs=ids),
    Case("tuple-of-outputs", Returns, "cc"),
    Case("strided-states", Transposed, "ss", "head", inputs=tokens),
    Case("one-chain", lambda: Net(depth=1), "c", blocks=("blocks.0",)),
    Case("one-inner-skip", lambda: Hidden(1), "c", blocks=("blocks.0",)),
    Case("one-outside", lambda: Outside(depth=1), "s", "norm", blocks=("blocks.0",)),
    Case("one-post-norm", lambda: PostNorm(1), "s", "norms.0", blocks=("blocks.0",)),
    Case("one-between", lambda: ReluBetween(depth=1), "c", blocks=("blocks.0",)),
]
BY_NAME = {case.name: case for case in CASES}
