"""The self-calibration never fails by chance, and fails when a measurement is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import creditscope as cs
from creditscope.auditing import bench, measure, nulls, probe
from creditscope.auditing.bench import Bench, Settings
from creditscope.auditing.selfcheck import Check, self_check
from creditscope.auditing.subject import make_subject
from tests.auditing import planted
from tests.zoo import CASES

OPTIONS: dict[str, Any] = dict.fromkeys(("blocks", "head", "state", "loss", "updates", "convention"))


def checks_of(net: nn.Module, x: Any, y: Any, *, seed: int = 0, **options: Any) -> list[Check]:
    learner = cs.rules.BP().attach(net, **options)
    found = make_subject(learner, x, y, credits=None, **OPTIONS)
    with torch.random.fork_rng(devices=[]):
        return self_check(Bench(found, Settings(seed=seed), None), probed=True)


def failed(checks: list[Check]) -> list[str]:
    return [str(check) for check in checks if not check.holds]


@pytest.mark.parametrize("case", [c for c in CASES if "reentrant" not in c.name], ids=str)
def test_holds_on_every_kind_of_network(case):
    net = case.network(dtype=torch.float32)
    x, y = case.batch(48, dtype=torch.float32)
    checks = checks_of(net.eval(), x, y, **case.cut)
    assert len(checks) > 10
    assert not failed(checks)


def random_network(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Of random shape, activation, scale and number of examples."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda *values: values[int(torch.randint(len(values), (), generator=g))]  # noqa: E731
    width, n = pick(3, 4, 8, 20, 64), pick(33, 64, 150)
    activation = pick(nn.ReLU, nn.Tanh, nn.GELU, nn.Identity)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if pick(0, 1):
            net = cs.nets.ResMLP(
                inputs=6, width=width, depth=pick(1, 2, 5), classes=3, branch_std=pick(0.01, 0.5, 30.0)
            )
        else:
            layers = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(pick(1, 2, 4))]
            net = nn.Sequential(nn.Linear(6, width), *layers, nn.Linear(width, 3))
            net.credit_blocks = [str(l + 1) for l in range(len(layers))]
        x = pick(0.01, 1.0, 30.0) * torch.randn(n, 6)
        return net, x, torch.randint(3, (n,))


def by_chance(seeds: range) -> dict[int, list[str]]:
    found = {seed: failed(checks_of(*random_network(seed), seed=seed)) for seed in seeds}
    return {seed: lines for seed, lines in found.items() if lines}


def test_does_not_fail_by_chance():
    assert not by_chance(range(40))


@pytest.mark.slow
def test_does_not_fail_by_chance_on_hundreds_of_networks():
    assert not by_chance(range(40, 400))


def replaced(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs), *args)


SABOTAGES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "cosine is clamped": (measure, "cosine", lambda f: lambda a, g: measure.cosine_clamped(a, g)),
    "cosine forgets the sign": (measure, "cosine", lambda f: replaced(f, lambda v, *_: v.abs())),
    "cosine is of the batch": (
        measure,
        "cosine",
        lambda f: lambda a, g: (a * g).flatten(1).sum(1) / a.norm() / g.norm(),
    ),
    "cosine of zero is 1": (measure, "cosine", lambda f: replaced(f, lambda v, *_: v.nan_to_num(1.0))),
    "examples are mixed up": (measure, "cosine", lambda f: lambda a, g: f(a.roll(1, 0), g)),
    "rho is 0": (bench, "rho", lambda f: lambda p, q: torch.zeros(())),
    "rho is 1": (bench, "rho", lambda f: lambda p, q: torch.ones(())),
    "rho is biased": (bench, "rho", lambda f: replaced(f, lambda v, *_: (v + 0.3).clamp(-1, 1))),
    "norm ratio is upside down": (measure, "norm_ratio", lambda f: lambda a, g: f(g, a)),
    "sign agreement counts the others": (measure, "sign_agreement", lambda f: replaced(f, lambda v, *_: 1 - v)),
    "pooled terms lose the sign": (measure, "pooled_terms", lambda f: replaced(f, lambda t, *_: t.abs())),
    "pooled ratio forgets a norm": (measure, "pooled_ratio", lambda f: lambda t: t[..., 0] / t[..., 1].sqrt()),
    "the clamp is not there": (measure, "cosine_clamped", lambda f: lambda a, g, batch: f(a, g, batch=1, eps=1e-30)),
    "best share is the mean": (measure, "best_share", lambda f: lambda v: v.mean()),
    "participation counts layers": (measure, "participation_ratio", lambda f: lambda v: torch.tensor(float(len(v)))),
    "nudges go up": (bench, "nudge_steps", lambda f: replaced(f, lambda s, *_: -s)),
    "nudges have unit length": (bench, "nudge_steps", lambda f: lambda a, eta: f(a, eta) / a[0].numel() ** 0.5),
    "nudges are too long": (bench, "nudge_steps", lambda f: replaced(f, lambda s, *_: 2 * s)),
    "the null is drawn per example": (
        nulls,
        "null_cosines",
        lambda f: lambda a, g, count, generator: torch.randn(count, generator=generator) / a.numel() ** 0.5,
    ),
    "the null does not turn": (nulls, "null_cosines", lambda f: replaced(f, lambda d, a, g, *_: d + 0.5)),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_finds_a_broken_measurement(monkeypatch: pytest.MonkeyPatch, name: str):
    module, function, break_it = SABOTAGES[name]
    net = planted.residual(0)
    with torch.no_grad():  # small gradients, where a clamp would show
        net.out_head.weight *= 1e-6
    x, y = planted.task(0)
    assert cs.audit(net, x, y, credits=planted.true_credits(net)).verdict.passed
    monkeypatch.setattr(module, function, break_it(getattr(module, function)))
    verdict = cs.audit(net, x, y, credits=planted.true_credits(net)).verdict
    assert verdict.status == "cannot judge"
    assert "self-calibration" in verdict.flags


def test_a_broken_probe_is_no_gradient(monkeypatch: pytest.MonkeyPatch):
    net = planted.residual(0)
    monkeypatch.setattr(probe, "cross_entropy_change", lambda output, change, y: change.square().sum(1))
    verdict = cs.audit(net, *planted.task(0), credits=planted.true_credits(net)).verdict
    assert verdict.status == "cannot judge"
