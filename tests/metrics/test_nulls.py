import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from creditscope.errors import UsageError
from creditscope.metrics import alignment, nulls
from tests.metrics.oracles import close, f64, normal, orthogonal


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("features", [1, 2, 7])
def test_a_rotation_is_orthogonal(features, untouched_rng):
    q = nulls.rotation(features, gen())
    close(q @ q.T, torch.eye(features).double())


def test_rotations_are_uniform():
    """Haar: mean 0, variance 1/d, and both signs of the determinant; QR as it comes has a diagonal of one sign."""
    generator = gen()
    q = torch.stack([nulls.rotation(3, generator) for _ in range(2000)])
    close(q.mean(0), torch.zeros(3, 3).double(), atol=6 / math.sqrt(3 * 2000), rtol=0)
    close(q.square().mean(0), torch.full((3, 3), 1 / 3).double(), atol=6 * 0.3 / math.sqrt(2000), rtol=0)
    assert 0.4 < (torch.linalg.det(q) > 0).double().mean() < 0.6


def test_signed_permutations_are_uniform(untouched_rng):
    generator = gen()
    draws = [nulls.signed_permutation(3, generator) for _ in range(3000)]
    kinds = [(*draw.order.tolist(), *draw.signs.tolist()) for draw in draws]
    counts = [kinds.count(kind) for kind in set(kinds)]
    assert len(counts) == 48
    assert sum((c - 62.5) ** 2 / 62.5 for c in counts) < 47 + 6 * math.sqrt(94)


def permuted_loop(a, g, count, generator):
    means = []
    for _ in range(count):
        order, signs = nulls.signed_permutation(a[0].numel(), generator)
        moved = [(signs * x.reshape(-1)[order])[None] for x in a]
        means.append(sum(alignment.cosine(x, y.reshape(1, -1)) for x, y in zip(moved, g, strict=True)) / len(a))
    return torch.cat(means)


def shuffled_loop(a, g, count, generator):
    means = []
    for _ in range(count):
        order = torch.randperm(len(a), generator=generator)
        means.append(sum(alignment.cosine(a[i][None], g[k][None]) for k, i in enumerate(order)) / len(a))
    return torch.cat(means)


