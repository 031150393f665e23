"""The null of a credit: the same signal without what the network and it have learned of each other.

It keeps the structure across examples, without which it would be far too narrow. A rule with feedback matrices gets
fresh ones; any other credit gets one random signed permutation or rotation of the features, shared by all examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from creditscope.auditing.bench import Bench
from creditscope.auditing.subject import Claim
from creditscope.calling import Inputs, gradients_of, map_inputs, undisturbed
from creditscope.evaluation import evaluating
from creditscope.metrics._rows import common_magnitude, rows, unit
from creditscope.metrics.nulls import null_cosines
from creditscope.rules._base import Learner, LocalRule, Rule, Site

FEW = 128  # examples for rules that need a whole pass a draw; the null's spread is that of the matrices


def null_draws(bench: Bench, claim: Claim) -> tuple[list[Tensor | None], str, int]:
    """Return draws of the mean cosine for each state (None: no credit), what kind of null it is, and its examples."""
    learner = claim.learner
    if learner is not None and learner.rule.has_feedback:
        rule = _formula_of(learner.rule)
        if rule is not None:
            return _fresh_matrices(bench, learner, rule), "fresh feedback matrices", len(bench.finite)
        return _fresh_passes(bench, learner), "fresh feedback matrices", min(FEW, len(bench.finite))
    draws: list[Tensor | None] = []
    for l, (a, g) in enumerate(zip(claim.credits, bench.reference, strict=True)):
        if a is None:
            draws.append(None)
            continue
        draws.append(null_cosines(a.double(), g, bench.settings.nulls, bench.generator("null", l)))
    return draws, "one random change of features for all examples", len(bench.finite)


def _formula_of(rule: Rule) -> LocalRule | None:
    """Return the local rule whose formula makes the credit, also inside a wrapper; None where a pass does."""
    inner = getattr(rule, "inner", None)
    if isinstance(inner, Rule):
        return _formula_of(inner)
    return rule if isinstance(rule, LocalRule) and getattr(rule, "level", "block") == "block" else None


def _units(reference: list[Tensor]) -> list[Tensor]:
    return [unit(rows(g)) for g in reference]


def _mean_cosines(credits: Sequence[Tensor], units: list[Tensor]) -> Tensor:
    """Return the mean cosine at each state; the units of the reference are shared by all draws."""
    return torch.stack([_mean_cosine(rows(a), u) for a, u in zip(credits, units, strict=True)])


def _mean_cosine(a: Tensor, u: Tensor) -> Tensor:
    a = a / common_magnitude(a)
    return (torch.linalg.vecdot(a, u) / torch.linalg.vector_norm(a, dim=1)).nanmean()


@contextmanager
def _shown(site: Site, x: Inputs) -> Iterator[None]:
    """Let a rule that builds its pathway see an input, as at its first call."""
    before, site.example = site.example, x
    try:
        yield
    finally:
        site.example = before


def _fresh_matrices(bench: Bench, learner: Learner, rule: LocalRule) -> list[Tensor | None]:
    """One forward pass, and the formula again for every set of matrices."""
    site, units = learner.site, _units(bench.reference)
    draws = []
    with (
        evaluating(learner.network),
        undisturbed(learner.network),
        site.cut.tape(bench.x, bench.y, leaf=rule.needs_terminal_gradient) as tape,
        torch.no_grad(),
        _shown(site, bench.x),
    ):
        for k in range(bench.settings.nulls):
            pathway = rule.build(site, bench.generator("null", k), None)
            draws.append(_mean_cosines(rule.credit(site, pathway, tape), units))
    return list(torch.stack(draws).T)


def _fresh_passes(bench: Bench, learner: Learner) -> list[Tensor | None]:
    """A pass of a few examples for every set of matrices."""
    site, few = learner.site, min(FEW, len(bench.finite))
    x, y = (map_inputs(part, lambda t: t[:few] if t.ndim else t) for part in (bench.x, bench.y))
    units = _units([g[:few] for g in bench.reference])
    draws = []
    parameters = list(learner.network.parameters())
    with (
        evaluating(learner.network),
        undisturbed(learner.network),
        gradients_of(parameters, True),
        _shown(site, x),
    ):
        for k in range(bench.settings.nulls):
            pathway = learner.rule.build(site, bench.generator("null", k), None)
            draws.append(_mean_cosines(learner.rule.credits(site, pathway, x, y), units))
    return list(torch.stack(draws).T)
