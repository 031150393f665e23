"""ResMLP: the residual multilayer perceptron on which the source study was made."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.errors import UsageError
from creditscope.nets._base import VectorNetwork, require_sizes


class ResidualBlock(nn.Module):
    """The branch f(h) = W₂ GELU(W₁ LN(h) + b₁) + b₂, W₁ and W₂ square; the skip is added by the network.

    W₂ starts as N(0, branch_std²) and b₂ as zero, so that a block starts close to the identity.
    """

    def __init__(self, width: int, branch_std: float):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.w1 = nn.Linear(width, width)
        self.w2 = nn.Linear(width, width)
        nn.init.normal_(self.w2.weight, std=branch_std)
        nn.init.zeros_(self.w2.bias)

    def forward(self, h: Tensor) -> Tensor:
        """Return the branch f(h)."""
        return self.w2(F.gelu(self.w1(self.ln(h))))


class ResMLP(VectorNetwork):
    """Residual MLP: h_0 = embed(x), h_{l+1} = h_l + f_l(h_l), output = out_head(out_ln(h_L)).

    ====================  ==========================================  ===================
    part                  layers                                      parameters
    ====================  ==========================================  ===================
    ``embed``             Linear(inputs, d), no activation            inputs·d + d
    ``blocks.{l}``        ``ln``, ``w1``, GELU, ``w2``; L of them     2d² + 4d each
    ``out_ln``            LayerNorm(d), where ``terminal_norm``       2d
    ``out_head``          Linear(d, classes)                          d·classes + classes
    ====================  ==========================================  ===================

    With d = ``width`` and L = ``depth``: inputs·d + d + L(2d² + 4d) + 2d + d·classes + classes, at the default sizes
    1,318,154 parameters.

    This is the ResidualMLP of the source study, and a state dict written by it loads as it is. Initialisation is
    torch's default for Linear and LayerNorm, but N(0, ``branch_std``²) for each ``w2.weight`` and zero for its bias;
    the draws are made in the order of the table, ``w2`` first torch's and then its own. On normalised CIFAR-10 that
    gives ‖h_0‖ ≈ 8.8, ‖f_l‖/‖h_l‖ ≈ 0.10 and a gradient ‖g_L‖ ≈ 1 per example.

    Without ``terminal_norm`` the head reads h_L as it is; with ``residual=False`` there is no skip, h_{l+1} = f_l(h_l)
    (the study used ``branch_std=0.5`` there).
    """

    def __init__(
        self,
        inputs: int = 3072,
        width: int = 256,
        depth: int = 4,
        classes: int = 10,
        terminal_norm: bool = True,
        residual: bool = True,
        branch_std: float = 0.01,
    ):
        require_sizes(inputs=inputs, width=width, depth=depth, classes=classes)
        if not (math.isfinite(branch_std) and branch_std >= 0):
            raise UsageError(f"branch_std must be a number of at least 0, not {branch_std!r}")
        super().__init__()
        self.input_shape = (inputs,)
        self.residual = residual
        self.terminal_norm = terminal_norm
        self.embed = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(ResidualBlock(width, branch_std) for _ in range(depth))
        self.out_ln = nn.LayerNorm(width) if terminal_norm else nn.Identity()
        self.out_head = nn.Linear(width, classes)

    @property
    def credit_head(self) -> str:
        """The module that h_L enters: the terminal norm, or the head where there is none."""
        return "out_ln" if self.terminal_norm else "out_head"

    def forward(self, x: Tensor, return_hidden: bool = False) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return the logits (batch, classes); with ``return_hidden`` also the states [h_0, ..., h_L]."""
        h = self.embed(self.flattened(x))
        states = [h]
        for block in self.blocks:
            h = h + block(h) if self.residual else block(h)
            states.append(h)
        logits = self.out_head(self.out_ln(h))
        return (logits, states) if return_hidden else logits
