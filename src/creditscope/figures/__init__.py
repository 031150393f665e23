"""Figures: functions of a labelled Dataset, each of which returns a matplotlib Figure. Nothing here loads torch."""

from __future__ import annotations

from creditscope.figures.accuracy import accuracy
from creditscope.figures.norms import norms

__all__ = ["accuracy", "norms"]
