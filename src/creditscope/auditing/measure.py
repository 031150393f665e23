"""The measurements: what the network and its reference are like, and what each credit is worth, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from creditscope.auditing.bench import Bench
from creditscope.auditing.nulls import null_draws
from creditscope.auditing.sheet import Sheet
from creditscope.auditing.subject import Claim
from creditscope.metrics._rows import quotient, rows, unit
from creditscope.metrics.alignment import (
    cosine,
    cosine_clamped,
    is_clamped,
    norm_ratio,
    pooled_ratio,
    pooled_terms,
    sign_agreement,
)
from creditscope.metrics.causal import pearson
from creditscope.metrics.drift import effective_rank
from creditscope.metrics.nulls import holm, one_sided_p, z_score
from creditscope.metrics.reference import angle, cross_batch_stability, relative_error
from creditscope.metrics.scale import lower_median, norm, quartiles
from creditscope.metrics.summary import Estimate, Resampling, best_share, participation_ratio, ratio

NAN = float("nan")
MEAN = "mean over examples"
MEDIAN = "lower median over examples"
ALPHA = 1e-3
NO_CREDIT = "no credit was given for this state"
NO_NUDGE = "a credit without a direction, a step lost in the rounding of the state, or a state that is read too early"
NO_DIRECTION = "a credit or reference of zero, or that is not finite, has no direction"


def mean(values: Tensor) -> float:
    """Return the mean over what is known, NaN where nothing is."""
    return float(values.nanmean())


def put_estimate(sheet: Sheet, name: str, found: Estimate, dims: Sequence[str], label: str, **about: Any) -> None:
    """Add a statistic with its n and its interval."""
    bounds = torch.stack([found.low, found.high], dim=-1)
    sheet.put(name, found.value, dims, label, n=found.n.tolist(), interval=bounds, **about)


# --- the network and its reference ------------------------------------------------------------------------------------


def measure_scale(bench: Bench, sheet: Sheet, resampling: Resampling) -> None:
    """Norms of states and reference, growth, and branch over stream."""
    states = torch.stack([norm(h) for h in bench.exact.states])
    reference = torch.stack([norm(g) for g in bench.reference])
    for name, norms, label in (
        ("state_norm", states, "‖h_l‖, per example"),
        ("reference_norm", reference, "‖g_l‖, per example, of the summed loss"),
    ):
        put_estimate(sheet, name, resampling.median(norms), ["layer"], label, how=MEDIAN)
        n = norms.shape[1]
        sheet.put(
            f"{name}_quartiles",
            quartiles(norms).T,
            ["layer", "quartile"],
            f"quartiles of {label}",
            n=n,
            how="over examples",
        )
    how = "ratio of lower medians of ‖h‖"
    growth = resampling.median_ratio(states[1:], states[:-1])
    put_estimate(sheet, "growth", growth, ["block"], "growth of the state over a block", how=how)
    known = growth.value[~growth.value.isnan()]
    worst = float(known.max()) if known.numel() else NAN
    sheet.put("max_growth", worst, [], "largest growth over a block", how="maximum over blocks")
    total = resampling.median_ratio(states[-1:], states[:1])
    put_estimate(sheet, "total_growth", Estimate(*(t[0] for t in total)), [], "growth from h_0 to h_L", how=how)
    unknown = torch.full_like(states[0], NAN)
    shares = [unknown if f is None else quotient(f, h) for f, h in zip(bench.again[1], states, strict=False)]
    put_estimate(
        sheet,
        "branch_ratio",
        resampling.median(torch.stack(shares)),
        ["block"],
        "‖f_l(h_l)‖ / ‖h_l‖",
        how=MEDIAN,
        missing="the block adds its skip inside and does not expose its branch, or changes the state's shape",
    )
    batch = bench.settings.published_batch
    published = [float(lower_median(norm(g))) / batch for g in bench.native.gradients]
    label = "‖g_l‖ as papers print it: of the mean-reduced loss, in the network's own precision"
    sheet.put("published_reference_norm", published, ["layer"], label, n=states.shape[1], how=MEDIAN, batch=batch)


def measure_reference(bench: Bench, sheet: Sheet, resampling: Resampling) -> None:
    """The precision certificate, and whether autograd is the gradient of this network."""
    finite, exact = bench.finite, bench.autograd
    n = int(finite.sum())
    how = "√(Σ‖Δ‖² / Σ‖g‖²) over examples"
    pooled, errors, angles = [], [], []
    for t, g in zip(bench.certified(), exact, strict=True):
        pooled.append(_pooled_error(t[finite], g[finite]))
        errors.append(relative_error(t, g))
        angles.append(angle(t, g))
    label = "relative error of backprop in the network's precision, from an exact error"
    sheet.put("precision_error", pooled, ["layer"], label, n=n, how=how, missing=NO_DIRECTION)
    seen = [_pooled_error(t[finite], g[finite]) for t, g in zip(bench.native.gradients, exact, strict=True)]
    label = "relative error of the gradient that training sees, the loss's own included"
    sheet.put("training_error", seen, ["layer"], label, n=n, how=how, missing=NO_DIRECTION)
    label = "relative error per example of backprop in the network's precision"
    found = resampling.median(torch.stack(errors))
    put_estimate(sheet, "precision_error_median", found, ["layer"], label, how=MEDIAN, missing=NO_DIRECTION)
    label = "angle between backprop in the network's precision and in float64"
    found = resampling.median(torch.stack(angles))
    put_estimate(sheet, "precision_angle", found, ["layer"], label, unit="rad", how=MEDIAN, missing=NO_DIRECTION)
    sheet.put(
        "reference_rho",
        bench.agreements,
        ["layer"],
        "agreement of the reference with central finite differences",
        n=n,
        how="Pearson over examples × directions",
        missing="the differences are below resolution",
    )
    regimes = bench.regimes
    sheet.put(
        "resolution", [r.roundings for r in regimes], ["layer"], "size of a probed change, in roundings", how=MEDIAN
    )
    label = "how far the loss bends over a probing step: even over odd part of its changes"
    sheet.put("curvature", [r.curvature for r in regimes], ["layer"], label, how="ratio of RMS over examples")
    label = "length of a probing step"
    sheet.put("epsilon", [r.step for r in regimes], ["layer"], label, asked=bench.settings.epsilon)


def _pooled_error(approximate: Tensor, exact: Tensor) -> float:
    scale = exact.abs().max() if exact.numel() else exact.sum()
    if not bool(scale > 0):
        return NAN
    return float(
        torch.linalg.vector_norm((approximate.double() - exact) / scale) / torch.linalg.vector_norm(exact / scale)
    )


def measure_stability(bench: Bench, sheet: Sheet) -> None:
    """Whether disjoint batches agree on the direction of the reference."""
    g = bench.reference[bench.depth // 2][bench.finite]
    size = min(bench.settings.published_batch, max(1, len(g) // 8))
    count = len(g) // size
    value = float(cross_batch_stability(g[: count * size].reshape(count, size, *g.shape[1:]))) if count >= 2 else NAN
    sheet.put(
        "stability",
        value,
        [],
        "cross-batch stability of the reference at state L/2",
        n=count,
        how="mean pairwise cosine of batch means",
        batch=size,
        missing="" if count >= 2 else "fewer than two batches",
    )


def measure_rank(bench: Bench, sheet: Sheet) -> None:
    """Effective rank of the states."""
    enough = int(bench.finite.sum()) >= 2
    ranks = [float(effective_rank(h[bench.finite])) if enough else NAN for h in bench.exact.states]
    sheet.put(
        "effective_rank",
        ranks,
        ["layer"],
        "effective rank of the states",
        n=int(bench.finite.sum()),
        how="exp of spectral entropy",
        missing="" if enough else "fewer than two examples",
    )


# --- one credit -------------------------------------------------------------------------------------------------------


def pairs(bench: Bench, claim: Claim) -> list[tuple[Tensor, Tensor] | None]:
    """Return (a_l, g_l) for each state, None where no credit is given."""
    both = zip(claim.credits, bench.reference, strict=True)
    return [None if a is None else (a, g) for a, g in both]


def _by_layer(bench: Bench, claim: Claim, metric: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a metric per state and example, (L+1, B), NaN where no credit is given."""
    unknown = torch.full((len(bench.finite),), NAN, dtype=torch.float64, device=bench.finite.device)
    return torch.stack([unknown if pair is None else metric(*pair) for pair in pairs(bench, claim)])


