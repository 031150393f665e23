"""The estimators: concat[LayerNorm(h), time embedding(t), s] → MLP.

States are flattened. Where they differ in size, each size has its own normalisation and first map (and, for outputs
in the state's space, its own last map); everything between is shared, so that one network still speaks for all layers
and no network has to be refused. States of one size run as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.errors import UsageError, unknown
from creditscope.estimators.time import sinusoidal

Activation = Literal["gelu", "silu", "relu", "tanh"]
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Architecture:
    """The sizes of an estimator.

    The source study gives 32, 256 and 3 without saying what it counts as a layer, nor the activation. Three linear
    maps meet the stated cost of its estimators, and GELU is the activation of its networks.
    """

    time_embed_dim: int = 32
    """Entries of the time embedding."""
    hidden: int = 256
    """Units of each hidden layer."""
    layers: int = 3
    """Linear maps."""
    activation: Activation = "gelu"
    """What follows each but the last."""

    def __post_init__(self) -> None:
        if self.time_embed_dim < 2 or self.time_embed_dim % 2:
            raise UsageError(f"time_embed_dim must be an even number of at least 2, not {self.time_embed_dim}")
        if self.hidden < 1:
            raise UsageError(f"hidden must be at least 1, not {self.hidden}")
        if self.layers < 2:
            raise UsageError(f"layers must be at least 2, not {self.layers}")
        if self.activation not in ACTIVATIONS:
            raise unknown("activation", self.activation, get_args(Activation))


class Estimator(nn.Module):
    """An MLP on (h, t, s), for states of the given sizes, with outputs of a size for each size of a state."""

    def __init__(
        self,
        sizes: Sequence[int],
        condition: int,
        outputs: Sequence[int],
        *,
        generator: torch.Generator,
        architecture: Architecture | None = None,
    ):
        super().__init__()
        chosen = architecture or Architecture()
        self.time_embed_dim = chosen.time_embed_dim
        output_of = dict(zip(sizes, outputs, strict=True))
        entering = chosen.time_embed_dim + condition
        self.norms = nn.ModuleDict({str(d): nn.LayerNorm(d) for d in output_of})
        self.first = nn.ModuleDict({str(d): linear(d + entering, chosen.hidden, generator) for d in output_of})
        middle = [ACTIVATIONS[chosen.activation]()]
        for _ in range(chosen.layers - 2):
            middle += [linear(chosen.hidden, chosen.hidden, generator), ACTIVATIONS[chosen.activation]()]
        self.middle = nn.Sequential(*middle)
        self.last = nn.ModuleDict({str(d): linear(chosen.hidden, out, generator) for d, out in output_of.items()})

    def forward(self, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """h (..., d), t (...), s (..., condition) -> (..., outputs); the leading axes of t and s may be broadcast."""
        size = str(h.shape[-1])
        if size not in self.norms:
            raise UsageError(
                f"a state of {size} units: this estimator was made for states of {', '.join(self.norms)} units"
            )
        # W [LN(h), τ(t), s] by the parts of W: time is the same for all examples, s for all states and samples
        first, parts = self.first[size], [h.shape[-1], self.time_embed_dim, s.shape[-1]]
        assert isinstance(first, nn.Linear)
        of_state, of_time, of_condition = first.weight.split(parts, dim=1)
        time = sinusoidal(t, self.time_embed_dim).to(h.dtype)
        given = F.linear(time, of_time) + F.linear(s, of_condition, first.bias)
        return self.last[size](self.middle(F.linear(self.norms[size](h), of_state) + given))


class ValueNet(Estimator):
    """V(h, t, s): the loss that is to be expected from a state, one number per example."""

    def __init__(
        self,
        sizes: Sequence[int],
        condition: int,
        *,
        generator: torch.Generator,
        architecture: Architecture | None = None,
    ):
        super().__init__(sizes, condition, [1] * len(sizes), generator=generator, architecture=architecture)

    def forward(self, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Return (...)."""
        return super().forward(h, t, s).squeeze(-1)


class StateNet(Estimator):
    """G(h, t, s): the last state h_L that a state will become. ``sizes`` are those of h_0..h_L."""

    def __init__(
        self,
        sizes: Sequence[int],
        condition: int,
        *,
        generator: torch.Generator,
        architecture: Architecture | None = None,
    ):
        before, last = sizes[:-1], sizes[-1]
        super().__init__(before, condition, [last] * len(before), generator=generator, architecture=architecture)


class VectorNet(Estimator):
    """a(h, t, s): the credit of a state itself."""

    def __init__(
        self,
        sizes: Sequence[int],
        condition: int,
        *,
        generator: torch.Generator,
        architecture: Architecture | None = None,
    ):
        super().__init__(sizes, condition, sizes, generator=generator, architecture=architecture)


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear map as torch initialises it, U(−1/√inputs, 1/√inputs), drawn from a generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, device=generator.device, dtype=torch.float32)
    assert isinstance(layer, nn.Linear)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer
