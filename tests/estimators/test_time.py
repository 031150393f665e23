"""The time embedding."""

from __future__ import annotations

import pytest
import torch

from creditscope.estimators import sinusoidal
from tests.estimators.by_hand import embedded
from tests.oracles import assert_close


@pytest.mark.parametrize("size", [2, 4, 32])
def test_the_formula(size):
    t = torch.arange(5, dtype=torch.float64) / 4
    assert_close(sinusoidal(t, size), [embedded(l, 4, size) for l in range(5)], 1e-12)


def test_leading_axes_and_precision_are_kept():
    assert sinusoidal(torch.zeros(3, 1), 8).shape == (3, 1, 8)
    t = torch.tensor([0.25, 0.5])  # exact in float32, and the angles are taken in float64
    assert sinusoidal(t, 8).dtype == torch.float32
    assert_close([sinusoidal(t, 8)], [sinusoidal(t.double(), 8).float()], 0.0)


@pytest.mark.parametrize("depth", [1, 4, 12, 100])
def test_layers_can_be_told_apart(depth):
    rows = sinusoidal(torch.arange(depth + 1, dtype=torch.float64) / depth, 32)
    distances = torch.cdist(rows, rows) + 10 * torch.eye(depth + 1)
    assert float(distances.min()) > 0.5