Metric = Callable[[Tensor, Tensor], Tensor]


def alignment_metrics(batch: int) -> list[tuple[str, Metric, str, dict[str, Any]]]:
    """Return what is averaged over examples: name, function of (a, g), label, and what more is to be said."""
    printed = {"batch": batch}
    return [
        ("cosine", cosine, "cosine of credit and reference, never clamped", {}),
        ("sign_agreement", sign_agreement, "share of features where the signs agree", {}),
        ("norm_ratio", norm_ratio, "‖a_l‖ / ‖g_l‖", {}),
        (
            "cosine_clamped",
            lambda a, g: cosine_clamped(a, g, batch=batch).double(),
            "cosine as papers print it: torch's clamp, on the reference of the mean-reduced loss",
            printed,
        ),
        (
            "clamped_share",
            lambda a, g: is_clamped(a, g, batch=batch).double(),
            "share of examples that the clamp touches",
            printed,
        ),
    ]


def pooled_cosine(a: Tensor, g: Tensor) -> Tensor:
    """Return Σ⟨a,g⟩/√(Σ‖a‖²Σ‖g‖²), as it is measured."""
    return pooled_ratio(pooled_terms(a, g).nanmean(0))


def measure_alignment(bench: Bench, claim: Claim, sheet: Sheet, resampling: Resampling) -> None:
    """Cosine, the clamped cosine that papers print, norm ratio, sign agreement, pooled cosine."""
    missing = NO_CREDIT if any(a is None for a in claim.credits) else NO_DIRECTION
    for name, metric, label, more in alignment_metrics(bench.settings.published_batch):
        found = resampling.mean(_by_layer(bench, claim, metric))
        put_estimate(sheet, name, found, ["layer"], label, how=MEAN, missing=missing, **more)
    sizes = resampling.median(_by_layer(bench, claim, lambda a, g: norm(a)))
    put_estimate(
        sheet, "credit_norm", sizes, ["layer"], "‖a_l‖, per example, of the summed loss", how=MEDIAN, missing=missing
    )
    unknown = torch.full((len(bench.finite), 3), NAN, dtype=torch.float64, device=bench.finite.device)
    terms = torch.stack([unknown if pair is None else pooled_terms(*pair) for pair in pairs(bench, claim)])
    label = "pooled cosine Σ⟨a,g⟩/√(Σ‖a‖²Σ‖g‖²), the limit of ρ"
    found = resampling.pooled(terms, pooled_ratio)
    put_estimate(sheet, "rho_limit", found, ["layer"], label, how="pooled over examples", missing=missing)


