"""Make the digits file that ships with the package: ``python scripts/make_digits.py`` (needs scikit-learn).

The bytes depend on nothing but the data, the split and the version of zlib: the zip's dates are fixed by numpy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
from sklearn.model_selection import train_test_split  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

TARGET = Path(__file__).parent.parent / "src" / "creditscope" / "data" / "digits.npz"
TEST = 360  # a fifth
SEED = 0


def make(target: Path = TARGET) -> None:
    """Write the data file."""
    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    images, labels = pixels.reshape(-1, 1, 8, 8).astype(np.uint8), labels.astype(np.uint8)
    assert np.array_equal(images.reshape(-1, 64), pixels), "the values are whole numbers in 0..16"
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=TEST, stratify=labels, random_state=SEED
    )
    np.savez_compressed(target, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


if __name__ == "__main__":
    make()
