"""The loader: a split on the device as one tensor; batches are shuffled, cropped, flipped and normalised there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from creditscope import errors
from creditscope.data._base import Augment
from creditscope.data.dataset import Dataset, Split
from creditscope.errors import UsageError
from creditscope.rng import stream

PADDING = 4  # of the crop, on every side, as everyone has it on CIFAR

# On a GPU a batch costs its kernel launches and not its bytes, so this many examples are made ready at a time there.
_AHEAD = 4096

Batch = tuple[Tensor, Tensor]


class _Draws(NamedTuple):
    """What one epoch has of chance, a row for each place in its order."""

    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor

    @classmethod
    def draw(cls, examples: int, order: Generator, crop: Generator, flip: Generator) -> _Draws:
        """Draw an epoch on the CPU: the bits are then the same whatever the device."""
        corners = torch.randint(0, 2 * PADDING + 1, (2, examples), generator=crop)
        flips = torch.rand(examples, generator=flip) < 0.5
        return cls(torch.randperm(examples, generator=order), corners[0], corners[1], flips)

    def to(self, device: torch.device) -> _Draws:
        """Move the draws once, for the whole epoch, and from pinned memory, so that a GPU is not waited for."""
        if device.type != "cuda":
            return _Draws(*(part.to(device) for part in self))
        return _Draws(*(part.pin_memory().to(device, non_blocking=True) for part in self))


class Loader:
    """Batches of one split: ``epoch`` shuffled and augmented for training, ``ordered`` as it is for evaluation.

    ``augment="crop-flip"`` pads an image with 4 zero pixels, crops it at random to its size, and flips every second
    one on average, each example by its own draws; None does what the data set says. Inputs come normalised, in
    ``dtype``; the last batch is smaller where the examples do not fill it, unless ``drop_last``.

    Nothing in an epoch waits for a GPU. The draws of an epoch depend on its generators alone, so any epoch can be
    had again without those before it, from any batch on, with the same bits.
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
        if self.augment not in get_args(Augment):
            raise errors.unknown("augmentation", self.augment, get_args(Augment))
        if self.augment != "none" and split.x.dim() != 4:
            raise UsageError(f"'{self.augment}' is for images (C, H, W), not for inputs of {tuple(split.x.shape[1:])}")
        if not isinstance(batch, int) or batch < 1:
            raise UsageError(f"batch must be a whole number of at least 1, not {batch!r}")
        if batch > len(split):
            raise UsageError(f"a batch of {batch} is larger than the set of {len(split)} examples")
        if not dtype.is_floating_point:
            raise UsageError(f"dtype must be a floating point type, not {str(dtype).removeprefix('torch.')}")
        self.batch = batch
        self.drop_last = drop_last
        self._dtype = dtype
        self._margin = PADDING if self.augment == "crop-flip" else 0
        self._y = split.y.to(device)
        self._x = split.x.to(device)
        if self._margin:
            self._x = F.pad(self._x, (self._margin,) * 4)
            height, width = split.x.shape[2:]
            # (N, top, left, C, H, W): every crop of every image, as a view of the padded images.
            self._crops = self._x.unfold(2, height, 1).unfold(3, width, 1).movedim(1, 3)
        self._scale, self._shift = _affine(split.x, dataset, torch.promote_types(dtype, torch.float32), self.device)

    @property
    def device(self) -> torch.device:
        """Where the split lies and the batches are made."""
        return self._y.device

    @property
    def examples(self) -> int:
        """The number of examples of an epoch."""
        return len(self) * self.batch if self.drop_last else len(self._y)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._y), self.batch)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, seed: int, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        """Return the batches of one epoch of a run, from batch ``skip`` on."""
        generators = (stream(seed, purpose, epoch) for purpose in ("order", "crop", "flip"))
        return self._batches(_Draws.draw(len(self._y), *generators), skip)

    def batches(self, generator: Generator, *, skip: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch drawn from the user's own generator (a CPU one), from batch ``skip`` on."""
        return self._batches(_Draws.draw(len(self._y), generator, generator, generator), skip)

    def ordered(self) -> Iterator[Batch]:
        """Return all examples in their order, unaugmented; the last batch is never dropped."""
        for start in range(0, len(self._y), self.batch):
            rows = slice(start, start + self.batch)
            x = self._x[rows]
            if self._margin:
                x = x[..., self._margin : -self._margin, self._margin : -self._margin]
            yield self._normalised(x), self._y[rows]

    def _batches(self, draws: _Draws, skip: int) -> Iterator[Batch]:
        if not 0 <= skip <= len(self):
            raise UsageError(f"skip={skip} is not a batch of an epoch of {len(self)} batches")
        return self._generate(draws.to(self.device), skip * self.batch)

    def _generate(self, draws: _Draws, start: int) -> Iterator[Batch]:
        ahead = max(1, _AHEAD // self.batch) * self.batch if self.device.type == "cuda" else self.batch
        for first in range(start, self.examples, ahead):
            rows = slice(first, min(first + ahead, self.examples))
            x, y = self._training(_Draws(*(part[rows] for part in draws)))
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)

    def _training(self, draws: _Draws) -> Batch:
        y = self._y[draws.order]
        if not self._margin:
            return self._normalised(self._x[draws.order]), y
        crops = self._crops[draws.order, draws.top, draws.left]
        return self._normalised(_flipped(crops, draws.flip[:, None, None, None])), y

    def _normalised(self, x: Tensor) -> Tensor:
        # A copy even where the type stays: what comes out must not be a view of the data.
        return x.to(self._scale.dtype, copy=True).mul_(self._scale).add_(self._shift).to(self._dtype)


def _flipped(x: Tensor, flip: Tensor) -> Tensor:
    """Return images with some of them mirrored from left to right."""
    mirrored = x.flip(-1)
    if x.dtype == torch.uint8:  # exact modulo 256, and on a CPU a fraction of the time of `where` on bytes
        return (mirrored - x).mul_(flip.to(torch.uint8)).add_(x)
    return torch.where(flip, mirrored, x)


def _affine(x: Tensor, dataset: Dataset, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and shift by channel with (x / unit - mean) / std = x · scale + shift."""
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    mean = torch.tensor(dataset.mean or (0.0,), dtype=torch.float64)
    std = torch.tensor(dataset.std or (1.0,), dtype=torch.float64)
    axes = (-1,) + (1,) * (x.dim() - 2)
    scale, shift = 1 / (unit * std), -mean / std
    return scale.reshape(axes).to(device, dtype), shift.reshape(axes).to(device, dtype)