def measure_aggregates(claim: Claim, sheet: Sheet) -> None:
    """The mean cosine over the states that drive blocks, and whether one of them has it all."""
    values = torch.as_tensor(sheet.entries["cosine"].values)
    driving = claim.driven
    for name, states, label in (
        ("cosine_mean", driving, "mean cosine over the states that drive blocks"),
        ("cosine_deep", [l for l in driving if l >= 1], "mean cosine over the states l ≥ 1 that drive blocks"),
    ):
        value = mean(values[states]) if states else NAN
        sheet.put(name, value, [], label, n=len(states), how="mean over layers", states=states)
    given = values[driving]
    given = given[~given.isnan()]
    for name, metric, label, how in (
        ("best_share", best_share, "share of the best layer in the mean cosine", "max / Σ of the positive part"),
        (
            "participation",
            participation_ratio,
            "how many layers carry the mean cosine",
            "(Σc)²/Σc² of the positive part",
        ),
    ):
        value = float(metric(given)) if given.numel() > 1 else NAN
        missing = "no state, or one alone, has a positive cosine" if value != value else ""
        sheet.put(name, value, [], label, n=given.numel(), how=how, states=driving, missing=missing)


def measure_rho(bench: Bench, claim: Claim, sheet: Sheet, resampling: Resampling) -> None:
    """Perturbation correlation, where the probed changes are resolved."""
    place = [other.name for other in bench.subject.claims].index(claim.name)
    values, bounds, regimes = [], [], []
    for l, row in enumerate(bench.correlated):
        probed = None if row is None else row.claims[place]
        regimes.append(str(bench.regimes[l]))
        if probed is None or not bench.is_probed(l):
            values.append(NAN)
            bounds.append([NAN, NAN])
            continue
        values.append(probed.rho)
        found = resampling.pooled(_spread_out(probed.terms, bench.finite), pearson)
        bounds.append([float(found.low), float(found.high)])
    sheet.put(
        "rho",
        values,
        ["layer"],
        "ρ: correlation of predicted and true loss changes",
        n=int(bench.finite.sum()) * bench.settings.directions,
        how="Pearson over examples × directions",
        interval=bounds,
        missing="no credit, no spread, or what rho_regime says",
        directions=bench.settings.directions,
        probe=bench.settings.probe,
    )
    sheet.put("rho_regime", regimes, ["layer"], "whether the probed changes are resolved")