@pytest.mark.parametrize("route", ["all pairs", "gathered"])
@given(st.integers(1, 6), st.integers(1, 5), st.integers(-150, 150), st.integers(0, 99))
def test_nulls_are_those_of_a_loop(route, batch, features, exponent, seed):
    a, g = 10.0**exponent * normal(batch, features, 2, seed=seed), normal(batch, features, 2, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        if route == "gathered":
            patch.setattr(nulls, "PRODUCT_ROWS", 0)
            patch.setattr(nulls, "CHUNK", 30)
        close(nulls.null_cosines(a, g, 5, gen(seed), how="permutation"), permuted_loop(a, g, 5, gen(seed)))
        close(nulls.shuffled_cosines(a, g, 5, gen(seed)), shuffled_loop(a, g, 5, gen(seed)))


def test_the_rotated_null_is_that_of_a_loop():
    a, g = normal(7, 3, seed=1), normal(7, 3, seed=2)
    drawn = nulls._rotations(6, 3, gen())
    loop = [sum((q @ x) @ y / (x.norm() * y.norm()) for x, y in zip(a, g, strict=True)) / 7 for q in drawn]
    close(nulls.null_cosines(a, g, 6, gen(), how="rotation"), torch.stack(loop))


@pytest.mark.parametrize("how", ["rotation", "permutation"])
def test_both_nulls_have_the_mean_and_spread_of_theory(how):
    a, g = normal(30, 1, seed=1) * normal(1, 12, seed=2) + 0.3 * normal(30, 12, seed=3), normal(30, 12, seed=4) + 1
    x, y = (functional.normalize(t) for t in (a, g))
    sigma = (y.T @ x / 30).norm().item() / math.sqrt(12)
    null = nulls.null_cosines(a, g, 3000, gen(), how=how)
    assert abs(null.mean().item()) < 5 * sigma / math.sqrt(3000)
    assert null.std().item() == pytest.approx(sigma, rel=0.1)


def test_auto_takes_rotations_for_few_features_and_signed_permutations_for_many():
    for features, how in ((4, "rotation"), (32, "rotation"), (33, "permutation")):
        a, g = normal(5, features, seed=1), normal(5, features, seed=2)
        assert torch.equal(nulls.null_cosines(a, g, 3, gen()), nulls.null_cosines(a, g, 3, gen(), how=how))
    with pytest.raises(UsageError, match="did you mean 'rotation'"):
        nulls.null_cosines(a, g, 3, gen(), how="rotations")  # pyright: ignore[reportArgumentType]


def test_a_fixed_random_matrix_is_no_news_to_its_null_but_is_to_vectors_per_example():
    """A fresh feedback matrix has z of order 1 against the null; against vectors drawn per example it would not."""
    n, d, classes, scores, narrow = 400, 80, 10, [], []
    forward = normal(classes, d, seed=0)
    errors = (
        functional.one_hot(torch.arange(n) % classes, classes).double() - 1 / classes + 0.1 * normal(n, classes, seed=1)
    )
    g = errors @ forward
    for seed in range(40):
        value = alignment.cosine(errors @ normal(classes, d, seed=100 + seed), g).mean()
        scores.append(
            nulls.z_score(value, nulls.null_cosines(errors @ normal(classes, d, seed=100 + seed), g, 200, gen(seed)))
        )
        random = torch.stack([alignment.cosine(normal(n, d, seed=k), g).mean() for k in range(5)])
        narrow.append(value / random.std())
    z = torch.stack(scores)
    assert 0.7 < z.std() < 1.4
    assert z.abs().max() < 4
    assert torch.stack(narrow).abs().gt(3).double().mean() > 0.2


def test_a_good_credit_stands_out():
    g = normal(200, 20, seed=1)
    a = g + 5 * normal(200, 20, seed=2)
    value = alignment.cosine(a, g).mean()
    assert nulls.z_score(value, nulls.null_cosines(a, g, 200, gen())) > 6
    assert nulls.z_score(value, nulls.shuffled_cosines(a, g, 200, gen())) > 6


def test_a_shuffle_keeps_what_examples_have_in_common():
    common = normal(1, 20).expand(50, 20)
    close(nulls.shuffled_cosines(common, common, 4, gen()), torch.ones(4).double())


def test_the_null_does_not_see_scale_or_the_basis_in_distribution(untouched_rng):
    a, g, q = normal(30, 8, seed=1) + 1, normal(30, 8, seed=2), orthogonal(8)
    sizes = torch.logspace(-100, 100, 30, dtype=torch.float64)[:, None]
    close(nulls.null_cosines(sizes * a, g, 5, gen()), nulls.null_cosines(a, g, 5, gen()))
    before, after = (nulls.null_cosines(x, y, 2000, gen()).std().item() for x, y in ((a, g), (a @ q, g @ q)))
    assert after == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("null", [nulls.null_cosines, nulls.shuffled_cosines])
def test_examples_without_a_direction_are_left_out(null):
    a, g = normal(6, 5, seed=1), normal(6, 5, seed=2)
    bad = a.clone()
    bad[2], bad[4, 1] = 0, math.nan
    kept = [0, 1, 3, 5]
    close(null(bad, g, 7, gen()), null(a[kept], g[kept], 7, gen()))
    assert null(torch.zeros(6, 5), g, 7, gen()).isnan().all()
    assert null(torch.zeros(6, 100), normal(6, 100), 7, gen()).isnan().all()


def test_z_counts_standard_deviations_of_the_null():
    null = normal(3, 50)
    mean = [math.fsum(row) / 50 for row in null.tolist()]
    std = [math.sqrt(math.fsum((v - m) ** 2 for v in row) / 49) for row, m in zip(null.tolist(), mean, strict=True)]
    close(
        nulls.z_score(f64([1.0, 2.0, 3.0]), null),
        f64([(v - m) / s for v, m, s in zip((1, 2, 3), mean, std, strict=True)]),
    )


@pytest.mark.parametrize("null", [[0.1, 0.1], [0.1], [math.nan, 0.1]])
def test_z_without_spread_is_nan(null):
    assert nulls.z_score(torch.tensor(1.0), torch.tensor(null)).isnan()


@given(st.floats(-30, 8))
def test_p_is_the_upper_tail(z):
    assert nulls.one_sided_p(f64(z)).item() == pytest.approx(NormalDist().cdf(-z), abs=1e-15)


def test_p_does_not_vanish_far_out():
    assert nulls.one_sided_p(torch.tensor(6.0)).item() == pytest.approx(9.865876450377e-10)  # from tables
    assert 0 < nulls.one_sided_p(torch.tensor(30.0)).item() < 1e-190
    assert nulls.one_sided_p(torch.tensor(math.nan)).isnan()


def holm_loop(p, alpha):
    """By adjusted p-values: the running maximum of (m - k + 1) p over the sorted ones."""
    kept = sorted((v, i) for i, v in enumerate(p) if not math.isnan(v))
    rejected, worst = [False] * len(p), 0.0
    for k, (v, i) in enumerate(kept):
        worst = max(worst, (len(kept) - k) * v)
        rejected[i] = worst <= alpha
    return rejected


@given(st.lists(st.sampled_from([1e-5, 1e-4, 5e-4, 1e-3, 0.01, 0.5, 1.0, math.nan]), min_size=1, max_size=9))
def test_holm_is_that_of_the_adjusted_values(p):
    assert nulls.holm(f64(p), alpha=2e-3).tolist() == holm_loop(p, 2e-3)


def test_holm_keeps_the_chance_of_any_false_rejection():
    p = torch.rand(20000, 6, generator=gen()).double()
    any_false = sum(bool(nulls.holm(row, alpha=0.05).any()) for row in p[:4000]) / 4000
    assert any_false == pytest.approx(1 - (1 - 0.05 / 6) ** 6, abs=0.015)
