import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope.errors import UsageError
from creditscope.metrics import alignment, causal, summary
from creditscope.metrics.summary import Resampling
from tests.metrics import oracles
from tests.metrics.oracles import close, f64, normal


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def resampling(n=30, draws=1000, **options):
    return Resampling(n, draws, generator=gen(), **options)


def test_weights_are_multinomial(untouched_rng):
    weights = resampling(40, 2000).weights
    assert weights.sum(1).eq(40).all()
    close(weights.mean(0), torch.ones(40).double(), atol=6 / math.sqrt(2000), rtol=0)
    assert weights.var().item() == pytest.approx(1 - 1 / 40, abs=0.05)


@given(st.integers(2, 12), st.integers(0, 99), st.lists(st.integers(0, 11), max_size=4))
def test_values_are_those_of_a_loop_and_nan_is_left_out(n, seed, missing):
    values = normal(n, seed=seed)
    values[[i for i in missing if i < n]] = math.nan
    kept = [v for v in values.tolist() if not math.isnan(v)]
    mean, median = resampling(n, 50).mean(values), resampling(n, 50).median(values)
    close(mean.value, f64(math.fsum(kept) / len(kept) if kept else math.nan))
    close(median.value, f64(oracles.lower_median(values.tolist())))
    assert mean.n == median.n == len(kept)
    if len(kept) < 2:
        assert mean.low.isnan()
        assert mean.high.isnan()
    else:
        assert mean.low <= mean.value <= mean.high


