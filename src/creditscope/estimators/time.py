"""The time embedding: how an estimator is told which layer a state belongs to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FASTEST, RATIO = 1e3, 1e4  # radians over the whole depth; the fastest frequency over the slowest, as in the transformer


def sinusoidal(t: Tensor, size: int) -> Tensor:
    """(sin ω_k t, cos ω_k t) for size/2 frequencies ω_k = 10³·10⁴^(−k/(size/2 − 1)), (...) -> (..., size).

    Vaswani et al., *Attention is all you need*, NeurIPS 2017, section 3.5. The source study does not give its
    frequencies; positions there run over the integers, and t = l/L over [0, 1], hence the 10³.
    """
    steps = torch.arange(size // 2, device=t.device, dtype=torch.float64) / max(1, size // 2 - 1)
    angles = t.unsqueeze(-1).double() * (FASTEST * torch.exp(-math.log(RATIO) * steps))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(t.dtype)
