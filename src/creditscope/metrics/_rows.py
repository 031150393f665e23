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


def peak(x: Tensor) -> Tensor:
    """Return each row's largest entry in size, (B, 1); not finite where an entry is not."""
    return x.abs().amax(dim=1, keepdim=True)  # several times as fast as the norm of order infinity


def magnitude(x: Tensor) -> Tensor:
    """Return the power of two above each row's peak, (B, 1): to divide by it is exact. 1 where it is not finite."""
    return _power_above(peak(x))


def common_magnitude(values: Tensor) -> Tensor:
    """Return the power of two above the largest finite value of all, a scalar."""
    sizes = values[values.isfinite()].abs()
    return _power_above(sizes.max() if len(sizes) else values.new_zeros(()))


def _power_above(largest: Tensor) -> Tensor:
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1)).exponent
    return torch.exp2(exponent.double().clamp(-1022, 1022))


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