def studentised_loop(weights, statistic):
    """The bootstrap-t interval, draw by draw; standard errors by the infinitesimal jackknife, in finite differences."""

    def both(w, step=1e-5):
        value, n = statistic(w), sum(w)
        slopes = [statistic([v + step * (i == j) for j, v in enumerate(w)]) - value for i in range(len(w))]
        return value, math.sqrt(sum(v * (s / step) ** 2 for v, s in zip(w, slopes, strict=True))), n

    value, error, _ = both([1.0] * weights.shape[1])
    draws = [both(w)[:2] for w in weights.tolist()]
    t = sorted((v - value) / e for v, e in draws)

    def quantile(p):
        k = min(int(p * (len(t) - 1)), len(t) - 2)
        return t[k] + (p * (len(t) - 1) - k) * (t[k + 1] - t[k])

    values = [v for v, _ in draws]
    return value, max(value - quantile(0.975) * error, min(values)), min(value - quantile(0.025) * error, max(values))


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_a_mean_is_that_of_a_loop(seed):
    values, bootstrap = normal(12, seed=seed).exp(), resampling(12, 80)
    statistic = lambda w: sum(p * v for p, v in zip(w, values.tolist(), strict=True)) / sum(w)  # noqa: E731
    close(torch.stack(bootstrap.mean(values)[:3]), f64(studentised_loop(bootstrap.weights, statistic)), rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_a_pooled_cosine_is_that_of_a_loop(seed):
    a, g, bootstrap = normal(12, 3, seed=seed), normal(12, 3, seed=seed + 50), resampling(12, 80)
    a = a + g
    terms = [[(x * y).sum().item(), (x * x).sum().item(), (y * y).sum().item()] for x, y in zip(a, g, strict=True)]

    def statistic(w):
        s = [sum(v * t[k] for v, t in zip(w, terms, strict=True)) for k in range(3)]
        return s[0] / math.sqrt(s[1] * s[2])

    estimate = bootstrap.pooled(alignment.pooled_terms(a, g), alignment.pooled_ratio)
    close(torch.stack(estimate[:3]), f64(studentised_loop(bootstrap.weights, statistic)), rtol=1e-4)


def test_one_event_among_many_has_an_interval_within_what_can_be():
    values = torch.zeros(200)
    values[0] = 1
    estimate = resampling(200).mean(values)
    assert -1e-15 < estimate.low <= estimate.value <= estimate.high < 0.05


def test_leading_axes_are_rows_of_their_own():
    values, bootstrap = normal(2, 3, 30), resampling()
    values[1, 2, 5] = math.nan
    terms = normal(2, 3, 30, 3).square()
    terms[0, 1, 4, 2] = math.nan
    for i in range(2):
        for j in range(3):
            for statistic in (bootstrap.mean, bootstrap.median):
                close(torch.stack([part[i, j] for part in statistic(values)]), torch.stack([*statistic(values[i, j])]))
            pooled = bootstrap.pooled(terms, alignment.pooled_ratio)
            close(
                torch.stack([part[i, j] for part in pooled]),
                torch.stack([*bootstrap.pooled(terms[i, j], alignment.pooled_ratio)]),
            )
            both = bootstrap.median_ratio(values.exp(), values.square())
            close(
                torch.stack([part[i, j] for part in both]),
                torch.stack([*bootstrap.median_ratio(values.exp()[i, j], values.square()[i, j])]),
            )


@given(st.integers(-290, 290), st.integers(0, 20))
def test_intervals_follow_scale_and_sign(exponent, seed):
    values, bootstrap = normal(30, seed=seed).exp(), resampling(draws=200)
    for statistic in (bootstrap.mean, bootstrap.median):
        plain, scaled = statistic(values), statistic(10.0**exponent * values)
        close(torch.stack(scaled[:3]) / 10.0**exponent, torch.stack(plain[:3]), rtol=1e-9)
    plain, mirrored = bootstrap.mean(values), bootstrap.mean(-values)
    close(torch.stack([-mirrored.high, -mirrored.low]), torch.stack([plain.low, plain.high]), rtol=1e-6)


@pytest.mark.parametrize("value", [1.0, 0.1, 0.0, -1e-30])
def test_values_that_are_all_the_same_have_an_interval_of_no_width(value):
    bootstrap = resampling()
    for estimate in (
        bootstrap.mean(torch.full((30,), value).double()),
        bootstrap.median(torch.full((30,), value).double()),
    ):
        close(torch.stack(estimate[:3]), torch.full((3,), value).double())
        assert estimate.low <= estimate.value <= estimate.high


def test_a_perfect_credit_has_the_interval_one_to_one():
    g, bootstrap = normal(30, 4), resampling()
    for estimate in (
        bootstrap.mean(alignment.cosine(g, g)),
        bootstrap.pooled(alignment.pooled_terms(g, 3 * g), alignment.pooled_ratio),
        bootstrap.pooled(causal.rho_terms(g.T, 2 * g.T), causal.pearson),
    ):
        close(torch.stack(estimate[:3]), torch.ones(3).double(), rtol=1e-9)
        assert estimate.high <= 1


def test_what_cannot_be_computed_is_nan():
    bootstrap, nothing = resampling(), torch.full((30,), math.nan)
    for estimate in (bootstrap.mean(nothing), bootstrap.median(nothing), bootstrap.median_ratio(nothing, nothing)):
        assert torch.stack(estimate[:3]).isnan().all()
        assert estimate.n == 0
    infinite = normal(30)
    infinite[3] = math.inf
    mean = bootstrap.mean(infinite)
    assert mean.value == math.inf
    assert mean.low.isnan()
    zero = bootstrap.pooled(alignment.pooled_terms(torch.zeros(30, 2), torch.ones(30, 2)), alignment.pooled_ratio)
    assert torch.stack(zero[:3]).isnan().all()
    assert bootstrap.median_ratio(normal(30), torch.zeros(30)).value.isnan()


def test_an_example_missing_in_one_of_two_medians_is_left_out_of_both():
    above, below, bootstrap = normal(30, seed=1).exp(), normal(30, seed=2).exp(), resampling()
    above[3], below[7] = math.nan, math.nan
    kept = [i for i in range(30) if i not in (3, 7)]
    estimate = bootstrap.median_ratio(above, below)
    close(estimate.value, f64(oracles.lower_median(above[kept].tolist()) / oracles.lower_median(below[kept].tolist())))
    assert estimate.n == 28
    assert estimate.low < estimate.value < estimate.high


def test_medians_of_draws_are_those_of_the_examples_drawn():
    values, bootstrap = normal(2, 9), resampling(9, 60)
    values[1, 4] = math.nan
    for row, medians in zip(values, bootstrap._medians(values), strict=True):
        for weights, median in zip(bootstrap.weights.int(), medians, strict=True):
            close(median, f64(oracles.lower_median(row.repeat_interleave(weights).tolist())))


def test_the_number_of_values_has_to_fit():
    for attempt in (lambda b: b.mean(torch.ones(29)), lambda b: b.pooled(torch.ones(29, 3), alignment.pooled_ratio)):
        with pytest.raises(UsageError, match="over 30 examples; 29 values"):
            attempt(resampling())


def test_a_draw_leaves_the_caller_s_values_alone():
    values = normal(30)
    before = values.clone()
    bootstrap = resampling()
    bootstrap.mean(values), bootstrap.median(values), bootstrap.median_ratio(values, values)
    assert torch.equal(values, before)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [1, 5, 6, 20, 201])
