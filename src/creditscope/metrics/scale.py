"""How large things are: norms per example, their order statistics, growth along the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.metrics._rows import dot, magnitude, quotient, rows


def norm(t: Tensor) -> Tensor:
    """‖t‖₂ per example over everything else, (B,). Unit: that of t. Neither under- nor overflows inside.

    Infinite where an entry is infinite, NaN where one is NaN.

    >>> import torch
    >>> norm(torch.tensor([[[3.0], [4.0]], [[3e-200], [4e-200]]], dtype=torch.float64))
    tensor([ 5.0000e+00, 5.0000e-200], dtype=torch.float64)
    """
    x = rows(t)
    scale = magnitude(x)
    x = x / scale
    return dot(x, x).sqrt() * scale.squeeze(1)


def lower_median(values: Tensor) -> Tensor:
    """Return the lower median over the last axis, the ⌈n/2⌉-th smallest: always one of the values, as torch's is.

    NaN values are left out; NaN where none is left.

    >>> import torch
    >>> lower_median(torch.tensor([4.0, 1.0, float("nan"), 3.0, 2.0]))
    tensor(2., dtype=torch.float64)
    """
    return values.double().nanmedian(dim=-1).values


def quartiles(values: Tensor) -> Tensor:
    """Return lower quartile, lower median and upper quartile over the last axis, (3, ...): each one of the values.

    The value at rank ⌊q (n - 1)⌋ counted from 0. NaN values are left out; NaN where none is left.

    >>> import torch
    >>> quartiles(torch.arange(6.0))
    tensor([1., 2., 3.], dtype=torch.float64)
    """
    values = values.double()
    return torch.nanquantile(values, values.new_tensor([0.25, 0.5, 0.75]), dim=-1, interpolation="lower")


def growth(norms_out: Tensor, norms_in: Tensor) -> Tensor:
    """Return lower median ‖h_{l+1}‖ / lower median ‖h_l‖ over the last axis: the growth of the stream in a block.

    Diagnostic (a), or D1, of Hao, Wan & Zhai (arXiv 2606.21126), who flag a block beyond 50. Unit: none. NaN where
    the stream before is zero or either is not finite.

    >>> import torch
    >>> growth(torch.tensor([100.0, 300.0, 200.0]), torch.tensor([2.0, 1.0, 4.0]))
    tensor(100., dtype=torch.float64)
    """
    return quotient(lower_median(norms_out), lower_median(norms_in))


def branch_ratio(branch: Tensor, state: Tensor) -> Tensor:
    """‖f_l(h_l)‖ / ‖h_l‖ per example, (B,): what a block adds, over the stream that it adds to.

    Unit: none. NaN where the state is zero or either is not finite.

    >>> import torch
    >>> branch_ratio(torch.tensor([[0.3, 0.4]], dtype=torch.float64), torch.tensor([[3.0, 4.0]]))
    tensor([0.1000], dtype=torch.float64)
    """
    return quotient(norm(branch), norm(state))
