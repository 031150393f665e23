"""What every network of ours has: named blocks, a named head, a known input shape, and sizes taken from data.

A network of another package needs none of this: any module is cut at the blocks that ``attach`` is given. One that has
``credit_blocks``, ``credit_head`` and ``example`` is cut without being told.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from creditscope.errors import UsageError


def require_sizes(**sizes: int) -> None:
    """Refuse a size that is not a whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, not {size!r}")


class Network(nn.Module):
    """A network that names its own blocks: stem, ``blocks.0 .. blocks.{L-1}``, head.

    A skip is added outside the block, ``h = h + block(h)``, so that a block's output is its branch f_l and f_l is never
    the difference of two large states. ``input_shape`` is the shape of one example.
    """

    blocks: nn.ModuleList
    input_shape: tuple[int, ...]
    settled_by_data: ClassVar[tuple[str, ...]]
    """The constructor's arguments that :meth:`from_data` takes from the data."""

    @property
    def credit_blocks(self) -> list[str]:
        """The dotted names of the blocks, in the order in which they are called."""
        return [f"blocks.{l}" for l in range(len(self.blocks))]

    @property
    def credit_head(self) -> str:
        """The dotted name of the module that the last state h_L enters."""
        return "out_head"

    def example(self) -> Tensor:
        """Return a batch of 2 zeros of the input's shape, where the parameters are and of their dtype."""
        return next(self.parameters()).new_zeros(2, *self.input_shape)

    def _checked(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise UsageError(f"{type(self).__name__} takes batches of {self.input_shape}, not of {tuple(x.shape[1:])}")
        return x


class VectorNetwork(Network):
    """A network on vectors of ``inputs`` features; it flattens images itself."""

    settled_by_data = ("inputs", "classes")

    @classmethod
    def from_data(cls, shape: tuple[int, ...], classes: int, **options: Any) -> Self:
        """Return the network for examples of a shape, (features,) or (channels, height, width)."""
        return cls(inputs=math.prod(shape), classes=classes, **options)

    def flattened(self, x: Tensor) -> Tensor:
        """Return the batch as (batch, inputs)."""
        return self._checked(x.flatten(1) if x.dim() > 2 else x)


class ImageNetwork(Network):
    """A network on square images (channels, image, image)."""

    settled_by_data = ("image", "channels", "classes")

    @classmethod
    def from_data(cls, shape: tuple[int, ...], classes: int, **options: Any) -> Self:
        """Return the network for square images of a shape (channels, n, n)."""
        if len(shape) != 3 or shape[1] != shape[2]:
            raise UsageError(f"{cls.__name__} takes square images (channels, n, n), not examples of {tuple(shape)}")
        return cls(image=shape[1], channels=shape[0], classes=classes, **options)
