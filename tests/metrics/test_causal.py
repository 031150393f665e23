import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from creditscope.errors import UsageError
from creditscope.metrics import alignment, causal
from tests.metrics import oracles
from tests.metrics.oracles import close, f64, normal, orthogonal

SHAPE = (6, 2, 3)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def quadratic(h):
    """A loss per row that is not linear; its gradient is h."""
    return h.flatten(1).square().sum(1) / 2


@pytest.mark.parametrize("shape", [(4, 3), (5, 2, 3), (2, 1, 2, 2), (3,)])
def test_directions_have_unit_norm_for_each_example(shape, untouched_rng):
    v = causal.directions(shape, 7, gen())
    assert v.shape == (7, *shape)
    assert v.dtype == torch.float64
    for direction in v:
        for example in direction:
            assert math.sqrt(math.fsum(x * x for x in example.reshape(-1).tolist())) == pytest.approx(1)


def test_directions_are_the_same_in_parts():
    at_once, generator = causal.directions(SHAPE, 9, gen()), gen()
    assert torch.equal(torch.cat([causal.directions(SHAPE, n, generator) for n in (2, 4, 3)]), at_once)
    in_parts = torch.cat(list(causal.direction_parts(torch.zeros(SHAPE).double(), 9, gen(), chunk=14)))
    assert torch.equal(in_parts, at_once)


def test_directions_are_uniform():
    v = causal.directions((4, 10), 2000, gen()).flatten(0, 1)
    close(v.T @ v / len(v), torch.eye(10).double() / 10, atol=6 * 0.1 / math.sqrt(8000), rtol=0)
    close(v.mean(0), torch.zeros(10).double(), atol=6 * math.sqrt(0.1 / 8000), rtol=0)


@pytest.mark.parametrize("chunk", [1, 6, 13, 1000])
def test_loss_changes_are_those_of_a_loop_and_bounded_in_rows(chunk):
    h, steps, seen = normal(*SHAPE, seed=1), normal(5, *SHAPE, seed=2), []

    def tail(rows):
        seen.append(len(rows))
        return quadratic(rows)

    loop = [[quadratic((h[i] + s[i])[None]).item() - quadratic(h[i][None]).item() for i in range(6)] for s in steps]
    close(causal.loss_changes(tail, h, steps, chunk=chunk), f64(loop), rtol=1e-9)
    assert max(seen) <= max(chunk, 6)
    close(causal.loss_changes(tail, h, steps, chunk=chunk, base=quadratic(h)), f64(loop), rtol=1e-9)
    assert sum(seen) == 6 + 2 * 30, "the loss at h itself is computed once, or not at all where it is given"


