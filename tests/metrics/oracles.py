"""The measurements once more, by loops over examples in 60-digit arithmetic, from their definitions alone."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from itertools import chain

import torch
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def vectors(t: Tensor) -> list[list[Decimal]]:
    return [[Decimal(value) for value in example.reshape(-1).tolist()] for example in t]


def inner(x, y) -> Decimal:
    return sum((p * q for p, q in zip(x, y, strict=True)), Decimal(0))


def length(x) -> Decimal:
    return inner(x, x).sqrt()


def exact(function):
    """Run in 60 digits with any exponent, and return floats."""

    def run(*args) -> Tensor:
        with localcontext() as context:
            context.prec, context.Emax, context.Emin = 60, 10**6, -(10**6)
            result = function(*args)
            return f64([float(r) for r in result] if isinstance(result, list) else float(result))

    return run


@exact
def norm(t):
    return [length(x) for x in vectors(t)]


@exact
def cosine(a, g):
    return [
        inner(x, y) / (length(x) * length(y)) if any(x) and any(y) else NAN
        for x, y in zip(vectors(a), vectors(g), strict=True)
    ]


@exact
def norm_ratio(a, g):
    return [length(x) / length(y) if any(y) else NAN for x, y in zip(vectors(a), vectors(g), strict=True)]


@exact
def pooled_cosine(a, g):
    x, y = (list(chain(*vectors(t))) for t in (a, g))
    return inner(x, y) / (length(x) * length(y)) if any(x) and any(y) else NAN


@exact
def relative_error(approx, reference):
    pairs = zip(vectors(approx), vectors(reference), strict=True)
    return [length([p - q for p, q in zip(x, y, strict=True)]) / length(y) if any(y) else NAN for x, y in pairs]


@exact
def pearson(p, q):
    x, y = (list(chain(*vectors(t))) for t in (p, q))
    x, y = ([v - sum(t) / len(t) for v in t] for t in (x, y))
    return inner(x, y) / (length(x) * length(y)) if any(x) and any(y) else NAN


def sign_agreement(a, g):
    shares = []
    for x, y in zip(vectors(a), vectors(g), strict=True):
        both = [(p > 0) == (q > 0) for p, q in zip(x, y, strict=True) if p != 0 and q != 0]
        shares.append(sum(both) / len(both) if both else NAN)
    return f64(shares)


def lower_median(values: list[float]) -> float:
    kept = sorted(v for v in values if not math.isnan(v))
    return kept[(len(kept) - 1) // 2] if kept else NAN


@st.composite
def pairs(draw, *, largest=300):
    """Two tensors of one shape, of one to four axes, at any scale per example, with zeros among the entries."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def tensor() -> Tensor:
        t = torch.randn(*shape, generator=generator, dtype=torch.float64)
        t = t * (torch.rand(*shape, generator=generator) < draw(st.sampled_from([1.0, 0.5, 0.1])))
        exponents = draw(st.lists(st.integers(-largest, largest - 1), min_size=shape[0], max_size=shape[0]))
        return t * f64([10.0**e for e in exponents]).reshape(-1, *[1] * (len(shape) - 1))

    return tensor(), tensor()


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def orthogonal(features: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(features, features, generator=generator, dtype=torch.float64)).Q


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
