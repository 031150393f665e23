"""The norms of the deepest state and of its exact credit, by epoch."""

from __future__ import annotations

from collections.abc import Sequence

import xarray as xr
from matplotlib.figure import Figure

from creditscope.figures._style import GREY, draw, dress, spread_note, style_of

_PANELS = {
    "state_norm": r"$\Vert h_L \Vert$, the last state",
    "reference_norm": r"$\Vert g_L \Vert$, its exact credit",
}


def norms(data: xr.Dataset, rules: Sequence[str] = ("bp", "fa", "dfa")) -> Figure:
    """Draw ``state_norm`` and ``reference_norm`` (rule, seed, epoch, layer) of the last layer, on logarithmic axes."""
    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for rule in rules:
            draw(axes, data[name].sel(rule=rule).isel(layer=-1), style_of(rule), log=True)
        axes.set_yscale("log")
        dress(axes, x="epoch", y=label)
        axes.legend(frameon=False, fontsize="small")
    note = f"median over {data['state_norm'].attrs['n']} test examples; {spread_note(data, geometric=True)}"
    figure.supxlabel(note, fontsize="small", color=GREY)
    return figure
