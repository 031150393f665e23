"""Fixed random feedback matrices: drawn on the CPU from a generator, kept as buffers, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from creditscope.errors import UsageError, unknown

Distribution = Literal["normal", "uniform"]


class Matrices(nn.Module):
    """Feedback matrices by name, saved with the learner; dots in a parameter's name become slashes."""

    def __init__(self, matrices: Mapping[str, Tensor]):
        super().__init__()
        for name, matrix in matrices.items():
            self.register_buffer(name.replace(".", "/"), matrix)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name.replace(".", "/"))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.buffers(recurse=False))

    def __len__(self) -> int:
        return len(self._buffers)


def draw(
    shape: tuple[int, ...],
    fan: int,
    *,
    scale: float,
    distribution: Distribution,
    generator: torch.Generator,
    factory: dict[str, Any],
) -> Tensor:
    """Draw entries of mean 0 and standard deviation scale/√fan, normal or uniform, in float32 on the CPU.

    With ``fan`` the number of entries that are summed, the signal keeps its size at ``scale=1``.
    """
    where = {"generator": generator, "device": generator.device, "dtype": torch.float32}
    if distribution == "normal":
        matrix = torch.randn(shape, **where)
    else:
        matrix = (2 * torch.rand(shape, **where) - 1) * math.sqrt(3)
    return (matrix * (scale / math.sqrt(fan))).to(**factory)


def given_list(feedback: Any, shapes: list[tuple[int, ...]], factory: dict[str, Any], what: str) -> Matrices:
    """Take the user's own list of matrices, copied, after a look at their number and shapes."""
    if isinstance(feedback, Mapping) or not isinstance(feedback, list | tuple):
        raise UsageError(f"feedback= of {what} must be a list of {len(shapes)} matrices, not {type(feedback).__name__}")
    if len(feedback) != len(shapes):
        raise UsageError(f"feedback= of {what} must hold {len(shapes)} matrices; it holds {len(feedback)}")
    for l, (matrix, shape) in enumerate(zip(feedback, shapes, strict=True)):
        _check_matrix(matrix, shape, f"feedback[{l}] of {what}")
    return Matrices({str(l): matrix.detach().clone().to(**factory) for l, matrix in enumerate(feedback)})


def given_dict(feedback: Any, shapes: dict[str, tuple[int, ...]], factory: dict[str, Any], what: str) -> Matrices:
    """Take the user's own matrices by parameter name, copied, after a look at their names and shapes."""
    if not isinstance(feedback, Mapping):
        raise UsageError(f"feedback= of {what} must be a dict of parameter names, not {type(feedback).__name__}")
    for name in feedback:
        if name not in shapes:
            raise unknown(f"weight in feedback= of {what}", name, shapes)
    for name, shape in shapes.items():
        if name not in feedback:
            raise UsageError(f"feedback= of {what} lacks a matrix for '{name}'")
        _check_matrix(feedback[name], shape, f"feedback['{name}'] of {what}")
    return Matrices({name: feedback[name].detach().clone().to(**factory) for name in shapes})


def _check_matrix(matrix: Any, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(matrix, Tensor):
        raise UsageError(f"{what} must be a tensor, not {type(matrix).__name__}")
    if not matrix.is_floating_point():
        raise UsageError(f"{what} must be floating point, not {matrix.dtype}")
    if tuple(matrix.shape) != shape:
        raise UsageError(f"{what} must have shape {shape}; it has {tuple(matrix.shape)}")
