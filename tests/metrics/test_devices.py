"""The measurements on an accelerator are those of the CPU, with generators of either device."""

import pytest
import torch

from creditscope.metrics import alignment, causal, drift, nulls, reference, scale, summary
from tests.metrics.oracles import normal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")

A, G = normal(40, 5, 8, seed=1).float(), normal(40, 5, 8, seed=2)
A[3] = 0
G[5, 1, 1] = float("nan")
G[7] = 1e-200 * G[8]


def tail(h):
    return h.flatten(1).sin().sum(1)


def measure(a, g):
    resampling = summary.Resampling(40, 200, generator=torch.Generator().manual_seed(0))
    cosines, terms = alignment.cosine(a, g), alignment.pooled_terms(a, g)
    h = g.nan_to_num(0)
    draws = [torch.Generator().manual_seed(seed) for seed in range(6)]
    predicted, actual = causal.probe(tail, h, [h.cos(), a], draws[0], count=4, chunk=80)
    norms = scale.norm(h)
    yield from (cosines, alignment.cosine_clamped(a, g), alignment.is_clamped(a, g), alignment.sign_agreement(a, g))
    yield from (alignment.norm_ratio(a, g), terms, predicted, actual, causal.rho(predicted[0], actual))
    yield from (
        causal.rho_terms(predicted[1], actual),
        *causal.rho_resolution(actual, tail(h)),
        causal.nudge_steps(a, 0.01),
    )
    yield from (scale.quartiles(norms), scale.growth(norms, norms + 1), scale.branch_ratio(a, h))
    yield from (
        reference.relative_error(a, g),
        reference.angle(a, g),
        reference.cross_batch_stability(h.reshape(4, 10, 5, 8)),
    )
    yield reference.finite_difference_agreement(tail, h, h.cos(), draws[1]).rho
    yield from (drift.relative_drift(a, h), drift.effective_rank(h))
    null = nulls.null_cosines(a, g, 20, draws[2], how="permutation")
    yield from (
        null,
        nulls.null_cosines(a, g, 20, draws[3], how="rotation"),
        nulls.shuffled_cosines(a, g, 20, draws[4]),
    )
    yield from (nulls.z_score(cosines.nanmean(), null), nulls.holm(nulls.one_sided_p(null)))
    yield from (*resampling.mean(cosines), *resampling.median(norms), *resampling.median_ratio(norms, norms + cosines))
    yield from (
        *resampling.pooled(terms, alignment.pooled_ratio),
        *summary.share(cosines > 0),
        *summary.student_t(cosines),
    )
    yield from (summary.participation_ratio(cosines), summary.best_share(cosines))


def test_an_accelerator_measures_what_the_cpu_does():
    for here, there in zip(measure(A, G), measure(A.cuda(), G.cuda()), strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_generators_of_the_accelerator_serve():
    generator = torch.Generator("cuda").manual_seed(0)
    a, g = A.cuda(), G.cuda()
    assert causal.directions((40, 5, 8), 3, generator).is_cuda
    for how in ("rotation", "permutation"):
        assert nulls.null_cosines(a, g, 5, generator, how=how).isfinite().all()
    assert nulls.shuffled_cosines(a, g, 5, generator).isfinite().all()
    assert summary.Resampling(40, 50, generator=generator).mean(alignment.cosine(a, g)).low.isfinite()
