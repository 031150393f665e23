"""Published protocols as versioned objects: what they say of an audit's numbers. Our own verdict never asks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr


@dataclass(frozen=True)
class Finding:
    """One diagnostic of a protocol: its figure, its threshold, and whether it fires; None where it cannot be had."""

    name: str
    figure: float
    threshold: float
    fires: bool | None
    what: str


@dataclass(frozen=True)
class Judgement:
    """What a protocol says."""

    protocol: str
    verdict: str
    findings: tuple[Finding, ...]
    aggregates: Mapping[str, float]

    def __str__(self) -> str:
        rows = [f"{self.protocol}: {self.verdict}"]
        for f in self.findings:
            state = "not measured" if f.fires is None else "fires" if f.fires else "passes"
            rows.append(f"  {f.name} {state}: {f.what} = {f.figure:.4g} (threshold {f.threshold:g})")
        return "\n".join(rows + [f"  {name} = {value:.4g}" for name, value in self.aggregates.items()])


@dataclass(frozen=True)
class Protocol:
    """The source study's protocol in one of its two versions (arXiv 2606.21126; source notes, sections 4.1 and 4.2).

    All figures are the published ones: ‖g‖ of the loss averaged over a batch of ``batch`` in the network's own
    precision, the clamped cosine, and the mean cosine over the states 0..L−1.
    """

    name: str
    growth: float = 50.0
    floor: float = 1e-7
    stability: float | None = None
    margin: float = 0.02
    batch: int = 128
    labels: tuple[str, str, str, str] = ("a", "b", "c", "d")

    def judge(self, data: xr.Dataset) -> Judgement:
        """Return what the protocol says of one credit's Dataset."""
        findings = [
            _above(
                self.labels[0],
                "largest growth of the median state norm over a block",
                _number(data, "max_growth"),
                self.growth,
            ),
            _below(
                self.labels[1],
                f"‖g_L‖ of the mean-reduced loss, B = {self.batch}",
                self._floor_figure(data),
                self.floor,
            ),
        ]
        if self.stability is not None:
            label = "cross-batch stability at L/2 (a label of the mode, no detector)"
            findings.append(_above(self.labels[2], label, _number(data, "stability"), self.stability))
        margin = float(data.attrs.get("margin", "nan"))
        findings.append(
            _below(self.labels[3], "accuracy over the best frozen or shallow baseline", margin, self.margin)
        )
        fired = [f.name for f in findings if f.fires]
        return Judgement(self.name, self._verdict(fired), tuple(findings), self._aggregates(data))

    def _floor_figure(self, data: xr.Dataset) -> float:
        if "published_reference_norm" not in data:
            return float("nan")
        published = data["published_reference_norm"]
        return float(published.values[-1]) * published.attrs["batch"] / self.batch

    def _verdict(self, fired: list[str]) -> str:
        if self.stability is not None:
            return "needs walk-back" if fired else "trustworthy"
        return f"FAIL({'+'.join(fired)})" if fired else "PASS"

    def _aggregates(self, data: xr.Dataset) -> dict[str, float]:
        """Γ over the states 0..L−1, and "deep" over 1..L−1, of the clamped cosine."""
        if "cosine_clamped" not in data:
            return {}
        values = data["cosine_clamped"].values
        deep = values[1:-1]
        return {
            "aggregate Γ over states 0..L−1": float(np.mean(values[:-1])),
            "deep Γ over states 1..L−1": float(np.mean(deep)) if deep.size else float("nan"),
        }


def _number(data: xr.Dataset, name: str) -> float:
    return float(data[name]) if name in data else float("nan")


def _above(name: str, what: str, figure: float, threshold: float) -> Finding:
    return Finding(name, figure, threshold, None if figure != figure else figure > threshold, what)


def _below(name: str, what: str, figure: float, threshold: float) -> Finding:
    return Finding(name, figure, threshold, None if figure != figure else figure < threshold, what)


april = Protocol("source study, April 2026 (a to d)", stability=0.30)
"""Four diagnostics; any that fires means "needs walk-back"."""

released = Protocol("source study, released (D1 to D3)", labels=("D1", "D2", "", "D3"))
"""Three diagnostics; PASS or FAIL(D1+D2)."""
