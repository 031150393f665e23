import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope.errors import UsageError
from creditscope.metrics import alignment, reference
from tests.metrics import oracles
from tests.metrics.oracles import close, f64, normal, orthogonal, pairs


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


@given(pairs(largest=120))
def test_relative_error_is_that_of_a_loop(pair):
    close(reference.relative_error(*pair), oracles.relative_error(*pair), rtol=1e-9)


@given(pairs())
def test_the_cosine_of_the_angle_is_the_cosine(pair):
    close(reference.angle(*pair).cos(), alignment.cosine(*pair), atol=1e-13)


@given(st.floats(-15, 0.49))
def test_small_angles_are_right_to_their_own_precision(exponent):
    wanted = 10.0**exponent
    u, v = f64([[1.0, 0.0]]), f64([[math.cos(wanted), math.sin(wanted)]])
    close(reference.angle(u, v), f64([wanted]), rtol=1e-9, atol=1e-20)


@pytest.mark.parametrize("metric", [reference.relative_error, reference.angle])
def test_certificates_do_not_see_basis_batch_or_scale(metric):
    x, y, q = normal(9, 5, seed=1), normal(9, 5, seed=2), orthogonal(5)
    close(metric(x @ q, y @ q), metric(x, y))
    close(metric(1e-150 * x, 1e-150 * y), metric(x, y))
    close(torch.cat([metric(x[:4], y[:4]), metric(x[4:], y[4:])]), metric(x, y))


@pytest.mark.parametrize("metric", [reference.relative_error, reference.angle])
def test_certificates_that_cannot_be_computed_are_nan(metric):
    good = torch.ones(3, 2)
    bad = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    assert metric(good, bad).isnan().all()
    assert metric(bad, good)[1:].isnan().all()


def test_float32_certifies_itself():
    exact = normal(40, 256)
    approx = exact.float()
    assert reference.relative_error(approx, exact).max() < 6e-8
    assert 1e-9 < reference.angle(approx, exact).max() < 6e-8


def stability_loop(batches):
    means = [sum(batch) / len(batch) for batch in batches]
    cosines = [alignment.cosine(p[None], q[None]) for i, p in enumerate(means) for q in means[:i]]
    return torch.cat(cosines).mean()


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 4), st.integers(-150, 150), st.integers(0, 99))
def test_stability_is_the_mean_over_pairs_in_a_loop(count, batch, features, exponent, seed):
    batches = normal(count, batch, features, 2, seed=seed)
    close(reference.cross_batch_stability(10.0**exponent * batches), stability_loop(batches))


def test_stability_of_one_direction_and_of_noise():
    assert reference.cross_batch_stability(torch.ones(8, 4, 3)).item() == pytest.approx(1)
    noise = reference.cross_batch_stability(normal(16, 4, 256))
    assert abs(noise) < 4 / math.sqrt(256 * 120)
    assert reference.cross_batch_stability(torch.zeros(4, 2, 3)).isnan()
    with pytest.raises(UsageError, match="1 was given"):
        reference.cross_batch_stability(torch.ones(1, 4, 3))


def network(scale=1.0):
    """A small smooth tail and its gradient by autograd; its states are as large as ``scale``."""
    weight, head = normal(6, 6, seed=5), normal(3, 6, seed=6)
    y = torch.arange(10) % 3

    def tail(h):
        z = torch.nn.functional.layer_norm(h.flatten(1), (6,)) @ weight.T
        targets = y.repeat(len(h) // 10)
        return torch.nn.functional.cross_entropy(z.tanh() @ head.T, targets, reduction="none")

    h = (scale * normal(10, 2, 3, seed=7)).requires_grad_()
    (g,) = torch.autograd.grad(tail(h).sum(), h)
    return tail, h.detach(), g


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e9])
def test_a_gradient_agrees_with_finite_differences_at_every_scale_of_the_state(scale):
    tail, h, g = network(scale)
    agreement = reference.finite_difference_agreement(tail, h, g, gen())
    assert agreement.rho > 0.999999
    assert agreement.resolution.resolved


@pytest.mark.parametrize(
    "wrong", [lambda g: -g, lambda g: g.flip(1), lambda g: torch.randn(g.shape, generator=gen(1)).double()]
)
def test_what_is_no_gradient_does_not(wrong):
    tail, h, g = network()
    assert reference.finite_difference_agreement(tail, h, wrong(g), gen()).rho < 0.9


def test_agreement_does_not_depend_on_the_chunk_and_draws_nothing_global(untouched_rng):
    tail, h, g = network()
    results = [reference.finite_difference_agreement(tail, h, g, gen(), chunk=chunk).rho for chunk in (1, 20, 30, 4096)]
    close(torch.stack(results), results[0].expand(4), rtol=1e-9)


def test_a_flat_loss_has_no_agreement_and_says_so():
    agreement = reference.finite_difference_agreement(lambda h: 0 * h.sum(1) + 1, normal(4, 3), normal(4, 3), gen())
    assert agreement.rho.isnan()
    assert not agreement.resolution.resolved


def test_a_state_of_zeros_is_probed_all_the_same():
    g = normal(4, 3)
    agreement = reference.finite_difference_agreement(
        lambda h: (h * g.repeat(len(h) // 4, 1)).sum(1), torch.zeros(4, 3), g, gen()
    )
    assert agreement.rho.item() == pytest.approx(1)
