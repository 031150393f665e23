"""What all measurements share: one row an example in float64, brought to a safe magnitude."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from creditscope.errors import UsageError


def rows(t: Tensor) -> Tensor:
    """Return (B, features) in float64, cut from any graph."""
    return t.detach().double().reshape(t.shape[0], math.prod(t.shape[1:]))


def paired_rows(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of two tensors that have to be alike."""
    if a.shape != g.shape:
        raise UsageError(f"two tensors of one shape are compared; here are {tuple(a.shape)} and {tuple(g.shape)}")
    return rows(a), rows(g)


def magnitude(x: Tensor, *, per_row: bool = True) -> Tensor:
    """Return the power of two above the largest finite entry, of each row (B, 1) or of all; dividing by it is exact."""
    sizes = torch.where(x.isfinite(), x, 0).abs()
    largest = sizes.amax(dim=1, keepdim=True) if per_row else sizes.max() if sizes.numel() else sizes.new_zeros(())
    return torch.exp2(torch.frexp(largest).exponent.double().clamp(-1022, 1022))


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return <x_i, y_i> for each row."""
    return (x * y).sum(dim=1)


def unit(x: Tensor) -> Tensor:
    """Return each row at norm 1; NaN where it is zero or not finite."""
    x = x / magnitude(x)
    length = dot(x, x).sqrt()
    return x / torch.where(length.isfinite() & (length > 0), length, math.nan).unsqueeze(1)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / denominator, NaN where either is not finite or the denominator is zero."""
    valid = numerator.isfinite() & denominator.isfinite() & (denominator != 0)
    return torch.where(valid, numerator / denominator, math.nan)
