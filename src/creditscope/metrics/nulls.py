"""What chance would read: nulls that keep the structure across examples, and the tests against them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from creditscope.errors import unknown
from creditscope.metrics._rows import paired_rows, quotient, unit

# Up to here a whole rotation costs next to nothing. Beyond it a signed permutation has the same mean and spread, and so
# many terms that the two distributions are one unless the credit lives on a few features.
ROTATED_FEATURES = 32
PRODUCT_ROWS = 4096  # up to here all pairs of rows are multiplied at once: 128 MiB, and a draw is then a look-up
CHUNK = 2**24  # numbers that are gathered at a time


class SignedPermutation(NamedTuple):
    """Feature j of the image is ``signs[j]`` times feature ``order[j]``."""

    order: Tensor
    signs: Tensor


def rotation(features: int, generator: torch.Generator) -> Tensor:
    """Draw a random orthogonal matrix, (features, features), uniform over the group (Haar).

    QR of a Gaussian matrix, with the signs of R's diagonal taken out, without which it would not be uniform (Mezzadri,
    *How to generate random matrices from the classical compact groups*, 2007).

    >>> import torch
    >>> q = rotation(3, torch.Generator().manual_seed(0))
    >>> torch.allclose(q @ q.T, torch.eye(3, dtype=torch.float64))
    True
    """
    return _rotations(1, features, generator).squeeze(0)


def _rotations(count: int, features: int, generator: torch.Generator) -> Tensor:
    gaussian = torch.randn(count, features, features, generator=generator, device=generator.device, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * signs.unsqueeze(-2)


def signed_permutation(features: int, generator: torch.Generator) -> SignedPermutation:
    """Draw a random permutation of the features with random signs, uniform over the group.

    An orthogonal map that costs a look-up: ``x[:, order] * signs``.

    >>> import torch
    >>> order, signs = signed_permutation(5, torch.Generator().manual_seed(0))
    >>> sorted(order.tolist()), signs.abs().tolist()
    ([0, 1, 2, 3, 4], [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    order = torch.randperm(features, generator=generator, device=generator.device)
    bits = torch.randint(2, (features,), generator=generator, device=generator.device)
    return SignedPermutation(order, (2 * bits - 1).double())


def null_cosines(
    a: Tensor,
    g: Tensor,
    count: int,
    generator: torch.Generator,
    how: Literal["auto", "rotation", "permutation"] = "auto",
) -> Tensor:
    """Mean cosine over examples after a random orthogonal map Q of the features, the same for all examples, (count,).

    (1/n) Σᵢ ⟨Q âᵢ, ĝᵢ⟩ with unit âᵢ, ĝᵢ. The credit keeps all its structure across examples (its rank, how alike the
    examples' credits are) and loses only its relation to the reference. Vectors drawn per example would be far too
    narrow a null: they average out over examples, and a fixed random matrix does not. ``rotation``: Q uniform over
    all rotations; ``permutation``: over signed permutations, which have the same mean 0 and variance ‖C‖²_F/d with
    C = (1/n) Σ ĝᵢ âᵢᵀ; ``auto``: a rotation up to 32 features. Unit: none. Examples without a direction (zero, not
    finite) are left out; NaN where none is left.

    >>> import torch
    >>> g = torch.tensor([[1.0, 0.0]]).expand(8, 2)
    >>> null_cosines(g, g, 3, torch.Generator().manual_seed(0), how="permutation").abs().lt(1.1)
    tensor([True, True, True])
    """
    if how not in ("auto", "rotation", "permutation"):
        raise unknown("null", how, ["auto", "rotation", "permutation"])
    x, y = _directed(a, g)
    if how == "rotation" or (how == "auto" and x.shape[1] <= ROTATED_FEATURES):
        return _rotated(x, y, count, generator)
    return _permuted(x, y, count, generator)


def shuffled_cosines(a: Tensor, g: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Mean cosine over examples when the credits are dealt anew to the examples, (count,).

    (1/n) Σᵢ cos(a_π(i), gᵢ), π uniform. What is left is what the credit has in common between examples. Unit: none.
    Examples without a direction are left out; NaN where none is left.

    >>> import torch
    >>> shuffled_cosines(torch.ones(4, 2), torch.ones(4, 2), 3, torch.Generator().manual_seed(0))
    tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    x, y = _directed(a, g)
    draws = [torch.randperm(len(x), generator=generator, device=generator.device) for _ in range(count)]
    orders = torch.stack(draws).to(x.device)
    return _matched(y, x, orders).sum(dim=1) / len(x) if len(x) else x.new_full((count,), math.nan)


def _directed(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unit vectors of the examples that have both directions."""
    x, y = (unit(t) for t in paired_rows(a, g))
    valid = ~(x.isnan().any(dim=1) | y.isnan().any(dim=1))
    return x[valid], y[valid]


def _rotated(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    moment = y.mT @ x / len(x)  # the mean of <y, Qx> is the inner product of Q with this
    features = moment.shape[0]
    means = []
    for size in _parts(count, features * features):
        means.append((_rotations(size, features, generator).to(x.device) * moment).sum(dim=(1, 2)))
    return torch.cat(means)


def _permuted(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    features = x.shape[1]
    draws = [signed_permutation(features, generator) for _ in range(count)]
    orders, signs = (torch.stack(part).to(x.device) for part in zip(*draws, strict=True))
    return (_matched(y.mT, x.mT, orders) * signs).sum(dim=1) / len(x)


def _matched(x: Tensor, y: Tensor, orders: Tensor) -> Tensor:
    """<x_j, y_order(j)> for each order, (count, rows): from all pairs at once, or gathered where these are too many."""
    if len(x) <= PRODUCT_ROWS:
        return (x @ y.mT)[torch.arange(len(x), device=x.device), orders]
    x, y = x.contiguous(), y.contiguous()
    parts = orders.split(list(_parts(len(orders), x.numel())))
    return torch.cat([torch.einsum("jk,njk->nj", x, y[part]) for part in parts])


def _parts(count: int, numbers: int) -> Iterator[int]:
    """Split ``count`` draws of so many numbers into parts of at most CHUNK numbers, and at least one draw."""
    size = max(1, CHUNK // max(1, numbers))
    for start in range(0, count, size):
        yield min(size, count - start)


def z_score(value: Tensor, null: Tensor) -> Tensor:
    """(value - mean) / standard deviation (ddof 1) of the null over its last axis.

    Unit: standard deviations of the null. NaN where the null has no spread or fewer than two draws.

    >>> import torch
    >>> z_score(torch.tensor(3.0), torch.tensor([-1.0, 0.0, 1.0]))
    tensor(3., dtype=torch.float64)
    """
    null = null.double()
    if null.shape[-1] < 2:
        return torch.full_like(value, math.nan, dtype=torch.float64)
    return quotient(value.double() - null.mean(dim=-1), null.std(dim=-1, correction=1))


def one_sided_p(z: Tensor) -> Tensor:
    """P(Z ≥ z) = ½ erfc(z/√2) of a standard normal Z: small where the value is better than its null. NaN of NaN.

    >>> import torch
    >>> one_sided_p(torch.tensor([0.0, 3.0], dtype=torch.float64))
    tensor([0.5000, 0.0013], dtype=torch.float64)
    """
    return torch.special.erfc(z.double() / math.sqrt(2)) / 2


def holm(p_values: Tensor, alpha: float = 1e-3) -> Tensor:
    """Whether each hypothesis is rejected, (m,) bool, the chance of even one false rejection being at most alpha.

    Step-down: the k-th smallest p is held against alpha/(m - k + 1), until one is not below (Holm, *A simple
    sequentially rejective multiple test procedure*, 1979). A NaN is no test: not counted and not rejected.

    >>> import torch
    >>> holm(torch.tensor([0.01, 0.04, 0.03, float("nan")]), alpha=0.05)
    tensor([ True, False, False, False])
    """
    p = p_values.double()
    order = p.nan_to_num(nan=math.inf).argsort()
    tested = (~p.isnan()).sum()
    limits = alpha / (tested - torch.arange(len(p), device=p.device)).clamp(min=1)
    passed = (p[order] <= limits).long().cumprod(dim=0).bool()
    return torch.zeros_like(passed).scatter(0, order, passed)
