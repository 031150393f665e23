"""Convention check: does a credit look mean-reduced, sign-flipped, reversed in its layers, or of the layer beside?

A hint is a sentence with the fix. It changes no number and no status.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from creditscope.auditing.bench import Bench
from creditscope.auditing.measure import mean, pairs
from creditscope.auditing.sheet import Sheet
from creditscope.auditing.subject import Claim
from creditscope.metrics.alignment import cosine
from creditscope.metrics.nulls import null_cosines, z_score
from creditscope.metrics.scale import lower_median, norm

CLEAR = 0.1  # a cosine that is worth a word
ALIKE = 0.9  # references of neighbouring states that no credit can tell apart
APART = 6.0  # standard deviations from its null: a fixed random matrix in few features reads far from 0 by chance
DRAWS = 100


def find_hints(bench: Bench, claim: Claim, sheet: Sheet) -> list[str]:
    """Return the hints for one credit."""
    found = (_mean_reduced(bench, claim), _flipped(bench, claim, sheet), _misplaced(bench, claim))
    return [hint for hint in found if hint]


def _deviation(bench: Bench, a: Tensor, g: Tensor) -> float:
    """Return by how many standard deviations a mean cosine is off that of the same credit, turned at random."""
    drawn = null_cosines(a, g, DRAWS, bench.generator("hints"))
    return float(z_score(cosine(a, g).nanmean(), drawn))


def _mean_reduced(bench: Bench, claim: Claim) -> str | None:
    batch = len(bench.finite)
    given = [pair for pair in pairs(bench, claim) if pair is not None]
    ratios = torch.tensor([float(lower_median(norm(a)) / lower_median(norm(g))) for a, g in given])
    ratios = ratios[torch.isfinite(ratios) & (ratios > 0)]
    if batch < 16 or ratios.numel() == 0 or not bool(((ratios * batch > 0.2) & (ratios * batch < 5)).all()):
        return None
    return (
        f"'{claim.name}' looks mean-reduced: its norms are about 1/{batch} of the reference's at every state; if so, "
        "pass convention=cs.Convention(reduction='mean')"
    )


def _flipped(bench: Bench, claim: Claim, sheet: Sheet) -> str | None:
    values = {l: float(sheet.entries["cosine"].values[l]) for l in claim.driven}
    against = [l for l, value in values.items() if value < -CLEAR]
    if not against or _mean([*values.values()]) > -CLEAR or any(value > CLEAR for value in values.values()):
        return None
    both = [(claim.credits[l], bench.reference[l]) for l in against]
    if not all(a is not None and _deviation(bench, a, g) < -APART for a, g in both):
        return None
    return (
        f"'{claim.name}' looks sign-flipped: its mean cosine is {_mean([*values.values()]):.2f}; credits point along "
        "the gradient (descent is −a); if yours is the descent direction, pass convention=cs.Convention(sign=-1)"
    )


def _misplaced(bench: Bench, claim: Claim) -> str | None:
    """Compare each a_l with the references of the other states, where shapes allow."""
    depth = bench.depth
    if claim.driving != list(range(1, depth + 1)):  # a block that is driven by another state's credit aligns to that
        return None
    if depth >= 2 and _better(bench, claim, lambda l: depth - l):
        own, found = _fit(bench, claim, lambda l: depth - l)
        return (
            f"'{claim.name}' looks reversed in its layers: it fits the states in the opposite order better "
            f"({found:.2f} against {own:.2f}); credits[0] belongs to h_0, credits[-1] to h_L"
        )
    for offset in (1, -1):
        if _better(bench, claim, lambda l, offset=offset: l + offset):
            own, found = _fit(bench, claim, lambda l, offset=offset: l + offset)
            return (
                f"'{claim.name}' looks shifted by one layer: credits[l] fits state l{offset:+d} better ({found:.2f} "
                f"against {own:.2f}); credits[l] belongs to the state that enters block l"
            )
    return None


class _Told(NamedTuple):
    """A credit beside the reference of another state, which can be told from its own."""

    credit: Tensor
    reference: Tensor
    own: float
    other: float


def _told(bench: Bench, claim: Claim, place: Callable[[int], int]) -> list[_Told]:
    """Return the credits of the states whose reference can be told from that of the other place."""
    found = []
    for l, pair in enumerate(pairs(bench, claim)):
        k = place(l)
        if pair is None or not 0 <= k <= bench.depth or k == l:
            continue
        (a, g), other = pair, bench.reference[k]
        if other.shape == g.shape and bench.likeness(l, k) < ALIKE:
            found.append(_Told(a, other, mean(cosine(a, g)), mean(cosine(a, other))))
    return found


def _fit(bench: Bench, claim: Claim, place: Callable[[int], int]) -> tuple[float, float]:
    """Return the mean cosine at the states' own place and at the other one."""
    told = _told(bench, claim, place)
    return _mean([t.own for t in told]), _mean([t.other for t in told])


def _better(bench: Bench, claim: Claim, place: Callable[[int], int]) -> bool:
    """Tell whether the credit fits the other place clearly better, in the mean and beyond chance at some state."""
    own, other = _fit(bench, claim, place)
    if not (other > CLEAR and other > own + CLEAR):
        return False
    told = [t for t in _told(bench, claim, place) if t.other > t.own + CLEAR]
    return any(_deviation(bench, t.credit, t.reference) > APART for t in told)


def _mean(values: list[float]) -> float:
    known = [v for v in values if v == v]
    return sum(known) / len(known) if known else float("nan")