def _spread_out(terms: Tensor, finite: Tensor) -> Tensor:
    """Put the terms of the examples that are finite into their places; the others are NaN."""
    full = torch.full((len(finite), terms.shape[1]), NAN, dtype=terms.dtype, device=terms.device)
    full[finite] = terms
    return full


def measure_nudging(bench: Bench, claim: Claim, sheet: Sheet, resampling: Resampling) -> None:
    """True change of the loss after a step of η·a/RMS(a) down the credit, beside the same down the reference."""
    unknown = torch.full((len(bench.finite),), NAN, dtype=torch.float64, device=bench.finite.device)
    rows = [[unknown if c is None else c for c in row] for row in bench.nudges(claim.credits)]
    best = [[unknown if c is None else c for c in row] for row in bench.reference_nudges]
    own, reference = (torch.stack([torch.stack(row) for row in table]) for table in (rows, best))
    missing = NO_CREDIT if any(a is None for a in claim.credits) else NO_NUDGE
    label = "change of the loss after a step of η·a/RMS(a) down the credit"
    put_estimate(
        sheet,
        "nudging",
        resampling.mean(own),
        ["layer", "eta"],
        label,
        unit="nat",
        how=MEAN,
        missing=missing,
        probe=bench.settings.probe,
    )
    label = "nudging over that of an equal step down the reference"
    found = resampling.pooled(torch.stack([own, reference], dim=-1), ratio)
    put_estimate(
        sheet, "nudging_efficiency", found, ["layer", "eta"], label, how="ratio of means over examples", missing=missing
    )


def measure_null(bench: Bench, claim: Claim, sheet: Sheet) -> None:
    """Is the cosine better than that of the same rule without what it and the network have learned of each other?"""
    null, kind, examples = null_draws(bench, claim)
    values = torch.as_tensor(sheet.entries["cosine"].values)
    nan = torch.full((bench.settings.nulls,), NAN, dtype=torch.float64)
    drawn = torch.stack([nan if draws is None else draws.cpu() for draws in null])
    z = torch.stack([z_score(value, draws) for value, draws in zip(values, drawn, strict=True)])
    p = one_sided_p(z)
    inexact = [l for l in claim.driven if l not in claim.exact]
    best = one_sided_p(torch.stack([z_score(torch.ones(()), draws) for draws in drawn]))
    decidable = best <= ALPHA / max(1, len(inexact))
    judged = [l for l in inexact if bool(decidable[l])]
    better = torch.zeros(len(z), dtype=torch.bool)
    if judged:
        better[judged] = holm(p[judged], ALPHA)
    about: dict[str, Any] = {"null": kind, "draws": bench.settings.nulls}
    missing = NO_CREDIT if any(a is None for a in claim.credits) else NO_DIRECTION
    for name, found, label, how in (
        ("null_mean", drawn.mean(1), "mean cosine of the null", "mean over draws"),
        ("null_sd", drawn.std(1), "spread of the null's mean cosine", "sd over draws, ddof 1"),
        ("null_z", z, "z of the cosine against its null", "(cosine − null mean) / null sd"),
        ("null_p", p, "one-sided p of that z", "normal tail"),
    ):
        sheet.put(name, found, ["layer"], label, n=examples, how=how, missing=missing, **about)
    how = f"Holm over driving, inexact states, α = {ALPHA}"
    sheet.put("beats_null", better, ["layer"], "better than the null", how=how)
    label = "whether the exact credit would be better than this null: in few features none is"
    sheet.put("null_decidable", decidable, ["layer"], label, how=how)
    shuffled = [NAN if pair is None else _cosine_with_others(*pair) for pair in pairs(bench, claim)]
    label = "mean cosine with the credits of other examples"
    sheet.put(
        "shuffled_mean",
        shuffled,
        ["layer"],
        label,
        n=len(bench.finite),
        how="mean over all pairs of different examples",
        missing=missing,
    )


def _cosine_with_others(a: Tensor, g: Tensor) -> float:
    """Return what shuffled examples read in expectation, (Σᵢⱼ⟨âᵢ,ĝⱼ⟩ − Σᵢ⟨âᵢ,ĝᵢ⟩)/(n(n − 1)), without a draw."""
    x, y = unit(rows(a)), unit(rows(g))
    known = ~(x.isnan().any(1) | y.isnan().any(1))
    x, y = x[known], y[known]
    n = len(x)
    return float((x.sum(0) @ y.sum(0) - (x * y).sum()) / (n * (n - 1))) if n > 1 else NAN
