"""Rows become a labelled Dataset in which every NaN has its reason."""

from __future__ import annotations

import numpy as np
import pytest

from creditscope.history import as_dataset

EXAMPLES = {"train": 44, "test": 20, "val": 7}
ROWS = [
    {
        "epoch": 0,
        "test_loss": 2.0,
        "test_acc": 0.1,
        "state_norm": [1.0, 2.0],
        "reference_norm": [3.0, 4.0],
        "seconds": 1.0,
    },
    {"epoch": 1, "lr": 0.1, "train_loss": 1.5, "train_acc": 0.4, "state_error": 5.0, "seconds": 2.0},
    {
        "epoch": 2,
        "lr": 0.05,
        "train_loss": 1.0,
        "train_acc": 0.6,
        "test_loss": 1.1,
        "test_acc": 0.5,
        "state_norm": [5.0, 6.0],
        "reference_norm": [7.0, 8.0],
        "seconds": 2.0,
    },
]


@pytest.fixture
def history():
    return as_dataset(ROWS, probe=16, examples=EXAMPLES)


def test_dims_and_coordinates(history):
    assert history.epoch.values.tolist() == [0, 1, 2]
    assert history.layer.values.tolist() == [0, 1]
    assert all(v.dims in (("epoch",), ("epoch", "layer")) for v in history.values())
    assert history.state_norm.dims == history.reference_norm.dims == ("epoch", "layer")
    assert all(v.dtype == np.float64 for v in history.values())


def test_values_and_gaps(history):
    assert history.test_loss.values.tolist()[::2] == [2.0, 1.1]
    assert np.isnan(history.test_loss.values[1])
    assert history.state_norm.values[2].tolist() == [5.0, 6.0]
    assert np.isnan(history.state_norm.values[1]).all()
    assert np.isnan(history.train_loss.values[0])


def test_every_variable_says_what_it_is_and_every_gap_why(history):
    for name, variable in history.items():
        assert variable.attrs["long_name"], name
        assert variable.attrs["units"], name
        assert variable.attrs["reduction"], name
        assert ("why_nan" in variable.attrs) == bool(np.isnan(variable).any()), name


def test_sizes(history):
    assert history.train_loss.attrs["n"] == 44
    assert history.test_acc.attrs["n"] == 20
    assert history.state_norm.attrs["n"] == 16
    assert "n" not in history.lr.attrs
    assert "summed loss" in history.reference_norm.attrs["reduction"]
    assert "median" in history.reference_norm.attrs["reduction"]


def test_what_a_rule_names_comes_behind_ours(history):
    assert [*history.data_vars][:-3] == ["train_loss", "train_acc", "test_loss", "test_acc", "lr", "seconds"]
    assert history.state_error.attrs["long_name"] == "state error"


def test_no_variable_is_made_up():
    assert "val_loss" not in as_dataset(ROWS, probe=16, examples=EXAMPLES)


def test_no_rows():
    empty = as_dataset([], probe=16, examples=EXAMPLES)
    assert empty.sizes["epoch"] == 0
    assert not empty.data_vars
