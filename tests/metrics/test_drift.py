import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope.errors import UsageError
from creditscope.metrics import drift
from tests.metrics.oracles import close, f64, normal, orthogonal


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(-150, 150), st.integers(0, 99))
def test_drift_is_that_of_a_loop_over_entries(shape, exponent, seed):
    w, w0 = normal(*shape, 1, seed=seed), normal(*shape, 1, seed=seed + 1)
    moved = math.sqrt(math.fsum((p - q) ** 2 for p, q in zip(w.flatten().tolist(), w0.flatten().tolist(), strict=True)))
    size = math.sqrt(math.fsum(q**2 for q in w0.flatten().tolist()))
    close(drift.relative_drift(10.0**exponent * w, 10.0**exponent * w0), f64(moved / size), rtol=1e-9)


def test_drift_of_what_did_not_move_and_of_what_began_at_zero():
    w = normal(3, 3)
    assert drift.relative_drift(w, w).item() == 0
    assert drift.relative_drift(w, torch.zeros(3, 3)).isnan()
    assert drift.relative_drift(torch.full((3, 3), math.nan), w).isnan()


@given(st.integers(2, 8), st.integers(1, 8), st.integers(-150, 150), st.integers(0, 99))
def test_effective_rank_is_that_of_the_singular_values(count, features, exponent, seed):
    h = normal(count, features, seed=seed)
    sigma = torch.linalg.svdvals(h - h.mean(0)).tolist()
    p = [s**2 / math.fsum(t**2 for t in sigma) for s in sigma]
    expected = math.exp(-math.fsum(q * math.log(q) for q in p if q > 1e-300))
    close(drift.effective_rank(10.0**exponent * h), f64(expected), rtol=1e-9)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize(("count", "features"), [(40, 8), (17, 30)])
def test_effective_rank_counts_equal_directions(rank, count, features):
    left = torch.linalg.qr(normal(count, rank) - normal(count, rank).mean(0)).Q
    h = left @ orthogonal(features)[:rank] + 5
    assert drift.effective_rank(h).item() == pytest.approx(rank)


def test_effective_rank_does_not_see_basis_order_or_place():
    h, q = normal(12, 6), orthogonal(6)
    close(drift.effective_rank(h @ q + 3), drift.effective_rank(h))
    close(drift.effective_rank(h.flip(0).reshape(12, 2, 3)), drift.effective_rank(h))


def test_effective_rank_that_cannot_be_computed():
    assert drift.effective_rank(torch.full((5, 3), 0.1)).isnan()
    assert drift.effective_rank(torch.tensor([[1.0], [math.nan]])).isnan()
    with pytest.raises(UsageError, match="1 was given"):
        drift.effective_rank(torch.ones(1, 3))
