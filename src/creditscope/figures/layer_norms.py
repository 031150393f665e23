"""Norms by state: of the state itself, of the exact gradient, and of each credit."""

from __future__ import annotations

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from creditscope.figures._style import GREY, Style, by_credit, credit_styles, dress, state_ticks


def layer_norms(data: xr.Dataset) -> Figure:
    """Draw ``state_norm`` (layer) and ``reference_norm`` beside ``credit_norm`` of an audit, on logarithmic axes."""
    figure = Figure(figsize=(8.6, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    _norms(left, data, "state_norm", Style("state", GREY, "o"))
    _norms(right, data, "reference_norm", Style("exact gradient", GREY, "o"))
    parts = by_credit(data)
    for own, style in zip(parts.values(), credit_styles(parts).values(), strict=True):
        if "credit_norm" in own:
            right.plot(
                own["layer"],
                own["credit_norm"],
                color=style.colour,
                marker=style.marker,
                label=f"credit, {style.label}",
            )
    for axes, label in ((left, r"$\Vert h_l \Vert$"), (right, r"$\Vert g_l \Vert$, $\Vert a_l \Vert$")):
        _scale(axes)
        dress(axes, x="state $l$", y=label)
        state_ticks(axes, data.sizes["layer"])
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    note = f"median over {data.attrs['n']} examples, per example, of the summed loss; band: quartiles"
    figure.supxlabel(note, fontsize="small", color=GREY)
    return figure


def _norms(axes: Axes, data: xr.Dataset, name: str, style: Style) -> None:
    layers, values = data["layer"].to_numpy(), data[name].to_numpy()
    axes.plot(layers, values, color=style.colour, marker=style.marker, label=style.label)
    if f"{name}_quartiles" in data:
        low, _, high = data[f"{name}_quartiles"].transpose("quartile", "layer").to_numpy()
        axes.fill_between(layers, low, high, color=style.colour, alpha=0.2, linewidth=0)


def _scale(axes: Axes) -> None:
    """A logarithm, over a decade at least: a factor of 1.1 shall not look like an explosion."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / 10**0.5, middle * 10**0.5)
