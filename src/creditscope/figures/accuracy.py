"""Test accuracy by epoch, each rule beside its baselines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from creditscope.figures._style import GREY, Style, draw, dress, spread_note, style_of


def accuracy(data: xr.Dataset, rules: Sequence[str] = ("bp", "fa", "dfa")) -> Figure:
    """Draw ``test_acc`` (rule, seed, epoch): a panel a rule, with its baselines ``frozen-RULE`` and ``shallow``.

    The axis begins where all curves have passed a fifth of the training, since they all begin at chance.
    """
    figure = Figure(figsize=(3.1 * len(rules) + 0.4, 3.3), layout="constrained")
    panels = figure.subplots(1, len(rules), sharey=True, squeeze=False)[0]
    known = set(data["rule"].to_numpy())
    for axes, rule in zip(panels, rules, strict=True):
        style = style_of(rule)
        draw(axes, data["test_acc"].sel(rule=rule), style)
        for name, baseline, dashes in _baselines(rule, style):
            if name in known:
                draw(axes, data["test_acc"].sel(rule=name), baseline, dashes=dashes)
        dress(axes, x="epoch", y="test accuracy" if axes is panels[0] else "", title=style.label)
        axes.legend(loc="lower right", frameon=False, fontsize="small")
    panels[0].set_ylim(*_range(data["test_acc"]))
    figure.supxlabel(spread_note(data), fontsize="small", color=GREY)
    return figure


def _baselines(rule: str, style: Style) -> list[tuple[str, Style, str]]:
    frozen = Style(f"{style.label}, blocks frozen", style.colour, "none")
    return [(f"frozen-{rule}", frozen, "--"), ("shallow", Style("no blocks", GREY, "none"), ":")]


def _range(accuracies: xr.DataArray) -> tuple[float, float]:
    """Return the accuracy, to a tenth, that all curves have after a fifth of the training, and a bit over the best."""
    passed = accuracies.isel(epoch=accuracies.sizes["epoch"] // 5)
    low = np.floor(10 * passed.min().item()) / 10
    return low, min(1.0, accuracies.max().item() + 0.05 * (1 - low))