def test_the_rank_of_the_sign_test_is_that_of_the_binomial(n, level):
    mass = [math.comb(n, k) / 2**n for k in range(n + 1)]
    expected = max(r for r in range(n + 1) if math.fsum(mass[:r]) <= (1 - level) / 2)
    assert summary.sign_test_rank(n, level) == expected


def test_too_few_for_the_interval_of_a_median():
    estimate = resampling(5).median(normal(5))
    assert estimate.low.isnan()
    assert not estimate.value.isnan()


# Coverage. One set of weights serves all trials, as it serves all statistics of an audit.


def skewed(trials, n, generator):
    """Values per example as they come: cosines, log-normal norms and losses, changes of the loss of either sign."""
    z = torch.randn(trials, n, generator=generator, dtype=torch.float64)
    yield "normal", z, 0.0, 0.0
    yield "log-normal", z.exp(), math.exp(0.5), 1.0
    yield "negative log-normal", -(0.75 * z).exp(), -math.exp(0.75**2 / 2), -1.0
    yield "exponential", -torch.special.log_ndtr(z), 1.0, math.log(2)
    yield "bounded at 1", torch.special.ndtr(z) ** 0.2, 1 / 1.2, 0.5**0.2


def coverage(estimate, truth):
    return ((estimate.low <= truth) & (truth <= estimate.high)).double().mean().item()


def pooled_case(trials, n, generator):
    """Credits with cosine near .45 to a reference whose norm varies over examples by a log-normal factor."""
    g = torch.randn(trials, n, 6, generator=generator, dtype=torch.float64)
    sizes = (0.4 * torch.randn(trials, n, 1, generator=generator, dtype=torch.float64)).exp()
    g = sizes * g
    a = g + 2 * sizes * torch.randn(trials, n, 6, generator=generator, dtype=torch.float64)
    terms = torch.stack([(a * g).sum(-1), (a * a).sum(-1), (g * g).sum(-1)], dim=-1)
    return terms, 1 / math.sqrt(5)


def correlated_case(trials, n, generator):
    """Changes along eight directions, predicted and true, with correlation .6 and sizes that vary over examples."""
    sizes = (0.4 * torch.randn(trials, n, 1, generator=generator, dtype=torch.float64)).exp()
    p, noise = (sizes * torch.randn(trials, n, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    q = 0.6 * p + 0.8 * noise
    return torch.stack(
        [torch.full_like(p, 1).sum(-1), p.sum(-1), q.sum(-1), *((x * y).sum(-1) for x, y in ((p, p), (q, q), (p, q)))],
        -1,
    )


def covered(trials, n, bootstrap, generator):
    """The share of trials whose interval holds the truth, by statistic and distribution."""
    for name, values, mean, median in skewed(trials, n, generator):
        yield f"mean, {name}", coverage(bootstrap.mean(values), mean)
        yield f"median, {name}", coverage(bootstrap.median(values), median)
    terms, truth = pooled_case(trials, n, generator)
    yield "pooled cosine", coverage(bootstrap.pooled(terms, alignment.pooled_ratio), truth)
    yield "ratio", coverage(bootstrap.pooled(terms[..., [0, 2]], summary.ratio), 1.0)
    yield "rho", coverage(bootstrap.pooled(correlated_case(trials, n, generator), causal.pearson), 0.6)


def check_coverage(trials, n, draws, slack):
    generator, bootstrap, shares = gen(1), Resampling(n, draws, generator=gen(2)), {}
    for _ in range(trials // 200):  # in parts, for the memory
        for name, share in covered(200, n, bootstrap, generator):
            shares.setdefault(name, []).append(share)
    means = {name: sum(parts) / len(parts) for name, parts in shares.items()}
    assert means == {name: pytest.approx(0.95, abs=slack) for name in means}


def test_intervals_cover():
    check_coverage(trials=400, n=200, draws=400, slack=0.02 + 2 * math.sqrt(0.95 * 0.05 / 400))


def test_the_interval_of_growth_covers():
    z = torch.randn(300, 2, 200, generator=gen(1), dtype=torch.float64).exp()
    estimate = Resampling(200, 300, generator=gen(2)).median_ratio(5 * z[:, 0], z[:, 1] * z[:, 0])
    truth = 5.0  # the medians of exp(z) and of a product of two are 1
    assert coverage(estimate, truth) == pytest.approx(0.95, abs=0.045)


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, 500, 1024])
def test_intervals_cover_95_percent_within_two(n):
    check_coverage(trials=4000, n=n, draws=1000, slack=0.02)


@pytest.mark.parametrize(
    ("events", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (1, 20, 0.0089, 0.2361), (20, 20, 0.8389, 1.0)],
)
def test_a_share_has_wilson_s_interval(events, n, low, high):
    estimate = summary.share(torch.arange(n) < events)
    close(torch.stack(estimate[:3]), f64([events / n, low, high]), atol=6e-5, rtol=0)
    assert estimate.n == n


def test_shares_of_several_rows():
    flags = torch.rand(3, 50, generator=gen()) < 0.3
    estimate = summary.share(flags)
    for i in range(3):
        close(
            torch.stack([part[i].double() for part in estimate]),
            torch.stack([part.double() for part in summary.share(flags[i])]),
        )


# Student's t: standard tables (e.g. NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2)
TABLE = {
    0.90: {1: 3.078, 2: 1.886, 3: 1.638, 5: 1.476, 10: 1.372, 30: 1.310, 100: 1.290},
    0.95: {1: 6.314, 2: 2.920, 3: 2.353, 5: 2.015, 10: 1.812, 30: 1.697, 100: 1.660},
    0.975: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 100: 1.984},
    0.99: {1: 31.821, 2: 6.965, 3: 4.541, 5: 3.365, 10: 2.764, 30: 2.457, 100: 2.364},
    0.995: {1: 63.657, 2: 9.925, 3: 5.841, 5: 4.032, 10: 3.169, 30: 2.750, 100: 2.626},
    0.999: {1: 318.309, 2: 22.327, 3: 10.215, 5: 5.893, 10: 4.144, 30: 3.385, 100: 3.174},
}


