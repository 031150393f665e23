"""Small data sets in the official layouts, written here, and the arrays that reading them has to give."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np

from creditscope.data import Arrays
from creditscope.data.official import OFFICIAL


def arrays(*, shape: tuple[int, ...], classes: int, train: int = 20, test: int = 6, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)

    def images(examples: int) -> np.ndarray:
        return rng.integers(0, 256, (examples, *shape), dtype=np.uint8)

    def labels(examples: int) -> np.ndarray:
        return rng.integers(0, classes, examples, dtype=np.uint8)

    return Arrays(images(train), labels(train), images(test), labels(test))


def cifar10(train: int = 20, test: int = 6) -> Arrays:
    return arrays(shape=(3, 32, 32), classes=10, train=train, test=test)


def cifar100() -> Arrays:
    return arrays(shape=(3, 32, 32), classes=100)


def mnist(seed: int = 0) -> Arrays:
    return arrays(shape=(1, 28, 28), classes=10, seed=seed)


def write_cifar10_binary(folder: Path, data: Arrays) -> Path:
    folder.mkdir(parents=True)
    for i, (x, y) in enumerate(zip(np.split(data.x_train, 5), np.split(data.y_train, 5), strict=True), 1):
        (folder / f"data_batch_{i}.bin").write_bytes(records(y[:, None], x))
    (folder / "test_batch.bin").write_bytes(records(data.y_test[:, None], data.x_test))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return folder


def write_cifar100_binary(folder: Path, data: Arrays) -> Path:
    folder.mkdir(parents=True)
    for name, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        coarse = np.full_like(y, 19)  # never the class
        (folder / f"{name}.bin").write_bytes(records(np.stack([coarse, y], 1), x))
    return folder


def records(labels: np.ndarray, images: np.ndarray) -> bytes:
    return np.concatenate([labels, images.reshape(len(images), -1)], 1).tobytes()


def write_cifar10_python(folder: Path, data: Arrays, protocol: int = 2) -> Path:
    folder.mkdir(parents=True)
    for i, (x, y) in enumerate(zip(np.split(data.x_train, 5), np.split(data.y_train, 5), strict=True), 1):
        write_batch(folder / f"data_batch_{i}", x, b"labels", y, protocol)
    write_batch(folder / "test_batch", data.x_test, b"labels", data.y_test, protocol)
    return folder


def write_cifar100_python(folder: Path, data: Arrays, protocol: int = 2) -> Path:
    folder.mkdir(parents=True)
    write_batch(folder / "train", data.x_train, b"fine_labels", data.y_train, protocol)
    write_batch(folder / "test", data.x_test, b"fine_labels", data.y_test, protocol)
    return folder


def write_batch(path: Path, x: np.ndarray, key: bytes, y: np.ndarray, protocol: int = 2) -> None:
    batch = {
        b"batch_label": b"a batch",
        key: y.tolist(),
        b"data": x.reshape(len(x), -1),
        b"filenames": [f"{i}.png".encode() for i in range(len(x))],
    }
    path.write_bytes(pickle.dumps(batch, protocol))


def write_idx(folder: Path, data: Arrays, *, gz: bool = False) -> Path:
    folder.mkdir(parents=True)
    for split, x, y in (("train", data.x_train, data.y_train), ("t10k", data.x_test, data.y_test)):
        for name, array in ((f"{split}-images-idx3-ubyte", x[:, 0]), (f"{split}-labels-idx1-ubyte", y)):
            raw = idx(array)
            if gz:
                (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
            else:
                (folder / name).write_bytes(raw)
    return folder


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


WRITERS = {
    "cifar10": lambda root: write_cifar10_binary(root / "cifar-10-batches-bin", cifar10()),
    "cifar100": lambda root: write_cifar100_binary(root / "cifar-100-binary", cifar100()),
    "mnist": lambda root: write_idx(root / "MNIST" / "raw", mnist()),
    "fashion-mnist": lambda root: write_idx(root / "FashionMNIST" / "raw", mnist(seed=1)),
}
assert WRITERS.keys() == OFFICIAL.keys()


def assert_holds(data, expected: Arrays) -> None:
    """Check that a data set has the pixels and labels of the arrays, bit by bit."""
    found = (data.train.x, data.train.y, data.test.x, data.test.y)
    for name, tensor, array in zip(Arrays._fields, found, expected, strict=True):
        assert np.array_equal(tensor.numpy(), array), name
