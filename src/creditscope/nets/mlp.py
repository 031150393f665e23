"""MLP: the plain multilayer perceptron, the network of the papers on feedback alignment."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from creditscope.errors import UsageError, unknown
from creditscope.nets._base import VectorNetwork, require_sizes

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class HiddenLayer(nn.Module):
    """One hidden layer: φ(W h + b), with LayerNorm before φ where asked for."""

    def __init__(self, inputs: int, width: int, activation: str, norm: bool):
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, h: Tensor) -> Tensor:
        """Return the layer's activations."""
        return self.activation(self.norm(self.linear(h)))


class MLP(VectorNetwork):
    """Plain MLP without skips: h_0 = φ(W_0 x + b_0), h_{l+1} = φ(W_{l+1} h_l + b_{l+1}), output = out_head(h_L).

    ====================  ===============================================  ===================
    part                  layers                                           parameters
    ====================  ===============================================  ===================
    ``embed``             Linear(inputs, d), φ: the first hidden layer     inputs·d + d
    ``blocks.{l}``        Linear(d, d), φ; L = depth − 1 of them           d² + d each
    ``out_head``          Linear(d, classes)                               d·classes + classes
    ====================  ===============================================  ===================

    With d = ``width``: inputs·d + d + (depth − 1)(d² + d) + d·classes + classes, at the default sizes (3072-512×4-10)
    2,366,474 parameters. ``norm`` puts a LayerNorm before each φ (2d more a hidden layer, ``depth`` of them).

    ``depth`` counts hidden layers. Each state is a hidden layer's activation, *after* φ, and each block begins with its
    weights: so DFA injects B_l e at h_l, autograd multiplies by φ′, and a layer's update is Nøkland's ((B_l e) ⊙ φ′) hᵀ
    (2016, arXiv:1609.01596), h being the layer's input. The first hidden layer is the stem and is driven by a_0; two
    hidden layers are the fewest that leave a block.

    Initialisation is torch's default, in the order of the table.
    """

    def __init__(
        self,
        inputs: int = 3072,
        width: int = 512,
        depth: int = 4,
        classes: int = 10,
        activation: Literal["relu", "tanh", "gelu"] = "relu",
        norm: bool = False,
    ):
        require_sizes(inputs=inputs, width=width, depth=depth, classes=classes)
        if depth < 2:
            raise UsageError(
                f"depth counts hidden layers and the first is the stem: it must be at least 2, not {depth}"
            )
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        super().__init__()
        self.input_shape = (inputs,)
        self.embed = HiddenLayer(inputs, width, activation, norm)
        self.blocks = nn.ModuleList(HiddenLayer(width, width, activation, norm) for _ in range(depth - 1))
        self.out_head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        h = self.embed(self.flattened(x))
        for block in self.blocks:
            h = block(h)
        return self.out_head(h)
