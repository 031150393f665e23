"""The history of a run: one row an epoch, epoch 0 being the initialisation, as a labelled Dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

NAN = float("nan")

_SCALARS: dict[str, tuple[str, str, str]] = {
    "train_loss": ("training loss", "nat", "mean over the epoch's examples, each before its step"),
    "train_acc": ("training accuracy", "1", "share of the epoch's examples, each before its step"),
    "test_loss": ("test loss", "nat", "mean over the test split"),
    "test_acc": ("test accuracy", "1", "share of the test split"),
    "val_loss": ("validation loss", "nat", "mean over the validation split"),
    "val_acc": ("validation accuracy", "1", "share of the validation split"),
    "lr": ("learning rate of the epoch", "1", "none"),
    "seconds": ("seconds spent in the epoch, with its evaluation", "s", "sum"),
}
_LAYERS: dict[str, str] = {
    "state_norm": "norm of the state h_l",
    "reference_norm": "norm of the exact credit g_l of the summed loss",
}


def as_dataset(rows: list[dict[str, Any]], *, probe: int, examples: dict[str, int]) -> xr.Dataset:
    """Turn the rows of a run into a Dataset; what a row does not have is NaN.

    A row holds the epoch, scalars by name, and lists over layers. ``probe`` is the number of test examples behind the
    norms, ``examples`` the size of each split.
    """
    epochs = [int(row["epoch"]) for row in rows]
    data = xr.Dataset(coords={"epoch": ("epoch", epochs, {"long_name": "epochs of training done"})})
    names = [name for name in _SCALARS if any(name in row for row in rows)]
    others = sorted({name for row in rows for name in row} - {*_SCALARS, *_LAYERS, "epoch"})
    for name in [*names, *others]:
        label, unit, reduction = _SCALARS.get(name, (name.replace("_", " "), "1", "mean over the epoch's examples"))
        values = np.array([row.get(name, NAN) for row in rows], dtype=np.float64)
        attributes = {"long_name": label, "units": unit, "reduction": reduction}
        if (split := name.partition("_")[0]) in examples and name in _SCALARS:
            attributes["n"] = examples[split]
        data[name] = ("epoch", values, attributes)
    layers = next((len(row["state_norm"]) for row in rows if "state_norm" in row), 0)
    for name, label in _LAYERS.items():
        if layers:
            values = np.array([row.get(name, [NAN] * layers) for row in rows], dtype=np.float64)
            data[name] = (
                ("epoch", "layer"),
                values,
                {
                    "long_name": label,
                    "units": "1",
                    "n": probe,
                    "reduction": "lower median over the first test examples, per example, of the summed loss",
                },
            )
    if layers:
        data = data.assign_coords(layer=("layer", np.arange(layers), {"long_name": "state h_l, l = 0..L"}))
    for name in ("train_loss", "train_acc"):
        if name in data:
            data[name].attrs["why_nan"] = "nothing is trained in epoch 0, the initialisation"
    return data
