"""Histories of several runs, made up."""

from __future__ import annotations

import numpy as np
import xarray as xr

RULES = ["bp", "fa", "dfa", "frozen-bp", "frozen-fa", "frozen-dfa", "shallow"]


def histories(seeds: int = 3, epochs: int = 10, layers: int = 3) -> xr.Dataset:
    rng = np.random.default_rng(0)
    shape = (len(RULES), seeds, epochs + 1)
    accuracies = 1 - 0.9 * np.exp(-np.arange(epochs + 1) / 3) - rng.uniform(0, 0.05, shape)
    norms = np.exp(rng.normal(size=(*shape, layers)))
    attributes = {"long_name": "norm", "n": 360}
    return xr.Dataset(
        {
            "test_acc": (("rule", "seed", "epoch"), accuracies, {"n": 360}),
            "state_norm": (("rule", "seed", "epoch", "layer"), norms, attributes),
            "reference_norm": (("rule", "seed", "epoch", "layer"), 1 / norms, attributes),
        },
        {"rule": RULES, "seed": [42, 123, 456][:seeds], "epoch": np.arange(epochs + 1), "layer": np.arange(layers)},
    )
