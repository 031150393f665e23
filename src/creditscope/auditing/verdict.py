"""The verdict: which flags stand, with the figure, the threshold and its origin in a sentence each.

It is a function of the measured Dataset and the thresholds alone, so a loaded audit is judged as a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xarray as xr

from creditscope.auditing.thresholds import Thresholds

Status = Literal["passed", "flagged", "cannot judge"]
ORDER: tuple[Status, ...] = ("passed", "flagged", "cannot judge")
BLOCKING = ("reference-validity", "self-calibration", "too-few-examples")
"""Flags that make a verdict "cannot judge": the measurement itself does not stand."""


@dataclass(frozen=True)
class Verdict:
    """What can be said of one credit on one network."""

    status: Status
    flags: tuple[str, ...]
    reasons: Mapping[str, str]
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing stands against it."""
        return self.status == "passed"

    def __str__(self) -> str:
        lines = [self.status, *(f"  {key}: {self.reasons[key]}" for key in self.flags)]
        lines += [f"  not measured: {key}: {why}" for key, why in self.unmeasured.items()]
        return "\n".join([*lines, *(f"  hint: {hint}" for hint in self.hints)])


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst of several verdicts: cannot judge, then flagged, then passed."""
    return max(verdicts, key=lambda verdict: ORDER.index(verdict.status))


class Judge:
    """Reads one credit's figures and raises flags."""

    def __init__(self, data: xr.Dataset, thresholds: Thresholds):
        self.data, self.thresholds = data, thresholds
        self.reasons: dict[str, str] = {}
        self.unmeasured: dict[str, str] = {}

    def verdict(self) -> Verdict:
        """Return the verdict on this credit."""
        for check in (
            self._examples,
            self._reference,
            self._self_calibration,
            self._scale,
            self._null,
            self._collapse,
            self._coverage,
            self._depth,
        ):
            check()
        flags = tuple(self.reasons)
        blocked = any(flag in BLOCKING for flag in flags)
        status: Status = "cannot judge" if blocked else "flagged" if flags else "passed"
        hints = tuple(_strings(self.data, "hints"))
        return Verdict(status, flags, dict(self.reasons), dict(self.unmeasured), hints)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _values(self, name: str) -> np.ndarray | None:
        return self.data[name].values if name in self.data else None

    def _flag(self, key: str, sentence: str) -> None:
        if key in self.reasons:
            self.reasons[key] += "; " + sentence
        else:
            self.reasons[key] = sentence

    def _against(self, name: str) -> str:
        threshold = self.thresholds[name]
        return f"threshold {threshold.value:g}: {threshold.evidence}"

    @property
    def _driving(self) -> list[int]:
        """The states whose credit drives a block that is trained."""
        return [int(l) for l in np.atleast_1d(self.data.attrs.get("driven", []))]

    # --- flags -----------------------------------------------------------------------------------------------------

    def _examples(self) -> None:
        n = int(self.data.attrs["n"])
        if self.thresholds["examples"].crossed(n):
            self._flag("too-few-examples", f"{n} examples ({self._against('examples')})")
        if self.data.attrs.get("classes") == 1:
            self.unmeasured["classes"] = "the evaluation set holds one class alone: nothing is said of the others"

    def _reference(self) -> None:
        broken = int(self.data.attrs.get("not_finite", 0))
        if broken:
            first = self.data.attrs.get("first_not_finite")
            self._flag(
                "reference-validity",
                f"states or reference are not finite for {broken} of {self.data.attrs['n']} examples (first: {first})",
            )
        norms = self._values("reference_norm")
        if norms is not None and any(norms[l] == 0 for l in self._driving or range(len(norms))):
            where = [l for l in self._driving or range(len(norms)) if norms[l] == 0]
            self._flag("reference-validity", f"the reference is exactly zero for most examples at states {where}")
        errors = self._values("precision_error")
        if errors is None:
            self.unmeasured["reference-validity"] = "the precision certificate is part of the standard tier"
            return
        bad = [l for l, error in enumerate(errors) if self.thresholds["precision_error"].crossed(error)]
        if bad:
            self._flag(
                "reference-validity",
                f"in the network's own precision the gradient is off by {max(errors[l] for l in bad):.2g} of its norm "
                f"at states {bad} ({self._against('precision_error')})",
            )
        agreement = self._values("reference_rho")
        if agreement is None or bool(np.isnan(agreement).all()):
            self.unmeasured["reference-gradient"] = "no finite difference is above the resolution of the probe"
            return
        wrong = [l for l, value in enumerate(agreement) if self.thresholds["reference_rho"].crossed(value)]
        if wrong:
            self._flag(
                "reference-validity",
                f"autograd of this network is not its gradient: finite differences agree with it to ρ = "
                f"{min(agreement[l] for l in wrong):.2f} at states {wrong} ({self._against('reference_rho')}); give "
                "the true one with reference=fn, or audit a plain twin of the network",
            )

    def _self_calibration(self) -> None:
        failed = _strings(self.data, "failed_checks")
        if failed:
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            self._flag("self-calibration", f"a planted credit does not read as it must: {failed[0]}{more}")

    def _scale(self) -> None:
        growth = self._values("growth")
        if growth is None or growth.size == 0:
            return
        at = [l for l, value in enumerate(growth) if self.thresholds["block_growth"].crossed(value)]
        if at:
            worst_at = max(at, key=lambda l: growth[l])
            self._flag(
                "scale-stability",
                f"the state grows by {growth[worst_at]:.3g} over block {worst_at} ({self._against('block_growth')})",
            )

    @property
    def _exact(self) -> set[int]:
        """The states whose credit is exact by construction."""
        return {int(l) for l in np.flatnonzero(self.data["exact"].values)} if "exact" in self.data else set()

    def _standing(self, l: int) -> bool:
        """Tell whether a state's credit is better than its null, by enough to count; exact credit is."""
        better, cosines, means = (self.data[name].values for name in ("beats_null", "cosine", "null_mean"))
        return l in self._exact or bool(better[l] and not self.thresholds["null_effect"].crossed(cosines[l] - means[l]))

    def _null(self) -> None:
        cosines, means = self._values("cosine"), self._values("null_mean")
        if cosines is None:
            self.unmeasured["null-credit"] = "no credit was given, only updates"
            return
        if means is None:
            self.unmeasured["null-credit"] = "nulls are part of the standard tier"
            return
        if not self._driving:
            self.unmeasured["null-credit"] = "no block is trained"
            return
        inexact = [l for l in self._driving if l not in self._exact]
        directed = [l for l in inexact if cosines[l] == cosines[l]]
        judged = [l for l in directed if self.data["null_decidable"].values[l]]
        if inexact and not directed:
            self.unmeasured["null-credit"] = "no state that drives a block has a credit with a direction"
        elif inexact and not judged:
            self.unmeasured["null-credit"] = "in so few features even the exact credit would be no better than its null"
        elif inexact and not any(self._standing(l) for l in judged):
            best, effect = max(judged, key=lambda l: cosines[l] - means[l]), self.thresholds["null_effect"]
            self._flag(
                "null-credit",
                f"no state that drives a block has a better cosine than its null: the best is {cosines[best]:.3f} at "
                f"state {best}, null {means[best]:.3f} (Holm at 1e-3 and a difference of {effect.value:g}: "
                f"{effect.evidence})",
            )

    def _collapse(self) -> None:
        share, cosines = self._values("best_share"), self._values("cosine")
        if share is None or cosines is None:
            return
        driving = [l for l in self._driving if cosines[l] == cosines[l]]
        if len(driving) < 3:
            self.unmeasured["aggregation-collapse"] = "fewer than three states that drive blocks"
            return
        best = max(driving, key=lambda l: cosines[l])
        clear = cosines[best] > 5 * self.thresholds["null_effect"].value
        if "null_mean" in self.data:  # the share of noise in noise says nothing
            clear = clear and self._standing(best)
        if clear and self.thresholds["best_share"].crossed(float(share)):
            mean = float(np.mean([cosines[l] for l in driving]))
            self._flag(
                "aggregation-collapse",
                f"state {best} has {float(share):.0%} of the mean cosine {mean:.3f} over the states {driving} "
                f"({self._against('best_share')})",
            )

    def _coverage(self) -> None:
        if "coverage" not in self.data:
            self.unmeasured["coverage"] = "what trains each parameter is measured on a learner or with updates="
            return
        wrong = _strings(self.data, "uncovered")
        if wrong:
            shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            self._flag("coverage", f"not trained as claimed: {shown}")

    def _depth(self) -> None:
        attrs = self.data.attrs
        if "margin" not in attrs:
            self.unmeasured["depth-utility"] = "no accuracies and baselines were given"
            return
        if self.thresholds["accuracy_margin"].crossed(float(attrs["margin"])):
            self._flag(
                "depth-utility",
                f"accuracy {attrs['accuracy_mean']:.3f} against {attrs['baseline_mean']:.3f} of the best baseline "
                f"'{attrs['baseline']}': {float(attrs['margin']):+.3f}{attrs.get('margin_interval', '')} "
                f"({self._against('accuracy_margin')}); baselines: {attrs['baselines_listed']}",
            )


def _strings(data: xr.Dataset, name: str) -> list[str]:
    """Return a list of sentences kept as an attribute, one a line."""
    text = data.attrs.get(name, "")
    return [line for line in str(text).splitlines() if line]


def split_credits(data: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    """Yield the Dataset of each credit, with the attributes that are its own."""
    names = (
        [str(name) for name in data["credit"].values]
        if "credit" in data.dims
        else [str(data.attrs.get("credit", "credit"))]
    )
    for name in names:
        own = (data.sel(credit=name, drop=True) if "credit" in data.dims else data).copy()
        for holder in (own, *own.variables.values()):
            holder.attrs = _own_attributes(holder.attrs, name)
        yield name, own


def _own_attributes(attrs: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """Return the attributes that all credits share, and those of one, without its name."""
    own = {k.removesuffix(f"@{name}"): v for k, v in attrs.items() if str(k).endswith(f"@{name}")}
    return {k: v for k, v in attrs.items() if "@" not in str(k)} | own
