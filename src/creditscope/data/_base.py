"""What a data set has to offer to be loaded by name: a dataclass of its options that finds and reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

Augment = Literal["none", "crop-flip"]


class Arrays(NamedTuple):
    """What a reader returns: images as uint8 (N, C, H, W) or features as float32 (N, F), and whole-number labels."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Source(Protocol):
    """A registered data set: a frozen dataclass whose fields are its options, each with a default.

    A field named ``seed`` gets the seed that ``load`` was given. Neither the module nor ``locate`` should import torch,
    so that the data sets can be listed without it.
    """

    @property
    def classes(self) -> int:
        """Number of classes; the labels are 0 .. classes - 1."""
        ...

    @property
    def mean(self) -> tuple[float, ...] | None:
        """Mean by channel, of pixels in 0..1; None leaves the inputs as they are."""
        ...

    @property
    def std(self) -> tuple[float, ...] | None:
        """Standard deviation by channel, of pixels in 0..1."""
        ...

    @property
    def augment(self) -> Augment:
        """What training does to the images."""
        ...

    def locate(self, root: Path | None = None) -> Path | None:
        """Return where the data lies under a root (None: the default places), or None where it is not there."""
        ...

    def read(self, place: Path) -> Arrays:
        """Read the data from where ``locate`` found it."""
        ...
