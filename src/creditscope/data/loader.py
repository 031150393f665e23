"""The loader: a split on the device as one tensor; batches are shuffled, cropped, flipped and normalised there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from creditscope import errors
from creditscope.data._base import Augment
from creditscope.data.dataset import Dataset, Split
from creditscope.errors import UsageError
from creditscope.rng import stream

PADDING = 4  # of the crop, on every side, as everyone has it on CIFAR

# On a GPU a batch costs its kernel launches and not its bytes, so this many examples are made ready at a time there:
# 14 µs a batch of 128 instead of some 150, on an H200.
_AHEAD = 4096

Batch = tuple[Tensor, Tensor]


class Loader:
    """Batches of one split: ``epoch`` shuffled and augmented for training, ``ordered`` as it is for evaluation.

    ``augment="crop-flip"`` pads an image with 4 zero pixels, crops it at random to its size, and flips every second
    one on average, each example by its own draws; None does what the data set says. Inputs come normalised, in
    ``dtype``; the last batch is smaller where the examples do not fill it, unless ``drop_last``.

    Nothing in an epoch waits for a GPU. What an epoch draws depends on its generators alone and is drawn on the CPU,
    so any epoch can be had again without those before it, from any batch on, with the same bits.
    """

    def __init__(
        self,
        split: Split,
        *,
        dataset: Dataset,
        batch: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        augment: Augment | None = None,
        drop_last: bool = False,
    ):
        self.augment = dataset.augment if augment is None else augment
        _check(split, self.augment, batch, dtype)
        self.batch = batch
        self.drop_last = drop_last
        self.device = torch.device(device)
        self._dtype = dtype
        # Elsewhere (MPS) the overlapping view of `_runs_of` would be written out, so there the CPU makes the batches.
        self._home = self.device if self.device.type in ("cpu", "cuda") else torch.device("cpu")
        self._y = split.y.to(self._home)
        self._margin = PADDING if self.augment == "crop-flip" else 0
        x = split.x.to(self._home).contiguous()
        self._x = F.pad(x, (self._margin,) * 4) if self._margin else x
        self._shape = tuple(split.x.shape[1:])
        precision = torch.promote_types(dtype, torch.float32)
        self._scale, self._shift = (part.to(self._home, precision) for part in _affine(split.x, dataset))

    @property
    def examples(self) -> int:
        """The number of examples of an epoch."""
        return len(self) * self.batch if self.drop_last else len(self._y)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._y), self.batch)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, seed: int, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        """Return the batches of one epoch of a run, from batch ``skip`` on."""
        order, crop, flip = (stream(seed, purpose, epoch) for purpose in ("order", "crop", "flip"))
        return self._batches(self._draw(order, crop, flip), skip)

    def batches(self, generator: Generator, *, skip: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch drawn from the user's own generator (a CPU one), from batch ``skip`` on."""
        return self._batches(self._draw(generator, generator, generator), skip)

    def ordered(self) -> Iterator[Batch]:
        """Return all examples in their order, unaugmented; the last batch is never dropped."""
        for start in range(0, len(self._y), self.batch):
            rows = slice(start, start + self.batch)
            x = self._x[rows]
            if self._margin:
                x = x[..., self._margin : -self._margin, self._margin : -self._margin]
            yield self._normalised(x), self._y[rows].to(self.device)

    def _draw(self, order: Generator, crop: Generator, flip: Generator) -> tuple[Tensor, ...]:
        """Draw an epoch: the order and, where images are cropped, by place in it the first pixel and the flip."""
        n = len(self._y)
        rows = torch.randperm(n, generator=order)
        if not self._margin:
            return (rows,)
        top, left = torch.randint(0, 2 * self._margin + 1, (2, n), generator=crop)
        image, _, row, _ = self._x.stride()
        return rows, rows * image + top * row + left, torch.rand(n, generator=flip) < 0.5

    def _batches(self, draws: tuple[Tensor, ...], skip: int) -> Iterator[Batch]:
        if not 0 <= skip <= len(self):
            raise UsageError(f"skip={skip} is not a batch of an epoch of {len(self)} batches")
        return self._generate([self._move(part) for part in draws], skip * self.batch)

    def _move(self, draws: Tensor) -> Tensor:
        """Move the draws of an epoch at once, and from pinned memory, so that a GPU is not waited for."""
        return draws.pin_memory().to(self._home, non_blocking=True) if self._home.type == "cuda" else draws

    def _generate(self, draws: list[Tensor], start: int) -> Iterator[Batch]:
        ahead = max(1, _AHEAD // self.batch) * self.batch if self._home.type == "cuda" else self.batch
        for first in range(start, self.examples, ahead):
            rows = slice(first, min(first + ahead, self.examples))
            x, y = self._training(*(part[rows] for part in draws))
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)

    def _training(self, order: Tensor, first: Tensor | None = None, flip: Tensor | None = None) -> Batch:
        y = self._y.index_select(0, order).to(self.device)
        if first is None or flip is None:
            return self._normalised(self._x.index_select(0, order)), y
        return self._normalised(_flipped(self._crops(first), flip[:, None, None, None])), y

    def _crops(self, first: Tensor) -> Tensor:
        """Return the crops that begin at the given pixels, counted through all of the padded images.

        A crop is one run of memory, from its first pixel to its last, that is read with the padded image's strides. So
        it is copied in one piece; indexing pixels, or rows of pixels, takes several times as long.
        """
        _, plane, row, _ = self._x.stride()
        channels, height, width = self._shape
        run = (channels - 1) * plane + (height - 1) * row + width
        runs = self._x.as_strided((self._x.numel() - run + 1, run), (1, 1)).index_select(0, first)
        return runs.as_strided((len(first), channels, height, width), (run, plane, row, 1))

    def _normalised(self, x: Tensor) -> Tensor:
        # A copy even where the type stays: what comes out must not be a view of the data.
        x = x.to(self._scale.dtype, copy=True).mul_(self._scale).add_(self._shift)
        return x.to(self.device, self._dtype)


def _flipped(x: Tensor, flip: Tensor) -> Tensor:
    """Return images with some of them mirrored from left to right."""
    mirrored = x.flip(-1)
    if x.dtype == torch.uint8:  # exact modulo 256, and on a CPU a fraction of the time of `where` on bytes
        return (mirrored - x).mul_(flip.to(torch.uint8)).add_(x)
    return torch.where(flip, mirrored, x)


def _affine(x: Tensor, dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return scale and shift by channel with (x / unit - mean) / std = x · scale + shift."""
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    mean = torch.tensor(dataset.mean or (0.0,), dtype=torch.float64)
    std = torch.tensor(dataset.std or (1.0,), dtype=torch.float64)
    axes = (-1,) + (1,) * (x.dim() - 2)
    return (1 / (unit * std)).reshape(axes), (-mean / std).reshape(axes)


def _check(split: Split, augment: str, batch: int, dtype: torch.dtype) -> None:
    if augment not in get_args(Augment):
        raise errors.unknown("augmentation", augment, get_args(Augment))
    if augment != "none" and split.x.dim() != 4:
        raise UsageError(f"'{augment}' is for images (C, H, W), not for inputs of {tuple(split.x.shape[1:])}")
    if not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch must be a whole number of at least 1, not {batch!r}")
    if batch > len(split):
        raise UsageError(f"a batch of {batch} is larger than the set of {len(split)} examples")
    if not dtype.is_floating_point:
        raise UsageError(f"dtype must be a floating point type, not {str(dtype).removeprefix('torch.')}")