@pytest.mark.parametrize(("p", "dof", "t"), [(p, dof, t) for p, row in TABLE.items() for dof, t in row.items()])
def test_quantiles_are_those_of_the_tables(p, dof, t):
    assert summary.t_quantile(p, dof) == pytest.approx(t, abs=6e-4)
    assert summary.t_quantile(1 - p, dof) == pytest.approx(-t, abs=6e-4)


def test_quantiles_of_one_and_two_degrees_of_freedom_have_closed_forms():
    for p in (0.6, 0.9, 0.999):
        assert summary.t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        assert summary.t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-9)
    assert summary.t_quantile(0.5, 7) == pytest.approx(0, abs=1e-12)
    assert summary.t_quantile(0.975, 20_000) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-3)
    assert math.isnan(summary.t_quantile(0.975, 0))
    with pytest.raises(UsageError, match="not 1"):
        summary.t_quantile(1, 3)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_the_interval_over_seeds_is_that_of_the_textbook(values):
    n, mean = len(values), math.fsum(values) / len(values)
    s = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = summary.t_quantile(0.975, n - 1) * s / math.sqrt(n)
    estimate = summary.student_t(f64([*values, math.nan]))
    close(torch.stack(estimate[:3]), f64([mean, mean - half, mean + half]), rtol=1e-9, atol=1e-9)
    assert estimate.n == n


def test_one_seed_has_no_interval():
    estimate = summary.student_t(torch.tensor([[0.3, math.nan], [0.3, 0.4]]))
    assert estimate.low.isnan().tolist() == [True, False]
    assert estimate.n.tolist() == [1, 2]


def test_three_seeds_cover():
    estimate = summary.student_t(normal(4000, 3))
    assert coverage(estimate, 0.0) == pytest.approx(0.95, abs=0.015)


def test_layers_that_share_and_one_that_has_it_all():
    one, all_ = f64([0.0, 0.0, 0.7, 0.0]), f64([0.7, 0.7, 0.7, 0.7])
    assert [summary.participation_ratio(t).item() for t in (one, all_)] == [1.0, pytest.approx(4)]
    assert [summary.best_share(t).item() for t in (one, all_)] == [1.0, pytest.approx(0.25)]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.integers(-200, 200))
def test_shares_of_layers_are_those_of_a_loop(values, exponent):
    positive = [v for v in values if v > 1e-6]
    values = [v if abs(v) > 1e-6 else 0.0 for v in values]
    scaled = 10.0**exponent * f64([*values, math.nan])
    ratio = math.fsum(positive) ** 2 / math.fsum(v * v for v in positive) if positive else math.nan
    best = max(positive) / math.fsum(positive) if positive else math.nan
    close(summary.participation_ratio(scaled), f64(ratio), rtol=1e-9)
    close(summary.best_share(scaled), f64(best), rtol=1e-9)
