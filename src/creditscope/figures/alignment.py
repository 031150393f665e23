"""The cosine of a credit with the exact gradient, by state, beside its null."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from creditscope.figures._style import GREY, Style, by_credit, credit_styles, dress, state_ticks

_COLUMNS = 3
_WIDE = 3.0
"""Spreads of the null that its band shows, to each side."""


def alignment(data: xr.Dataset) -> Figure:
    """Draw ``cosine`` (layer) of an audit with its interval, a panel a credit, beside the null and the clamped cosine.

    Filled markers drive a trained block; a ring is a credit that is exact by construction.
    """
    parts = by_credit(data)
    columns = min(_COLUMNS, len(parts))
    lines = -(-len(parts) // columns)
    figure = Figure(figsize=(3.0 * columns + 1.9, 3.0 * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(parts) :]:
        axes.set_visible(False)
    styles = credit_styles(parts)
    for number, (axes, (name, own)) in enumerate(zip(panels.flat, parts.items(), strict=False)):
        _panel(axes, own, styles[name])
        dress(
            axes,
            x="state $l$",
            y="cosine with the exact gradient" if number % columns == 0 else "",
            title=styles[name].label,
        )
        state_ticks(axes, data.sizes["layer"])
    _legend(figure)
    figure.supxlabel(_note(data), fontsize="small", color=GREY)
    return figure


def _panel(axes: Axes, data: xr.Dataset, style: Style) -> None:
    layers = data["layer"].to_numpy()
    axes.axhline(0, color=GREY, linewidth=0.8)
    if "null_mean" in data:
        mean, sd = data["null_mean"].to_numpy(), data["null_sd"].to_numpy()
        axes.fill_between(
            layers,
            mean - _WIDE * sd,
            mean + _WIDE * sd,
            color=GREY,
            alpha=0.25,
            linewidth=0,
            label=f"null ± {_WIDE:g} sd",
        )
    values = data["cosine"].to_numpy()
    bounds = data["cosine_interval"].to_numpy() if "cosine_interval" in data else None
    axes.plot(layers, values, color=style.colour, linewidth=1.2)
    driving = np.isin(layers, np.atleast_1d(data.attrs.get("driven", layers)))
    for chosen, face, label in ((driving, style.colour, "drives a block"), (~driving, "white", "drives none")):
        if chosen.any():
            axes.errorbar(
                layers[chosen],
                values[chosen],
                yerr=None if bounds is None else np.abs(bounds[chosen].T - values[chosen]),
                fmt=style.marker,
                color=style.colour,
                markerfacecolor=face,
                markersize=5.5,
                capsize=2.5,
                linewidth=1.2,
                label=label,
            )
    if "exact" in data and data["exact"].to_numpy().astype(bool).any():
        exact = data["exact"].to_numpy().astype(bool)
        ring = {
            "marker": "o",
            "markersize": 12,
            "markerfacecolor": "none",
            "markeredgecolor": GREY,
            "linestyle": "none",
        }
        axes.plot(layers[exact], values[exact], label="exact by construction", **ring)
    axes.plot(
        layers,
        data["cosine_clamped"].to_numpy(),
        "x",
        color="black",
        markersize=5,
        zorder=5,
        label="as papers print it",
    )


def _legend(figure: Figure) -> None:
    handles: dict[str, Any] = {}
    for other in figure.axes:
        for handle, label in zip(*other.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend([*handles.values()], [*handles], loc="outside right upper", frameon=False, fontsize="small")


def _note(data: xr.Dataset) -> str:
    batch = data["cosine_clamped"].attrs.get("batch")
    return f"mean over {data.attrs['n']} examples with its 95 % interval\nas papers print it: clamped, B = {batch}"
