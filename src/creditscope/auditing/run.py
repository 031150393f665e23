"""The audit: everything that is measured, in order, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, variance
from typing import Any, Literal

import torch
from torch import Tensor, nn

import creditscope
from creditscope.auditing import measure
from creditscope.auditing import updates as updating
from creditscope.auditing.about import about_network, about_rule
from creditscope.auditing.bench import ETAS, Bench, Settings
from creditscope.auditing.hints import find_hints
from creditscope.auditing.result import FORMAT, VERSION, Audit
from creditscope.auditing.selfcheck import Check, self_check
from creditscope.auditing.sheet import Sheet, to_dataset
from creditscope.auditing.subject import Claim, Convention, CreditFn, Subject, UpdateFn, make_subject, preserved
from creditscope.auditing.thresholds import load_thresholds
from creditscope.calling import Inputs, StateFn
from creditscope.errors import UsageError, unknown
from creditscope.evaluation import evaluating
from creditscope.metrics.summary import Resampling, student_t, t_quantile
from creditscope.rules._base import Learner
from creditscope.tape import LossFn

TIERS = ("quick", "standard", "full")
PROBES = ("float64", "published")


def audit(
    subject: Learner | nn.Module,
    x: Inputs,
    y: Any,
    *,
    credits: CreditFn | Mapping[str, CreditFn] | None = None,
    updates: UpdateFn | None = None,
    blocks: Sequence[str] | None = None,
    head: str | None = None,
    state: StateFn | None = None,
    loss: LossFn | None = None,
    reference: Callable[[Any, Any], Sequence[Tensor]] | None = None,
    convention: Convention | None = None,
    initial: Mapping[str, Tensor] | None = None,
    accuracies: Sequence[float] | None = None,
    baselines: Mapping[str, Sequence[float]] | None = None,
    thresholds: str | Path | None = None,
    tier: Literal["quick", "standard", "full"] = "standard",
    probe: Literal["float64", "published"] = "float64",
    directions: int = 32,
    epsilon: float = 1e-3,
    nulls: int = 200,
    seed: int = 0,
) -> Audit:
    """Audit a learner, or any network with the credits or updates that are claimed for it.

    The network is measured in eval mode and left as it was: parameters, ``.grad``, buffers, modes and random states.

    Args:
        subject: a learner, or any module with ``credits=`` or ``updates=``.
        x: the evaluation inputs: a tensor, a tuple or a dict.
        y: the labels.
        credits: ``(x, y) -> [a_0..a_L]`` (None: not given), or several by name; called once each.
        updates: ``(x, y) -> {parameter: update}``, descent direction of the mean loss, for rules without a credit.
        blocks: where the network is cut, as for ``attach``; so are ``head``, ``state`` and ``loss``.
        head: as for ``attach``.
        state: as for ``attach``.
        loss: as for ``attach``.
        reference: the exact credits, where autograd through the network is not its gradient.
        convention: how ``credits`` are stated, where they are not per example, of the summed loss, along the gradient.
        initial: the state dict at initialisation, for the drift.
        accuracies: test accuracies, one a seed, for depth utility.
        baselines: accuracies of "frozen-bp", "frozen-rule" and "shallow", one a seed each.
        thresholds: a TOML file of thresholds.
        tier: "quick" (alignment, scale, aggregation); "standard" (with ρ, nudging, certificate, nulls, calibration);
            "full" (with effective rank and exploitability).
        probe: "float64", or the "published" procedure in the network's own precision.
        directions: random directions for ρ.
        epsilon: length of a probing step.
        nulls: draws of the null.
        seed: of directions, nulls and bootstrap.
    """
    _check(tier, probe, directions, epsilon, nulls)
    limits = load_thresholds(thresholds)
    settings = Settings(tier=tier, probe=probe, directions=directions, epsilon=epsilon, nulls=nulls, seed=seed)
    depth_attrs = depth_utility(accuracies, baselines)
    network = subject.network if isinstance(subject, Learner) else subject
    if initial is not None:
        updating.check_initial(network, initial)
    others = [subject._path] if isinstance(subject, Learner) and subject.pathway is not None else []
    if not isinstance(network, nn.Module):
        raise UsageError(f"an audit takes a learner or an nn.Module, not {type(subject).__name__}")
    with preserved(network, *others):
        options = {"blocks": blocks, "head": head, "state": state, "loss": loss, "convention": convention}
        found = make_subject(subject, x, y, credits=credits, updates=updates, **options)
        with evaluating(network):
            bench = Bench(found, settings, reference)
            _refuse_random(bench)
            return _measured(bench, found, settings, initial, depth_attrs, limits)


def _check(tier: str, probe: str, directions: int, epsilon: float, nulls: int) -> None:
    if tier not in TIERS:
        raise unknown("tier", str(tier), TIERS)
    if probe not in PROBES:
        raise unknown("probe", str(probe), PROBES)
    for name, value, low in (("directions", directions, 2), ("nulls", nulls, 2)):
        if not isinstance(value, int) or value < low:
            raise UsageError(f"{name} must be a whole number of at least {low}, not {value!r}")
    if not (isinstance(epsilon, int | float) and 0 < epsilon < math.inf):
        raise UsageError(f"epsilon must be a positive number, not {epsilon!r}")


def _refuse_random(bench: Bench) -> None:
    """A network that is random in eval mode has no reference; each look at it otherwise sees the same random stream."""
    if not torch.allclose(bench.again[0], bench.native.output, equal_nan=True, rtol=1e-3, atol=1e-5):
        raise UsageError("the network gives another output each time in eval mode: it cannot be audited")


def _measured(
    bench: Bench, subject: Subject, settings: Settings, initial: Any, depth_attrs: dict[str, Any], limits: Any
) -> Audit:
    standard, full = settings.tier != "quick", settings.tier == "full"
    shared = Sheet(intervals=standard)
    n = len(bench.finite)
    finite = bench.finite
    draws = settings.draws if standard else 1
    resampling = Resampling(n, draws=draws, generator=bench.generator("bootstrap"))
    with shared.timed("scale"):
        measure.measure_scale(bench, shared, resampling)
    if standard:
        with shared.timed("reference"):
            measure.measure_reference(bench, shared, resampling)
        with shared.timed("stability"):
            measure.measure_stability(bench, shared)
    if full:
        with shared.timed("rank"):
            measure.measure_rank(bench, shared)
    with shared.timed("drift"):
        updating.measure_drift(bench, initial, shared)
    attrs: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "creditscope": creditscope.__version__,
        "torch": str(torch.__version__),
        "n": n,
        "tier": settings.tier,
        "probe": settings.probe,
        "seed": settings.seed,
        "loss": getattr(bench.cut.loss, "__name__", "loss"),
        "blocks": list(bench.cut.blocks),
        **about_network(bench.cut),
        **depth_attrs,
    }
    if isinstance(bench.y, Tensor) and not bench.y.is_floating_point():
        attrs["classes"] = len(bench.y.unique())
    if not bool(finite.all()):
        attrs |= {"not_finite": int((~finite).sum()), "first_not_finite": int((~finite).nonzero()[0])}
    checks: list[Check] = []
    if standard and bool(finite.any()):
        with shared.timed("self-calibration"):
            checks = self_check(bench, probed=settings.probe == "float64")
    attrs["checks"] = len(checks)
    attrs["failed_checks"] = "\n".join(str(check) for check in checks if not check.holds)
    sheets: dict[str, Sheet] = {}
    for claim in subject.claims:
        sheet = sheets[claim.name] = Sheet(intervals=standard)
        _measure_claim(bench, claim, sheet, resampling, standard=standard, full=full)
        attrs[f"driven@{claim.name}"] = claim.driven
        attrs |= {f"{key}@{claim.name}": text for key, text in about_rule(claim).items()}
        attrs[f"hints@{claim.name}"] = "\n".join(find_hints(bench, claim, sheet))
        if claim.learner is not None:
            _measure_learner(bench, claim, sheet, attrs, standard=standard)
    if subject.updates is not None:
        with shared.timed("updates"):
            updating.measure_updates(bench, subject.updates, shared)
            attrs["uncovered"] = "\n".join(updating.cover_updates(bench, subject.updates, shared))
    if not subject.labelled and subject.claims:
        attrs["credit"] = subject.claims[0].name
    coords = {
        "layer": ("layer", list(range(bench.depth + 1)), {"long_name": "state h_l, l = 0..L"}),
        "block": ("block", list(bench.cut.blocks), {"long_name": "block"}),
        "eta": ("eta", list(ETAS), {"long_name": "nudging step over RMS"}),
        "k": ("k", list(updating.STEPS), {"long_name": "local updates"}),
        "quartile": ("quartile", [0.25, 0.5, 0.75]),
        "parameter": ("parameter", [name for name, _ in bench.cut.network.named_parameters()]),
    }
    data = to_dataset(shared, sheets, labelled=subject.labelled, coords=coords, attrs=attrs)
    driving = [claim.driving for claim in subject.claims] or [list(range(1, bench.depth + 1))]
    if subject.labelled:
        data = data.assign_coords(driving_state=(("credit", "block"), driving))
    else:
        data = data.assign_coords(driving_state=("block", driving[0]))
    return Audit(data, limits)


def _measure_claim(
    bench: Bench, claim: Claim, sheet: Sheet, resampling: Resampling, *, standard: bool, full: bool
) -> None:
    with sheet.timed("alignment"):
        measure.measure_alignment(bench, claim, sheet, resampling)
        exact = [l in claim.exact for l in range(bench.depth + 1)]
        sheet.put("exact", exact, ["layer"], "the credit is exact by construction")
    with sheet.timed("aggregation"):
        measure.measure_aggregates(claim, sheet)
    if standard:
        with sheet.timed("rho"):
            measure.measure_rho(bench, claim, sheet, resampling)
        with sheet.timed("nudging"):
            measure.measure_nudging(bench, claim, sheet, resampling)
        with sheet.timed("null"):
            measure.measure_null(bench, claim, sheet)
    if full:
        with sheet.timed("exploitability"):
            updating.measure_exploitability(bench, claim, sheet)


def _measure_learner(bench: Bench, claim: Claim, sheet: Sheet, attrs: dict[str, Any], *, standard: bool) -> None:
    assert claim.learner is not None
    with sheet.timed("updates"):
        updating.measure_updates(bench, updating.rule_updates(claim.learner, bench), sheet)
    if standard:
        with sheet.timed("coverage"):
            wrong = updating.measure_coverage(bench, claim.learner, sheet)
        attrs[f"uncovered@{claim.name}"] = "\n".join(wrong)


def depth_utility(
    accuracies: Sequence[float] | None, baselines: Mapping[str, Sequence[float]] | None
) -> dict[str, Any]:
    """Return the margin of the accuracies over the best baseline, with Student's t interval, as attributes."""
    if accuracies is None and baselines is None:
        return {}
    if not accuracies or not baselines or not all(baselines.values()):
        raise UsageError("depth utility needs both accuracies= and baselines=, each with one number a seed")
    for name, values in {"accuracies": accuracies, **baselines}.items():
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise UsageError(f"{name} must be a list, one number a seed, not {values!r}")
    known = ("frozen-bp", "frozen-rule", "shallow")
    for name in baselines:
        if name not in known:
            raise unknown("baseline", name, known)
    for name, values in {"accuracies": accuracies, **baselines}.items():
        bad = [v for v in values if not (isinstance(v, int | float) and 0 <= v <= 1)]
        if bad:
            raise UsageError(f"{name} are shares between 0 and 1, not {bad[0]!r}")
    means = {name: sum(values) / len(values) for name, values in baselines.items()}
    best = max(means, key=lambda name: means[name])
    own = sum(accuracies) / len(accuracies)
    listed = ", ".join(f"{name} {mean:.3f} (n={len(baselines[name])})" for name, mean in means.items())
    attrs: dict[str, Any] = {
        "accuracies": list(map(float, accuracies)),
        "accuracy_mean": own,
        "baseline": best,
        "baseline_mean": means[best],
        "margin": own - means[best],
        "baselines_listed": listed,
        **{f"baseline_{name}": list(map(float, values)) for name, values in baselines.items()},
    }
    low, high = _margin_interval(accuracies, baselines[best])
    if low == low:
        attrs |= {
            "margin_low": low,
            "margin_high": high,
            "margin_interval": f" (95 % {low:+.3f} to {high:+.3f}, over seeds)",
        }
    return attrs


def _margin_interval(own: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return Student's t interval of the difference over seeds: paired where each has its match, else Welch's.

    Welch's degrees of freedom are rounded down; NaN where a group has one seed alone.
    """
    if min(len(own), len(other)) < 2:
        return math.nan, math.nan
    if len(own) == len(other):
        found = student_t(torch.tensor([a - b for a, b in zip(own, other, strict=True)], dtype=torch.float64))
        return float(found.low), float(found.high)
    a, b = variance(own) / len(own), variance(other) / len(other)
    freedom = (
        (a + b) ** 2 / (a**2 / (len(own) - 1) + b**2 / (len(other) - 1)) if a + b else min(len(own), len(other)) - 1
    )
    half = t_quantile(0.975, int(freedom)) * math.sqrt(a + b)
    middle = mean(own) - mean(other)
    return middle - half, middle + half
