"""StudentNet: the residual network of the teacher-student task, whose activation goes from linear to tanh."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from creditscope.errors import UsageError
from creditscope.nets._base import VectorNetwork, require_sizes


def phi(z: Tensor, alpha: float) -> Tensor:
    """Return φ_α(z) = (1 − α) z + α tanh(z): linear at α = 0, tanh at α = 1."""
    return torch.lerp(z, torch.tanh(z), alpha)


class StudentBlock(nn.Module):
    """The branch f(h) = φ_α(W h + b); the skip is added by the network."""

    def __init__(self, width: int, alpha: float):
        super().__init__()
        self.alpha = alpha
        self.w = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return the branch f(h)."""
        return phi(self.w(h), self.alpha)


class StudentNet(VectorNetwork):
    """Student of the teacher-student task: h_0 = embed(x), h_{l+1} = h_l + φ_α(W_l h_l + b_l), output = out_head(h_L).

    ====================  ==========================================  ===================
    part                  layers                                      parameters
    ====================  ==========================================  ===================
    ``embed``             Linear(inputs, d), no activation            inputs·d + d
    ``blocks.{l}``        ``w``: Linear(d, d), φ_α; L of them         d² + d each
    ``out_ln``            LayerNorm(d), where ``terminal_norm``       2d
    ``out_head``          Linear(d, classes)                          d·classes + classes
    ====================  ==========================================  ===================

    With d = ``width`` and L = ``depth``: inputs·d + d + L(d² + d) + d·classes + classes, at the default sizes
    75,658 parameters; 2d more with ``terminal_norm``.

    The source study gives φ_α(z) = (1 − α) z + α tanh(z), its grid α ∈ {0, .25, .5, 1} × L ∈ {2, 4, 8, 12}, d = 128,
    ten classes and no terminal norm. It leaves open, and we chose: the number of inputs (64; data settles it);
    the form of the block, one linear map with φ_α at its end and no norm in front, because a tanh branch is then at
    most √d long, which fits the study's remark that states of this network grow at most about 6.9 times a block over
    80 epochs of DFA (a branch that ends in a free linear map, as ResMLP's, grows without bound); an embedding
    without activation, as ResMLP's; and torch's default initialisation, in the order of the table.
    """

    def __init__(
        self,
        inputs: int = 64,
        width: int = 128,
        depth: int = 4,
        classes: int = 10,
        alpha: float = 1.0,
        terminal_norm: bool = False,
    ):
        require_sizes(inputs=inputs, width=width, depth=depth, classes=classes)
        if not 0 <= alpha <= 1:
            raise UsageError(f"alpha must lie between 0 (linear) and 1 (tanh), not {alpha!r}")
        super().__init__()
        self.input_shape = (inputs,)
        self.terminal_norm = terminal_norm
        self.embed = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(StudentBlock(width, alpha) for _ in range(depth))
        self.out_ln = nn.LayerNorm(width) if terminal_norm else nn.Identity()
        self.out_head = nn.Linear(width, classes)

    @property
    def credit_head(self) -> str:
        """The module that h_L enters: the terminal norm, or the head where there is none."""
        return "out_ln" if self.terminal_norm else "out_head"

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        h = self.embed(self.flattened(x))
        for block in self.blocks:
            h = h + block(h)
        return self.out_head(self.out_ln(h))
