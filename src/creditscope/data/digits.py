"""The digits that ship with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from creditscope.data._base import Arrays, Augment

FILE = Path(__file__).with_name("digits.npz")


@dataclass(frozen=True)
class Digits:
    """Optical recognition of handwritten digits (Alpaydin & Kaynak 1998), 1,797 images, 1x8x8, values 0..16.

    The fixed split, 1,437 to train on and 360 to test, has the classes in equal shares; source, licence and how the
    file was made stand in ``digits.md`` beside it. Mean and standard deviation are those of the training pixels; they
    are in units of 255, like those of the other images, though the values end at 16.
    """

    augment: Augment = "none"

    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.01916,)
    std: ClassVar[tuple[float, ...]] = (0.0236,)

    def locate(self, root: Path | None = None) -> Path:
        """Return the file in the package, whatever the root."""
        return FILE

    def read(self, place: Path) -> Arrays:
        """Read the file."""
        with np.load(place, allow_pickle=False) as file:
            return Arrays(*(file[name] for name in Arrays._fields))
