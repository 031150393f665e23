"""Convention check: does a credit look mean-reduced, sign-flipped, reversed in its layers, or of the layer beside?

A hint is a sentence with the fix. It changes no number and no status.
"""

from __future__ import annotations

import torch

from creditscope.auditing.bench import Bench
from creditscope.auditing.measure import mean, pairs
from creditscope.auditing.sheet import Sheet
from creditscope.auditing.subject import Claim
from creditscope.metrics.alignment import cosine
from creditscope.metrics.scale import lower_median, norm

CLEAR = 0.1  # a cosine that is no accident of the network, in either direction
ALIKE = 0.9  # references of neighbouring states that no credit can tell apart


def find_hints(bench: Bench, claim: Claim, sheet: Sheet) -> list[str]:
    """Return the hints for one credit."""
    return [hint for hint in (_mean_reduced(bench, claim), _flipped(claim, sheet), _misplaced(bench, claim)) if hint]


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


def _flipped(claim: Claim, sheet: Sheet) -> str | None:
    values = torch.as_tensor(sheet.entries["cosine"].values)[claim.driven]
    values = values[torch.isfinite(values)]
    if values.numel() == 0 or bool((values > CLEAR).any()) or float(values.mean()) > -CLEAR:
        return None
    return (
        f"'{claim.name}' looks sign-flipped: its mean cosine is {float(values.mean()):.2f}; credits point along the "
        "gradient (descent is −a); if yours is the descent direction, pass convention=cs.Convention(sign=-1)"
    )


def _misplaced(bench: Bench, claim: Claim) -> str | None:
    """Compare each a_l with the references of the other states, where shapes allow."""
    reference, depth = bench.reference, bench.depth
    own, reversed_, shifted = [], [], {1: [], -1: []}
    for l, pair in enumerate(pairs(bench, claim)):
        if pair is None:
            continue
        a, g = pair
        own.append(mean(cosine(a, g)))
        mirror = reference[depth - l]
        reversed_.append(mean(cosine(a, mirror)) if mirror.shape == a.shape else 0.0)
        for offset, found in shifted.items():
            k = l + offset
            other = reference[k] if 0 <= k <= depth else None
            alike = other is None or other.shape != a.shape or mean(cosine(g, other)) >= ALIKE
            found.append((mean(cosine(a, other)), own[-1]) if not alike and other is not None else None)
    if depth >= 2 and _better(reversed_, own):
        return (
            f"'{claim.name}' looks reversed in its layers: it fits the states in the opposite order better "
            f"({_mean(reversed_):.2f} against {_mean(own):.2f}); credits[0] belongs to h_0, credits[-1] to h_L"
        )
    for offset, found in shifted.items():
        told = [both for both in found if both is not None]
        if told and _better([b for b, _ in told], [o for _, o in told]):
            return (
                f"'{claim.name}' looks shifted by one layer: credits[l] fits state l{offset:+d} better "
                f"({_mean([b for b, _ in told]):.2f} against {_mean([o for _, o in told]):.2f}); credits[l] belongs to "
                "the state that enters block l"
            )
    return None


def _mean(values: list[float]) -> float:
    known = [v for v in values if v == v]
    return sum(known) / len(known) if known else float("nan")


def _better(other: list[float], own: list[float]) -> bool:
    return _mean(other) > CLEAR and _mean(other) > _mean(own) + CLEAR
