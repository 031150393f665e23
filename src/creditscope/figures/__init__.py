"""Figures: functions of a labelled Dataset, each of which returns a matplotlib Figure. Nothing here loads torch."""

from __future__ import annotations

from creditscope.figures.accuracy import accuracy
from creditscope.figures.alignment import alignment
from creditscope.figures.layer_norms import layer_norms
from creditscope.figures.norms import norms
from creditscope.figures.precision import precision

__all__ = ["accuracy", "alignment", "layer_norms", "norms", "precision"]
