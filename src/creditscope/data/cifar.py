"""CIFAR-10 and CIFAR-100: readers of the binary and of the Python version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from creditscope.data import official, pickles
from creditscope.data._base import Arrays, Augment
from creditscope.errors import UsageError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _CIFAR:
    augment: Augment = "crop-flip"

    key: ClassVar[str]
    classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    label_bytes: ClassVar[int]
    """Bytes of labels before the pixels of a record of the binary version; the last of them is the class."""
    label_key: ClassVar[str]
    """What the Python version calls the classes."""

    def locate(self, root: Path | None = None) -> Path | None:
        """Return the folder with the files of either version, or None."""
        place = official.locate(self.key, root)
        return place.folder if place else None

    def read(self, place: Path) -> Arrays:
        """Read the training files, in order, and the test file."""
        *train, test = official.layout_in(self.key, place).files
        read = self._read_binary if test.endswith(".bin") else self._read_python
        images, labels = zip(*(read(place, name) for name in train), strict=True)
        return Arrays(np.concatenate(images), np.concatenate(labels), *read(place, test))

    def _read_binary(self, folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
        path, raw = official.contents(folder, name)
        record = self.label_bytes + PIXELS
        if not raw or len(raw) % record:
            raise UsageError(f"{path}: {len(raw)} bytes are not a whole number of records of {record}: truncated?")
        records = np.frombuffer(raw, np.uint8).reshape(-1, record)
        return records[:, self.label_bytes :].reshape(-1, 3, 32, 32), records[:, self.label_bytes - 1]

    def _read_python(self, folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
        path, batch = pickles.load(folder, name)
        missing = [key for key in ("data", self.label_key) if key not in batch]
        if missing:
            raise UsageError(f"{path}: its dict has no '{missing[0]}', so it is not a batch of {self.key}")
        images, labels = batch["data"], batch[self.label_key]
        if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != PIXELS:
            raise UsageError(f"{path}: 'data' is not an array of rows of {PIXELS} bytes")
        if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
            raise UsageError(f"{path}: '{self.label_key}' is not a list of whole numbers")
        if len(labels) != len(images):
            raise UsageError(f"{path}: {len(images)} images but {len(labels)} labels")
        return images.reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)


@dataclass(frozen=True)
class CIFAR10(_CIFAR):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test photographs of 10 classes, 3x32x32.

    Training crops at random from the image with 4 black pixels around it, and flips every second one, as the source
    study does; mean and standard deviation are the ones it uses.
    """

    key = "cifar10"
    classes = 10
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    label_bytes = 1
    label_key = "labels"


@dataclass(frozen=True)
class CIFAR100(_CIFAR):
    """CIFAR-100 (Krizhevsky 2009): as CIFAR-10, with 100 classes; the 20 superclasses are not read."""

    key = "cifar100"
    classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    label_bytes = 2
    label_key = "fine_labels"