def test_copies_of_the_batch_stand_one_behind_the_other():
    labels = torch.arange(6.0).double()
    changes = causal.loss_changes(
        lambda h: labels.repeat(len(h) // 6) * h.flatten(1).sum(1), torch.zeros(6, 1), torch.ones(3, 6, 1)
    )
    close(changes, labels.expand(3, 6))


def test_the_tail_runs_in_the_precision_of_the_state_and_without_a_graph():
    kinds = []

    def tail(h):
        kinds.append((h.dtype, torch.is_grad_enabled()))
        return quadratic(h)

    changes = causal.loss_changes(tail, torch.ones(2, 3), torch.ones(1, 2, 3).double())
    assert set(kinds) == {(torch.float32, False)}
    assert changes.dtype == torch.float64


def test_a_tail_that_gives_no_loss_per_row_is_refused():
    with pytest.raises(UsageError, match=r"2 rows gave shape \(\)"):
        causal.loss_changes(lambda h: h.sum(), torch.ones(2, 3), torch.ones(1, 2, 3))


@pytest.mark.parametrize("chunk", [1, 20, 4096])
def test_a_probe_predicts_and_measures_in_the_same_directions(chunk, untouched_rng):
    h, credits = normal(*SHAPE, seed=1), [normal(*SHAPE, seed=seed) for seed in (2, 3)]
    predicted, actual = causal.probe(quadratic, h, credits, gen(), count=8, epsilon=0.01, chunk=chunk)
    v = 0.01 * causal.directions(SHAPE, 8, gen())
    close(predicted, torch.stack([(v * a).flatten(2).sum(2) for a in credits]))
    close(actual, causal.loss_changes(quadratic, h, v), rtol=1e-9)


def test_a_bad_example_stays_one():
    h, a = normal(*SHAPE, seed=1), normal(*SHAPE, seed=2)
    a[3, 0, 0] = math.nan
    predicted, actual = causal.probe(quadratic, h, [a], gen(), count=4)
    assert predicted.isnan()[0].any(0).tolist() == [False, False, False, True, False, False]
    terms = causal.rho_terms(predicted[0], actual)
    assert terms.isnan().any(1).tolist() == [False, False, False, True, False, False]
    kept = [0, 1, 2, 4, 5]
    close(causal.pearson(terms[kept].sum(0)), causal.rho(predicted[0][:, kept], actual[:, kept]))
    assert causal.rho(predicted[0], actual).isnan()


@given(
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(-140, 140),
    st.integers(-140, 140),
    st.floats(-10, 10),
    st.integers(0, 99),
)
def test_rho_is_pearson_in_a_loop_and_so_are_its_terms(count, batch, i, j, shift, seed):
    p, q = 10.0**i * normal(count, batch, seed=seed), 10.0**j * (normal(count, batch, seed=seed + 1) + shift)
    expected = oracles.pearson(p, q)
    close(causal.rho(p, q), expected, atol=1e-11)
    close(causal.pearson(causal.rho_terms(p, q).sum(0)), expected, atol=1e-11)
    close(causal.pearson(causal.rho_terms(p, q).mean(0)), expected, atol=1e-11)


def test_a_bootstrap_of_the_terms_is_a_bootstrap_of_the_examples():
    p, q = normal(4, 9, seed=1), normal(4, 9, seed=2) + normal(4, 9, seed=1)
    chosen = torch.tensor([0, 0, 3, 8, 8, 8, 2])
    close(causal.pearson(causal.rho_terms(p, q)[chosen].sum(0)), causal.rho(p[:, chosen], q[:, chosen]), rtol=1e-10)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e-200, 1e9])
def test_no_spread_is_nan_and_not_zero(constant):
    flat, values = torch.full((5, 7), constant).double(), normal(5, 7)
    for p, q in ((flat, values), (values, flat), (flat, flat)):
        assert causal.rho(p, q).isnan()
        assert causal.pearson(causal.rho_terms(p, q).sum(0)).isnan()


def test_rho_of_different_shapes_is_refused():
    with pytest.raises(UsageError, match=r"\(2, 3\) and \(3, 2\)"):
        causal.rho(torch.ones(2, 3), torch.ones(3, 2))


