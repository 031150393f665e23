"""The history of a run: one row an epoch, epoch 0 being the initialisation, as a labelled Dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

NAN = float("nan")


class _Variable(NamedTuple):
    label: str
    units: str
    reduction: str
    why_nan: str


_Labelled = tuple[Any, np.ndarray, dict[str, Any]]
"""Dimensions, values and attributes."""

_NOTHING_TRAINED = "nothing is trained in epoch 0, the initialisation"
_NOT_EVALUATED = "not every epoch was evaluated"
_NO_CLASSES = "nothing to count: the outputs are no scores of classes"

_SCALARS: dict[str, _Variable] = {
    "train_loss": _Variable(
        "training loss", "nat", "mean over the epoch's examples, each before its step", _NOTHING_TRAINED
    ),
    "train_acc": _Variable(
        "training accuracy",
        "1",
        "share of the epoch's examples, each before its step",
        f"{_NOTHING_TRAINED}, or {_NO_CLASSES}",
    ),
    "test_loss": _Variable("test loss", "nat", "mean over the test split", _NOT_EVALUATED),
    "test_acc": _Variable("test accuracy", "1", "share of the test split", f"{_NOT_EVALUATED}, or {_NO_CLASSES}"),
    "val_loss": _Variable("validation loss", "nat", "mean over the validation split", _NOT_EVALUATED),
    "val_acc": _Variable(
        "validation accuracy", "1", "share of the validation split", f"{_NOT_EVALUATED}, or {_NO_CLASSES}"
    ),
    "lr": _Variable("learning rate of the epoch", "1", "none", _NOTHING_TRAINED),
    "seconds": _Variable("seconds spent in the epoch, with its evaluation", "s", "sum", ""),
}
_LAYERED: dict[str, str] = {
    "state_norm": "norm of the state h_l",
    "reference_norm": "norm of the exact credit g_l of the summed loss",
}
_OVER_EXAMPLES = "lower median over the first test examples, per example, of the summed loss"


def as_dataset(rows: Sequence[Mapping[str, Any]], *, probe: int, examples: Mapping[str, int]) -> xr.Dataset:
    """Turn the rows of a run into a Dataset; what a row does not have is NaN, and ``why_nan`` says why.

    A row holds the epoch, scalars by name, and lists over layers. ``probe`` is the number of test examples behind the
    norms, ``examples`` the size of each split: "train", "test" and perhaps "val".
    """
    import xarray as xr  # a third of a second, for who only imports what trains

    epochs = [int(row["epoch"]) for row in rows]
    data = xr.Dataset(coords={"epoch": ("epoch", epochs, {"long_name": "epochs of training done"})})
    for name in _names(rows):
        data[name] = _scalar(name, rows, examples)
    layers = next((len(row["state_norm"]) for row in rows if "state_norm" in row), 0)
    if not layers:
        return data
    for name in _LAYERED:
        data[name] = _layered(name, rows, layers, probe)
    return data.assign_coords(layer=("layer", np.arange(layers), {"long_name": "state h_l, l = 0..L"}))


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the scalars of the rows: ours in their order, then what a rule names."""
    there = {name for row in rows for name in row} - {*_LAYERED, "epoch"}
    return [*(name for name in _SCALARS if name in there), *sorted(there - {*_SCALARS})]


def _scalar(name: str, rows: Sequence[Mapping[str, Any]], examples: Mapping[str, int]) -> _Labelled:
    of_rule = _Variable(name.replace("_", " "), "1", "mean over the epoch's examples", "the rule did not measure it")
    known = _SCALARS.get(name, of_rule)
    values = np.array([row.get(name, NAN) for row in rows], dtype=np.float64)
    attributes: dict[str, Any] = {"long_name": known.label, "units": known.units, "reduction": known.reduction}
    split = name.partition("_")[0]
    if name in _SCALARS and split in examples:
        attributes["n"] = examples[split]
    if np.isnan(values).any():
        attributes["why_nan"] = known.why_nan
    return "epoch", values, attributes


def _layered(name: str, rows: Sequence[Mapping[str, Any]], layers: int, probe: int) -> _Labelled:
    values = np.array([row.get(name, [NAN] * layers) for row in rows], dtype=np.float64)
    attributes = {"long_name": _LAYERED[name], "units": "1", "n": probe, "reduction": _OVER_EXAMPLES}
    if np.isnan(values).any():
        attributes["why_nan"] = _NOT_EVALUATED
    return ("epoch", "layer"), values, attributes
