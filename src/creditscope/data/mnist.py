"""MNIST and Fashion-MNIST: the reader of the idx format, plain or gzipped."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from creditscope.data import official
from creditscope.data._base import Arrays, Augment
from creditscope.errors import UsageError

UNSIGNED_BYTE = 0x08  # idx's code for the type of the entries


def read_idx(folder: Path, name: str, *, axes: int) -> np.ndarray:
    """Read an idx file of unsigned bytes: 0, 0, type, number of axes, the axes as big-endian uint32, the entries."""
    path, raw = official.contents(folder, name)
    header = 4 + 4 * axes
    if raw[:4] != bytes([0, 0, UNSIGNED_BYTE, axes]) or len(raw) < header:
        begins = raw[:4].hex(" ") or "nothing"
        raise UsageError(f"{path}: not an idx file of unsigned bytes with {axes} axes (it begins with {begins})")
    shape = struct.unpack(f">{axes}I", raw[4:header])
    if len(raw) != header + math.prod(shape):
        said = " x ".join(map(str, shape))
        raise UsageError(f"{path}: its header says {said} bytes, but {len(raw) - header} follow: truncated?")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


@dataclass(frozen=True)
class _IdxImages:
    augment: Augment = "none"

    key: ClassVar[str]
    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def locate(self, root: Path | None = None) -> Path | None:
        """Return the folder with the four files, or None."""
        place = official.locate(self.key, root)
        return place.folder if place else None

    def read(self, place: Path) -> Arrays:
        """Read images and labels of the training and of the test set."""
        return Arrays(*self._read_split(place, "train"), *self._read_split(place, "t10k"))

    def _read_split(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
        images = read_idx(folder, f"{split}-images-idx3-ubyte", axes=3)
        return images[:, None], read_idx(folder, f"{split}-labels-idx1-ubyte", axes=1)


@dataclass(frozen=True)
class MNIST(_IdxImages):
    """MNIST (LeCun et al. 1998): 60,000 training and 10,000 test images of handwritten digits, 1x28x28."""

    key = "mnist"
    mean = (0.1307,)
    std = (0.3081,)


@dataclass(frozen=True)
class FashionMNIST(_IdxImages):
    """Fashion-MNIST (Xiao, Rasul & Vollgraf 2017): articles of clothing in the format and numbers of MNIST."""

    key = "fashion-mnist"
    mean = (0.2860,)
    std = (0.3530,)
