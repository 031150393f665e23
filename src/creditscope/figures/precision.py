"""The precision certificate by state: what the network's own precision loses of the exact gradient."""

from __future__ import annotations

import xarray as xr
from matplotlib.figure import Figure

from creditscope.figures._style import GREY, dress, state_ticks

_LINES = {
    "precision_error": ("backprop through the network", "#0072B2", "o"),
    "training_error": ("the loss's own rounding included", "#E69F00", "s"),
}


def precision(data: xr.Dataset, *, limit: float | None = None) -> Figure:
    """Draw ``precision_error`` and ``training_error`` (layer) of an audit, and the limit that it is judged by."""
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, (label, colour, marker) in _LINES.items():
        if name in data:
            axes.plot(data["layer"], data[name], color=colour, marker=marker, label=label)
    if limit is not None:
        axes.axhline(limit, color=GREY, linestyle="--", linewidth=1.2, label=f"limit {limit:g}")
    axes.set_yscale("log")
    dress(axes, x="state $l$", y="relative error against float64")
    state_ticks(axes, data.sizes["layer"])
    axes.legend(frameon=False, fontsize="small")
    n = data["precision_error"].attrs.get("n", data.attrs["n"])
    figure.supxlabel(f"pooled over {n} examples", fontsize="small", color=GREY)
    return figure
