"""What an audit's Dataset holds, in all forms in which an audit can be asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import creditscope as cs
from creditscope.errors import UsageError
from creditscope.rules import REGISTRY
from tests.auditing import planted
from tests.zoo import BY_NAME

LAYER = [
    *("cosine", "sign_agreement", "norm_ratio", "cosine_clamped", "clamped_share", "rho", "rho_limit"),
    *("state_norm", "reference_norm", "credit_norm"),
]
DIMS = {
    **dict.fromkeys(LAYER, ("layer",)),
    "nudging": ("layer", "eta"),
    "nudging_efficiency": ("layer", "eta"),
    "growth": ("block",),
    **dict.fromkeys(("drift", "update_cosine", "update_norm_ratio", "coverage"), ("parameter",)),
}
INTERVALS = {*LAYER, "nudging", "nudging_efficiency", "growth", "total_growth"}


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return planted.residual(0)


X, Y = planted.task(0)


@pytest.fixture(scope="module")
def audit(net: nn.Module) -> Any:
    return cs.audit(cs.rules.DFA().attach(net), X, Y, tier="full", nulls=20)


def test_the_table(audit: Any):
    data = audit.data
    for name, dims in DIMS.items():
        assert data[name].dims == dims, name
    assert data.sizes["layer"] == 5
    assert list(data.eta.values) == [0.001, 0.003, 0.01]
    assert list(data.driving_state.values) == [1, 2, 3, 4]
    assert data.driving_state.dims == ("block",)


def test_every_variable_says_what_it_is(audit: Any):
    for name, variable in audit.data.data_vars.items():
        assert variable.attrs["long_name"], name
        assert variable.attrs["units"], name
        assert variable.attrs["reduction"], name
        if variable.dtype.kind == "f" and variable.isnull().any():
            assert variable.attrs.get("why_nan"), name
    for name in INTERVALS:
        low, high = (audit.data[f"{name}_interval"].sel(bound=b) for b in ("low", "high"))
        assert "n" in audit.data[name].attrs
        assert "bootstrap over examples" in audit.data[f"{name}_interval"].attrs["interval"]
        inside = (low <= audit.data[name] + 1e-12) & (audit.data[name] - 1e-12 <= high)
        assert (inside | audit.data[name].isnull()).all(), name
    assert "none" in audit.data["max_growth"].attrs["interval"]


def test_seconds_are_recorded(audit: Any):
    taken = dict(zip(audit.data.measurement.values.tolist(), audit.data.seconds.values.tolist(), strict=True))
    assert {"alignment", "rho", "null", "reference", "self-calibration", "exploitability"} <= taken.keys()
    assert all(value >= 0 for value in taken.values())


def without_seconds(data: xr.Dataset) -> xr.Dataset:
    return data.drop_vars(["seconds", "measurement"])


def test_the_same_seed_gives_the_same_bits(net: nn.Module):
    make = lambda: without_seconds(cs.audit(cs.rules.DFA().attach(net), X, Y, seed=4).data)  # noqa: E731
    xr.testing.assert_identical(make(), make())


@pytest.mark.parametrize("tier", ["standard", "full"])
def test_several_credits_equal_single_audits(net: nn.Module, tier: Any):
    exact = planted.true_credits(net)
    functions = {
        "exact": exact,
        "noisy": planted.changed(net, lambda g, r: [a + planted.noise_like(a, r) for a in g], 1),
        "part": lambda x, y: [None, *exact(x, y)[1:4], None],
    }
    several = cs.audit(net, X, Y, credits=functions, tier=tier)
    assert several.data.cosine.dims == ("credit", "layer")
    assert several.data.state_norm.dims == ("layer",)
    for name, function in functions.items():
        single = cs.audit(net, X, Y, credits={name: function}, tier=tier)
        own, alone = (without_seconds(a.data.sel(credit=name)) for a in (several, single))
        xr.testing.assert_equal(own, alone)
        assert several.verdicts[name] == single.verdicts[name]
    order = ("passed", "flagged", "cannot judge")
    assert several.verdict.status == max((v.status for v in several.verdicts.values()), key=order.index)


def test_a_credit_that_is_not_given_everywhere(net: nn.Module):
    exact = planted.true_credits(net)
    audit = cs.audit(net, X, Y, credits=lambda x, y: [None, *exact(x, y)[1:4], None])
    for name in (*LAYER, "nudging"):
        if name not in ("state_norm", "reference_norm"):
            values = audit.data[name].values
            assert np.isnan(values[[0, 4]]).all(), name
            assert not np.isnan(values[1:4]).any(), name
            assert audit.data[name].attrs["why_nan"]
    assert audit.data.cosine.attrs["n"] == [0, 128, 128, 128, 0]
    assert audit.verdict.passed


@pytest.mark.parametrize("convention", [("mean", -1), ("mean", 1), ("sum", -1)])
def test_a_convention_is_the_converted_credit(net: nn.Module, convention: tuple[Any, Any]):
    reduction, sign = convention
    factor = sign / (len(Y) if reduction == "mean" else 1)
    exact = planted.true_credits(net)
    stated = cs.audit(
        net, X, Y, credits=lambda x, y: [a * factor for a in exact(x, y)], convention=cs.Convention(reduction, sign)
    )
    plain = cs.audit(net, X, Y, credits=exact)
    for name in LAYER:
        np.testing.assert_allclose(stated.data[name], plain.data[name], rtol=1e-5, atol=1e-6)
    assert stated.verdict.passed
    assert not stated.verdict.hints


def test_a_reference_of_the_user(net: nn.Module):
    exact = planted.true_credits(net)
    audit = cs.audit(net, X, Y, credits=exact, reference=exact)
    np.testing.assert_allclose(audit.data.cosine, 1.0, rtol=1e-9)
    assert audit.verdict.passed


def test_a_reference_of_the_wrong_length_is_found(net: nn.Module):
    """Correlations cannot see a factor; what a nudge along the reference gains can."""
    exact = planted.true_credits(net)
    audit = cs.audit(net, X, Y, credits=exact, reference=lambda x, y: [2 * g for g in exact(x, y)])
    assert audit.verdict.status == "cannot judge"
    assert "nudging over its slope reads -0.49" in audit.verdict.reasons["self-calibration"]


def test_a_plain_twins_reference_is_the_remedy():
    chain, impostor = planted.chain(0), planted.chain(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        impostor.blocks[3] = planted.Aligned(impostor.blocks[3])
    signal, exact = planted.true_credits(impostor), planted.true_credits(chain)
    assert cs.audit(impostor, X, Y, credits=signal).verdict.status == "cannot judge"
    audits = [cs.audit(impostor, X, Y, credits=signal, reference=exact), cs.audit(chain, X, Y, credits=signal)]
    for audit in audits:
        assert audit.verdict.status != "cannot judge"
        assert (audit.data.cosine.values[:4] < 0.5).all()
        assert audit.data.cosine.values[4] > 0.999
    assert audits[0].verdict.flags == audits[1].verdict.flags
    np.testing.assert_allclose(audits[0].data.cosine, audits[1].data.cosine, atol=1e-5)


def test_drift_from_the_initial_state(net: nn.Module):
    initial = {name: p.detach().clone() for name, p in net.state_dict().items()}
    initial["embed.weight"] = initial["embed.weight"] / 1.5
    del initial["out_head.bias"]
    drift = cs.audit(net, X, Y, credits=planted.true_credits(net), initial=initial, tier="quick").data.drift
    assert float(drift.sel(parameter="embed.weight")) == pytest.approx(0.5)
    assert math.isnan(drift.sel(parameter="out_head.bias"))
    assert float(drift.sel(parameter="blocks.1.w1.weight")) == 0


# --- updates ----------------------------------------------------------------------------------------------------------


def backprop_updates(net: nn.Module) -> Any:
    def updates(x: Any, y: Any) -> dict[str, Tensor]:
        for p in net.parameters():
            p.grad = None
        torch.nn.functional.cross_entropy(net(x), y).backward()
        return {name: -p.grad for name, p in net.named_parameters()}

    return updates


def test_backprops_updates_read_one_and_one(net: nn.Module):
    for audit in (
        cs.audit(net, X, Y, updates=backprop_updates(net)),
        cs.audit(cs.rules.BP().attach(net), X, Y),
    ):
        np.testing.assert_allclose(audit.data.update_cosine, 1.0, atol=1e-5)
        np.testing.assert_allclose(audit.data.update_norm_ratio, 1.0, atol=1e-4)
        assert audit.verdict.passed


def test_updates_without_a_credit(net: nn.Module):
    """A forward-only rule: random updates of the blocks, the true one of the head."""
    true = backprop_updates(net)
    g = torch.Generator().manual_seed(0)

    def forward_only(x: Any, y: Any) -> dict[str, Tensor]:
        return {
            name: u if name.startswith("out_") else torch.randn(u.shape, generator=g)
            for name, u in true(x, y).items()
            if name != "embed.bias"
        }

    audit = cs.audit(net, X, Y, updates=forward_only)
    coverage = dict(zip(audit.data.parameter.values.tolist(), audit.data.coverage.values.tolist(), strict=True))
    assert coverage["out_head.weight"] == "true loss"
    assert coverage["blocks.0.w1.weight"] == "rule"
    assert coverage["embed.bias"] == "nothing"
    assert "cosine" not in audit.data
    assert audit.verdict.flags == ("coverage",)
    assert "embed.bias never moves" in audit.verdict.reasons["coverage"]
    assert "null-credit" in audit.verdict.unmeasured
    assert abs(float(audit.data.update_cosine.sel(parameter="blocks.0.w1.weight"))) < 0.3
    assert math.isnan(audit.data.update_cosine.sel(parameter="embed.bias"))


# --- rules and networks -----------------------------------------------------------------------------------------------

RULES: dict[str, Any] = {
    **{
        key: REGISTRY.load(key)
        for key in (entry.key for entry in REGISTRY)
        if key not in ("last-k", "blend", "handover")
    },
    "fa-block": lambda: cs.rules.FA(level="block"),
    "dfa-study": cs.rules.DFA.study,
    "last-k": lambda: cs.rules.LastK(cs.rules.DFA(), 2),
    "blend": lambda: cs.rules.Blend(cs.rules.DFA(), cs.rules.BP(), 0.5),
    "handover": lambda: cs.rules.Handover(cs.rules.DFA(), cs.rules.BP(), 0.5),
}


def test_every_registered_rule_is_audited_here():
    assert {REGISTRY.key_of(type(make())) for make in RULES.values()} == {entry.key for entry in REGISTRY}


@pytest.mark.parametrize("name", ["resmlp", "convolutional", "mask-positional"])
@pytest.mark.parametrize("rule", RULES)
def test_learners_of_every_rule(rule: str, name: str):
    """Audited at once; never an unfounded hint, never an unfounded flag."""
    if name == "resmlp":
        net, x, y, cut = planted.residual(1), *planted.task(1), {}
    else:
        case = BY_NAME[name]
        net, cut, (x, y) = case.network(dtype=torch.float32), case.cut, case.batch(64, dtype=torch.float32)
    try:
        learner = RULES[rule]().attach(net, example=x, training_steps=10, **cut)
    except UsageError:
        pytest.skip("the rule is not defined on this network")
    verdict = (audit := cs.audit(learner, x, y, nulls=20)).verdict
    assert not verdict.hints
    assert verdict.status != "cannot judge"
    assert not {"coverage", "scale-stability"} & set(verdict.flags), str(verdict)
    assert list(audit.data.driving_state.values) == learner.driving_states
    if rule == "bp":
        assert verdict.passed


@pytest.mark.parametrize("rule", ["bp", "fa", "dfa", "fa-block", "blend"])
def test_no_false_hints_over_seeds(rule: str):
    for seed in range(6):
        net = planted.chain(seed) if seed % 2 else planted.residual(seed)
        x, y = planted.task(seed)
        learner = RULES[rule]().attach(net, example=x, generator=torch.Generator().manual_seed(seed))
        assert not cs.audit(learner, x, y, tier="quick").verdict.hints


def test_tiers(net: nn.Module):
    quick, standard, full = (
        cs.audit(cs.rules.DFA().attach(net), X, Y, tier=t, nulls=20).data for t in ("quick", "standard", "full")
    )
    assert "rho" not in quick
    assert "rho" in standard
    assert "effective_rank" not in standard
    assert {"effective_rank", "exploitability", "exploitability_reference", "exploitability_null"} <= set(full)
    for name in ("cosine", "state_norm", "growth", "best_share"):
        np.testing.assert_array_equal(quick[name], full[name])


def test_exploitability_of_a_bare_callable_is_known_for_one_update(net: nn.Module):
    data = cs.audit(net, X, Y, credits=planted.true_credits(net), tier="full").data
    assert not math.isnan(data.exploitability.sel(k=1))
    assert data.exploitability.sel(k=[5, 20]).isnull().all()
    assert "called once" in data.exploitability.attrs["why_nan"]
    learner = cs.audit(cs.rules.BP().attach(net), X, Y, tier="full").data
    np.testing.assert_allclose(learner.exploitability, learner.exploitability_reference, rtol=0.05)
    assert (learner.exploitability.diff("k") < 0).all()
