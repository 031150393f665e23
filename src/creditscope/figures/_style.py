"""The house style: one colour and one marker a rule, the same in every figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

GREY = "#6E6E6E"


@dataclass(frozen=True)
class Style:
    """How a rule is drawn and named."""

    label: str
    colour: str
    marker: str


STYLES = {
    "bp": Style("BP", "#0072B2", "o"),
    "fa": Style("FA", "#E69F00", "s"),
    "dfa": Style("DFA", "#C62828", "^"),
}


_OTHERS = [("#009E73", "D"), ("#CC79A7", "v"), ("#56B4E9", "P"), ("#D55E00", "X")]
"""Colours and markers of credits that have no style of their own, in their order."""


def style_of(rule: str) -> Style:
    """Return the style of a rule; one that has none of its own is drawn in grey, under its name."""
    return STYLES.get(rule, Style(rule, GREY, "D"))


def draw(axes: Axes, curves: xr.DataArray, style: Style, *, log: bool = False, dashes: str = "-") -> None:
    """Draw curves (seed, epoch) as their mean with a band of one standard deviation (ddof = 1; none for one seed).

    With ``log`` both are taken of the logarithm: the geometric mean, times and over the geometric deviation.
    """
    epochs, values = curves["epoch"].to_numpy(), curves.transpose("seed", "epoch").to_numpy()
    values, back = (np.log(values), np.exp) if log else (values, np.asarray)
    centre = values.mean(0)
    axes.plot(
        epochs,
        back(centre),
        color=style.colour,
        marker=style.marker,
        label=style.label,
        markersize=4.5,
        markevery=max(1, len(epochs) // 8),
        linestyle=dashes,
        linewidth=1.8 if dashes == "-" else 1.4,
    )
    if len(values) > 1:
        low, high = (back(centre + sign * values.std(0, ddof=1)) for sign in (-1, 1))
        axes.fill_between(epochs, low, high, color=style.colour, alpha=0.18, linewidth=0)


def dress(axes: Axes, *, x: str, y: str, title: str | None = None) -> None:
    """Label the axes and take away what says nothing."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def spread_note(data: xr.Dataset, *, geometric: bool = False) -> str:
    """Say what the line and the band are, and of how many seeds."""
    seeds, what = data.sizes["seed"], "geometric mean ×/÷ sd" if geometric else "mean ± sd"
    return f"{what} of {seeds} seeds" if seeds > 1 else "1 seed"


def credit_styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each credit: a rule's own, else the next of a few."""
    found: dict[str, Style] = {}
    for name in names:
        colour, marker = _OTHERS[(len(found.keys() - STYLES.keys())) % len(_OTHERS)]
        found[name] = STYLES.get(name, Style(name, colour, marker))
    return found


def by_credit(data: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the Dataset of each credit of an audit by its name, with the attributes that are its own."""
    if "credit" not in data.dims:
        names, parts = [str(data.attrs.get("credit", "credit"))], [data]
    else:
        names = [str(name) for name in data["credit"].to_numpy()]
        parts = [data.sel(credit=name) for name in names]
    return {name: part.assign_attrs(_own(data.attrs, name)) for name, part in zip(names, parts, strict=True)}


def _own(attrs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.removesuffix(f"@{name}"): value for key, value in attrs.items() if str(key).endswith(f"@{name}")}


def state_ticks(axes: Axes, layers: int) -> None:
    """Put ticks at whole states."""
    step = max(1, -(-layers // 12))
    axes.set_xticks(range(0, layers, step))
