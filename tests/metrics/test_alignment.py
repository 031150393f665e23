import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from creditscope.errors import UsageError
from creditscope.metrics import alignment
from tests.metrics import oracles
from tests.metrics.oracles import close, f64, normal, orthogonal, pairs

PER_EXAMPLE = [alignment.cosine, alignment.norm_ratio, alignment.sign_agreement, alignment.cosine_clamped]


@given(pairs())
def test_cosine_is_that_of_a_loop_at_every_norm(pair):
    close(alignment.cosine(*pair), oracles.cosine(*pair))


@given(pairs(largest=120))
def test_norm_ratio_is_that_of_a_loop(pair):
    close(alignment.norm_ratio(*pair), oracles.norm_ratio(*pair), atol=0)


@given(pairs())
def test_sign_agreement_is_that_of_a_loop(pair):
    close(alignment.sign_agreement(*pair), oracles.sign_agreement(*pair))


@given(pairs())
def test_pooled_cosine_is_that_of_one_long_vector(pair):
    close(alignment.pooled_cosine(*pair), oracles.pooled_cosine(*pair))


@given(pairs())
def test_terms_give_the_pooled_cosine(pair):
    close(alignment.pooled_ratio(alignment.pooled_terms(*pair).mean(0)), oracles.pooled_cosine(*pair))


def test_the_terms_are_those_of_a_loop_up_to_their_units():
    a, g = normal(6, 3, 2, seed=1), 1e-170 * normal(6, 3, 2, seed=2)
    terms = alignment.pooled_terms(1e160 * a, g)
    loop = torch.stack(
        [torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()]) for x, y in zip(a, 1e170 * g, strict=True)]
    )
    close(terms / terms[0], loop / loop[0])


@pytest.mark.parametrize("exponent", range(-30, 31, 5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_credit_that_is_the_reference_reads_one(exponent, dtype):
    g = (10.0**exponent * functional.normalize(normal(50, 7))).to(dtype)
    assert alignment.cosine(g, g).eq(1).all()
    assert alignment.cosine(-g, g).eq(-1).all()
    assert alignment.norm_ratio(g, g).eq(1).all()
    assert alignment.sign_agreement(g, g).eq(1).all()
    close(alignment.pooled_cosine(g, g), f64(1.0))


@pytest.mark.parametrize("metric", PER_EXAMPLE)
def test_examples_do_not_see_each_other(metric):
    a, g = normal(12, 5, seed=1), normal(12, 5, seed=2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    close(metric(a[order], g[order]), metric(a, g)[order])
    close(torch.cat([metric(a[:5], g[:5]), metric(a[5:], g[5:])]), metric(a, g))
    close(metric(a.reshape(12, 5, 1, 1), g.reshape(12, 5, 1, 1)), metric(a, g))


@pytest.mark.parametrize("metric", [alignment.cosine, alignment.norm_ratio, alignment.pooled_cosine])
def test_a_change_of_basis_changes_nothing(metric):
    a, g, q = normal(12, 5, seed=1), normal(12, 5, seed=2), orthogonal(5)
    close(metric(a @ q, g @ q), metric(a, g))


@given(st.integers(-120, 120), st.integers(-120, 120))
def test_scale_changes_no_direction(i, j):
    a, g = normal(6, 5, seed=1), normal(6, 5, seed=2)
    for metric in (alignment.cosine, alignment.sign_agreement, alignment.pooled_cosine):
        close(metric(10.0**i * a, 10.0**j * g), metric(a, g))


def test_no_direction_is_nan_and_never_zero_or_one():
    bad = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1.0, -math.inf]])
    good = torch.ones(4, 2)
    for a, g in ((bad, good), (good, bad), (bad, bad)):
        assert alignment.cosine(a, g).isnan().all()
        assert alignment.sign_agreement(a, g).isnan().all()
    assert alignment.norm_ratio(good, bad).isnan().all()
    assert alignment.norm_ratio(bad, good).tolist()[0] == 0
    assert alignment.norm_ratio(bad, good)[1:].isnan().all()


def test_pooled_cosine_is_nan_for_zeros_and_for_one_bad_example():
    g = normal(4, 3)
    bad = g.clone()
    bad[1, 2] = math.nan
    assert alignment.pooled_cosine(torch.zeros(4, 3), g).isnan()
    assert alignment.pooled_cosine(bad, g).isnan()
    terms = alignment.pooled_terms(bad, g)
    assert terms.isnan().any(1).tolist() == [False, True, False, False]
    close(alignment.pooled_ratio(terms[[0, 2, 3]].sum(0)), f64(1.0))


def test_signs_of_zeros_are_left_out():
    a, g = torch.tensor([[0.0, 1.0, -1.0, 2.0, -0.0]]), torch.tensor([[5.0, 0.0, -3.0, -1.0, 7.0]])
    assert alignment.sign_agreement(a, g).item() == 0.5


def test_the_clamped_cosine_is_torch_s_on_the_mean_reduced_loss():
    a, g = normal(20, 6, seed=1), 1e-7 * normal(20, 6, seed=2)
    for batch in (1, 128, 1024):
        expected = functional.cosine_similarity(a.float(), (g / batch).float(), dim=1)
        assert torch.equal(alignment.cosine_clamped(a, g, batch=batch), expected.double())


@pytest.mark.parametrize(("batch", "printed"), [(1, 1.0), (128, 0.2344), (1024, 0.0293)])
def test_what_papers_print_at_a_norm_of_3e_minus_7(batch, printed):
    g = 3e-7 * functional.normalize(normal(5, 64))
    close(alignment.cosine_clamped(1e7 * g, g, batch=batch), torch.full((5,), printed).double(), rtol=2e-3)


@given(st.integers(-20, 2), st.sampled_from([1, 128, 1024]))
def test_the_clamp_touches_an_example_where_it_changes_what_is_printed(exponent, batch):
    a, g = normal(30, 6, seed=1), 10.0**exponent * normal(30, 6, seed=2)
    loop = [min(x.norm().item(), y.norm().item() / batch) < 1e-8 for x, y in zip(a, g, strict=True)]
    touched = alignment.is_clamped(a, g, batch=batch)
    assert touched.tolist() == loop
    free = (alignment.cosine_clamped(a, g, batch=batch) - alignment.cosine(a, g)).abs() < 1e-6
    assert free[~touched].all()


def test_what_differs_in_shape_is_refused():
    for metric in (*PER_EXAMPLE, alignment.pooled_cosine):
        with pytest.raises(UsageError, match=r"\(2, 3\) and \(2, 4\)"):
            metric(torch.ones(2, 3), torch.ones(2, 4))
