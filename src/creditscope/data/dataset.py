"""A data set in memory: its splits, what they are normalised by, and the one check that they can be used."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from creditscope import errors
from creditscope.data._base import Augment
from creditscope.errors import UsageError
from creditscope.rng import stream


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs x, as uint8 images (N, C, H, W) or floating point (N, ...), and labels y, int64 (N,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Tensor | slice) -> Split:
        return Split(self.x[rows], self.y[rows])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split, perhaps a validation split, and how they are fed to a network.

    ``mean`` and ``std`` are by channel (the first axis of an example), for bytes in units of 255; None leaves the
    inputs as they are (bytes then become 0..1). ``options`` say what made the data, for the record of a run. Data that
    cannot be used is refused here, once, and never looked at again in training.
    """

    name: str
    train: Split
    test: Split
    classes: int
    validation: Split | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: Augment = "none"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split, part in self.splits.items():
            _check_split(f"{self.name}: {split}", part, self.shape, self.classes)
        _check_normalisation(self)
        if self.augment not in get_args(Augment):
            raise errors.unknown("augmentation", self.augment, get_args(Augment))
        if self.augment != "none" and len(self.shape) != 3:
            raise UsageError(f"{self.name}: '{self.augment}' is for images (C, H, W), not for inputs of {self.shape}")

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name, without a validation split where there is none."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.x.shape[1:])

    @property
    def inputs(self) -> int:
        """The number of features of one example, flattened."""
        return math.prod(self.shape)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with any bit, shape or type of any split."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, part in self.splits.items():
            for tensor in (part.x, part.y):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def hold_out(self, examples: int, *, seed: int = 0) -> Dataset:
        """Return the data with a random part of the training split held out for validation; the test split stays."""
        if self.validation is not None:
            raise UsageError(f"{self.name} has a validation split of {len(self.validation)} already")
        if not isinstance(examples, int) or not 0 < examples < len(self.train):
            raise UsageError(
                f"{self.name}: validation={examples!r} must be a whole number above 0 "
                f"and below the {len(self.train)} training examples"
            )
        order = torch.randperm(len(self.train), generator=stream(seed, "validation"))
        # Sorted: the splits keep the order of the files, so only what belongs to which depends on the seed.
        held, kept = order[:examples].sort().values, order[examples:].sort().values
        return replace(
            self,
            train=self.train[kept],
            validation=self.train[held],
            options=self.options | {"validation": examples, "seed": seed},
        )


def from_tensors(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    *,
    name: str = "custom",
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    augment: Augment = "none",
    validation: int = 0,
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> Dataset:
    """Return a data set of tensors or arrays: images as bytes (N, C, H, W), or floating point (N, ...).

    ``classes`` is by default what the training labels show; ``validation`` examples of the training set are held out,
    drawn from ``seed``.
    """
    train = Split(_inputs(name, x_train), _labels(name, y_train))
    test = Split(_inputs(name, x_test), _labels(name, y_test))
    if classes is None:
        classes = int(train.y.max()) + 1 if len(train) else 0
    data = Dataset(name, train, test, classes, None, mean, std, augment, options or {})
    return data.hold_out(validation, seed=seed) if validation else data


def _tensor(name: str, given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    try:
        return torch.from_numpy(np.array(given))  # a copy: arrays may be read-only, or change later
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: not a tensor or an array of numbers ({error})") from error


def _inputs(name: str, given: Any) -> Tensor:
    x = _tensor(name, given)
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise UsageError(f"{name}: inputs must be bytes (uint8) or floating point, not {_type(x)}")
    return x if x.dtype == torch.uint8 else x.float()


def _labels(name: str, given: Any) -> Tensor:
    y = _tensor(name, given)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UsageError(f"{name}: labels must be whole numbers, not {_type(y)}")
    return y.long()


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_split(what: str, part: Split, shape: tuple[int, ...], classes: int) -> None:
    x, y = part.x, part.y
    if y.dim() != 1 or y.dtype != torch.int64:
        raise UsageError(f"{what} labels must be int64 of one axis, not {_type(y)} of {tuple(y.shape)}")
    if x.dim() < 2 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise UsageError(f"{what} inputs must be bytes or floating point (N, ...), not {_type(x)} of {tuple(x.shape)}")
    if len(x) != len(y):
        raise UsageError(f"{what} has {len(x)} inputs but {len(y)} labels")
    if not x.numel():
        raise UsageError(f"{what} is empty: inputs of {tuple(x.shape)}")
    if tuple(x.shape[1:]) != shape:
        raise UsageError(f"{what} has examples of {tuple(x.shape[1:])}, but the training examples have {shape}")
    _check_labels(what, y, classes)
    _check_finite(what, x)


def _check_labels(what: str, y: Tensor, classes: int) -> None:
    outside = (y < 0) | (y >= classes)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise UsageError(f"{what} labels must be in 0..{classes - 1}; example {first} has {int(y[first])}")


def _check_finite(what: str, x: Tensor) -> None:
    if not x.is_floating_point():
        return
    bad = ~x.isfinite().flatten(1).all(1)
    if bad.any():
        first, count = int(bad.nonzero()[0]), int(bad.sum())
        raise UsageError(f"{what} inputs have NaN or infinite values in {count} examples; the first is example {first}")


def _check_normalisation(data: Dataset) -> None:
    mean, std = data.mean, data.std
    if (mean is None) != (std is None):
        raise UsageError(f"{data.name}: mean and std go together; only {'std' if mean is None else 'mean'} was given")
    if mean is None or std is None:
        return
    channels = data.shape[0]
    if len(mean) != channels or len(std) != channels:
        raise UsageError(f"{data.name}: {len(mean)} means and {len(std)} stds for {channels} channels")
    if not all(math.isfinite(m) for m in mean) or not all(0 < s < math.inf for s in std):
        raise UsageError(f"{data.name}: mean {mean} and std {std} must be finite, and std above 0")