@pytest.mark.parametrize("exponent", [-30, -8, 0, 30])
def test_rho_of_an_exact_linear_prediction_is_one(exponent):
    g = 10.0**exponent * normal(*SHAPE, seed=3)
    tail = lambda h: (h * g.repeat(len(h) // 6, 1, 1)).flatten(1).sum(1)  # noqa: E731
    predicted, actual = causal.probe(tail, torch.zeros(SHAPE).double(), [g, -3 * g], gen())
    assert causal.rho(predicted[0], actual).item() == pytest.approx(1, abs=1e-12)
    assert causal.rho(predicted[1], actual).item() == pytest.approx(-1, abs=1e-12)


@pytest.mark.parametrize(("n", "d", "m"), [(200, 16, 32), (64, 256, 8), (1000, 4, 4)])
def test_rho_of_random_credits_is_within_its_bound(n, d, m):
    g = normal(n, d, seed=4) * normal(n, 1, seed=5).exp()
    g = functional.normalize(g)
    tail = lambda h: (h * g.repeat(len(h) // n, 1)).sum(1)  # noqa: E731
    credits = [functional.normalize(normal(n, d, seed=seed)) for seed in range(10, 30)]
    predicted, actual = causal.probe(tail, torch.zeros(n, d).double(), credits, gen(), count=m)
    values = torch.stack([causal.rho(p, actual) for p in predicted])
    bound = math.sqrt((1 / m + 1 / d) / n)
    assert values.abs().max() < 4 * bound
    assert 0.6 * bound < values.std() < 1.5 * bound, "the bound is the standard deviation, no more and no less"


def test_the_limit_of_rho_is_the_pooled_cosine():
    n, d = 50, 12
    h = normal(n, d, seed=1)
    a = h + 2 * normal(n, d, seed=2)
    predicted, actual = causal.probe(quadratic, h, [a], gen(), count=2000, epsilon=1e-5)
    assert causal.rho(predicted[0], actual).item() == pytest.approx(alignment.pooled_cosine(a, h).item(), abs=0.01)


def test_rho_does_not_see_the_order_of_examples_or_the_basis():
    p, q = normal(5, 8, seed=1), normal(5, 8, seed=2)
    close(causal.rho(p.flip(1), q.flip(1)), causal.rho(p, q))
    close(causal.rho(3e7 * p + 2, 1e-9 * q - 1), causal.rho(p, q), rtol=1e-6)
    v, a, basis = causal.directions((8, 5), 4, gen()), normal(8, 5), orthogonal(5)
    close(causal.inner(v @ basis, a @ basis), causal.inner(v, a))


def test_resolution_of_a_real_tail_in_both_precisions():
    """Rounding as it is, against rounding as it is taken to be: same order, so that 10 times is a safe margin."""
    weight, head = normal(64, 64, seed=1) / 8, normal(10, 64, seed=2) / 4
    y = torch.arange(128) % 10

    def tail(h):
        z = h + functional.gelu(functional.layer_norm(h, (64,)) @ weight.to(h.dtype))
        logits = functional.layer_norm(z, (64,)) @ head.to(h.dtype).T
        return functional.cross_entropy(logits, y.repeat(len(h) // 128), reduction="none")

    h = normal(128, 64, seed=3)
    noise = (tail(h.float().double()) - tail(h.float()).double())[None]
    resolution = causal.rho_resolution(noise, tail(h), torch.float32)
    assert 0.1 < resolution.ratio < 3
    assert not resolution.resolved


@pytest.mark.parametrize(
    ("size", "dtype", "resolved"),
    [(1e-12, "float64", True), (1e-16, "float64", False), (1e-7, "float32", False), (1e-3, "float32", True)],
)
def test_changes_are_resolved_where_they_stand_above_rounding(size, dtype, resolved):
    changes, losses = size * normal(32, 20), 2 + normal(20).abs()
    resolution = causal.rho_resolution(changes, losses, getattr(torch, dtype))
    assert resolution.resolved.item() is resolved
    eps = torch.finfo(getattr(torch, dtype)).eps
    above = [
        abs(c) > eps * max(loss, 1) for row in changes.tolist() for c, loss in zip(row, losses.tolist(), strict=True)
    ]
    assert resolution.share.item() == pytest.approx(sum(above) / len(above))


def test_a_loss_near_zero_is_no_better_resolved_than_its_logits():
    assert not causal.rho_resolution(torch.full((4, 3), 1e-18).double(), torch.full((3,), 1e-20)).resolved


def test_resolution_leaves_out_what_is_not_finite():
    changes = torch.tensor([[1e-3, math.nan], [1e-3, math.inf]])
    resolution = causal.rho_resolution(changes, torch.tensor([1.0, 1.0]))
    assert resolution.share.item() == 1
    assert resolution.resolved
    nothing = causal.rho_resolution(torch.full((2, 2), math.nan), torch.ones(2))
    assert nothing.share.isnan()
    assert nothing.ratio.isnan()
    assert not nothing.resolved


@given(st.integers(-250, 250), st.floats(1e-4, 1), st.integers(0, 99))
def test_nudges_have_one_length_whatever_the_credit(exponent, eta, seed):
    a = normal(*SHAPE, seed=seed)
    steps = causal.nudge_steps(10.0**exponent * a, eta)
    loop = [-eta * x / math.sqrt(math.fsum(v * v for v in x.flatten().tolist()) / 6) for x in a]
    close(steps, torch.stack(loop), rtol=1e-10)


def test_a_nudge_along_nothing_is_nan():
    a = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [3.0, 4.0]])
    assert causal.nudge_steps(a, 0.1).isnan().all(1).tolist() == [True, True, True, False]


def test_a_small_nudge_changes_the_loss_as_theory_says():
    h = normal(40, 9, seed=1)
    a = h + normal(40, 9, seed=2)
    change = causal.loss_changes(quadratic, h, causal.nudge_steps(a, 1e-6)[None])[0]
    close(change, -1e-6 * 3 * alignment.cosine(a, h) * h.norm(dim=1), rtol=1e-4, atol=1e-10)
