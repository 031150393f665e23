"""Tables of results: texts in rows, for a terminal and for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import xarray as xr

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A heading, rows of texts, and a line that says what the numbers are."""

    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def accuracies(data: xr.Dataset, rules: Mapping[str, str]) -> Table:
    """Return the test accuracy of the last epoch by rule, beside ``frozen-RULE``, ``frozen-bp`` and ``shallow``.

    ``data`` holds ``test_acc`` (rule, seed, epoch); ``rules`` names the rules to show. The baselines of a rule are how
    far it comes if its blocks never learn, and how far the network comes without them.
    """
    final = data["test_acc"].isel(epoch=-1)
    known = set(data["rule"].to_numpy())
    rows = tuple(
        (label, *(_mean(final.sel(rule=name)) if name in known else MISSING for name in _compared(rule)))
        for rule, label in rules.items()
    )
    seeds = data.sizes["seed"]
    spread = f"mean ± sample standard deviation (ddof = 1) of {seeds} seeds" if seeds > 1 else "one seed"
    note = f"Test accuracy after epoch {int(data['epoch'][-1])}, {spread}; {data['test_acc'].attrs['n']} test examples."
    return Table(("rule", "accuracy", "frozen", "frozen by BP", "no blocks"), rows, note)


def _compared(rule: str) -> tuple[str, str, str, str]:
    return rule, f"frozen-{rule}", "frozen-bp", "shallow"


def _mean(values: xr.DataArray) -> str:
    """Return ``0.936 ± 0.004``; a run that has no value leaves none."""
    mean = float(values.mean(skipna=False))
    if math.isnan(mean):
        return MISSING
    return f"{mean:.3f}" + (f" ± {float(values.std(ddof=1)):.3f}" if values.size > 1 else "")
