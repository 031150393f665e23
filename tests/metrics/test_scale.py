import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope.metrics import scale
from tests.metrics import oracles
from tests.metrics.oracles import close, f64, normal, orthogonal, pairs

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=12)


@given(pairs())
def test_norm_is_that_of_a_loop_at_every_magnitude(pair):
    close(scale.norm(pair[0]), oracles.norm(pair[0]), atol=0)


def test_norm_of_what_is_not_finite():
    t = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [-math.inf, 0.0], [3.0, 4.0]])
    assert scale.norm(t).tolist()[0] == math.inf
    assert scale.norm(t)[1].isnan()
    assert scale.norm(t).tolist()[2:] == [math.inf, 5.0]


def test_norm_does_not_see_basis_batch_or_axes():
    t, q = normal(8, 6), orthogonal(6)
    close(scale.norm(t @ q), scale.norm(t))
    close(torch.cat([scale.norm(t[:3]), scale.norm(t[3:])]), scale.norm(t))
    close(scale.norm(t.reshape(8, 2, 3)), scale.norm(t))


@given(VALUES)
def test_lower_median_is_one_of_the_values(values):
    close(scale.lower_median(f64(values)), f64(oracles.lower_median(values)))


def test_lower_median_is_torch_s():
    values = normal(3, 10)
    assert torch.equal(scale.lower_median(values), values.median(-1).values)


@given(VALUES)
def test_quartiles_are_values_at_the_ranks_below(values):
    kept = sorted(v for v in values if not math.isnan(v))
    expected = [kept[math.floor(q * (len(kept) - 1))] if kept else math.nan for q in (0.25, 0.5, 0.75)]
    result = scale.quartiles(f64(values))
    close(result, f64(expected))
    close(result[1], scale.lower_median(f64(values)))


def test_growth_is_the_ratio_of_the_medians_and_not_the_median_of_the_ratios():
    before, after = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([30.0, 10.0, 20.0])
    assert scale.growth(after, before).item() == 10.0
    assert scale.growth(after.expand(2, 3), before.expand(2, 3)).tolist() == [10.0, 10.0]


@pytest.mark.parametrize("before", [[0.0, 0.0, 1.0], [math.nan] * 3, [math.inf, math.inf, 1.0]])
def test_growth_that_cannot_be_computed_is_nan(before):
    assert scale.growth(torch.ones(3), torch.tensor(before)).isnan()


@given(pairs(largest=120))
def test_branch_ratio_is_that_of_a_loop(pair):
    close(scale.branch_ratio(*pair), oracles.norm_ratio(*pair), atol=0)
