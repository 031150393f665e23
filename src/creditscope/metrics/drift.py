"""How far parameters have moved, and how many directions states use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from creditscope.errors import UsageError
from creditscope.metrics._rows import common_magnitude, peak, rows
from creditscope.metrics.reference import relative_error


def relative_drift(w: Tensor, w0: Tensor) -> Tensor:
    """‖W - W₀‖_F / ‖W₀‖_F of a parameter from its initialisation, a scalar.

    Unit: none. NaN where W₀ is zero (a bias that starts there) or either is not finite.

    >>> import torch
    >>> relative_drift(torch.tensor([[3.0, 0.0], [0.0, 8.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor(0.8000, dtype=torch.float64)
    """
    return relative_error(w.unsqueeze(0), w0.unsqueeze(0)).squeeze(0)


def effective_rank(h: Tensor) -> Tensor:
    """exp(-Σ pₖ ln pₖ) with pₖ = σₖ²/Σσ² of the centred states, a scalar from 1 to min(B - 1, features).

    The effective rank of Roy & Vetterli (*The effective rank*, EUSIPCO 2007) of the states' covariance, whose singular
    values are the squares σₖ²; they weigh a matrix by σₖ itself. Unit: number of directions. NaN where the states do
    not differ between examples or one is not finite.

    >>> import torch
    >>> round(float(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))), 4)
    2.0
    """
    x = rows(h)
    if x.shape[0] < 2:
        raise UsageError(f"the effective rank needs at least 2 examples; {x.shape[0]} was given")
    if not x.isfinite().all():
        return x.new_tensor(math.nan)
    x = x / common_magnitude(peak(x))
    x = x - x[:1]  # exact zeros where all examples are the same, which centring alone would not give
    x = x - x.mean(dim=0)
    x = x / common_magnitude(peak(x))
    gram = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
    powers = torch.linalg.eigvalsh(gram).clamp(min=0)
    return torch.special.entr(powers / powers.sum()).sum().exp()
