"""The data sets, their readers, verified downloads and the loader. This page is their registry: it loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from creditscope.registry import Entry, Registry

REGISTRY = Registry(
    "dataset",
    [
        Entry("digits", "creditscope.data.digits:Digits", "handwritten digits, 1,797 grey 8x8 images; they ship"),
        Entry("cifar10", "creditscope.data.cifar:CIFAR10", "photographs in 10 classes, 60,000 colour 32x32 images"),
        Entry("cifar100", "creditscope.data.cifar:CIFAR100", "photographs in 100 classes, 60,000 colour 32x32 images"),
        Entry("mnist", "creditscope.data.mnist:MNIST", "handwritten digits, 70,000 grey 28x28 images"),
        Entry("fashion-mnist", "creditscope.data.mnist:FashionMNIST", "articles of clothing, 70,000 grey 28x28 images"),
        Entry("teacher", "creditscope.data.teacher:Teacher", "labels of a random network, generated from a seed"),
    ],
)

if TYPE_CHECKING:
    from creditscope.data._base import Arrays, Source
    from creditscope.data.catalogue import available, load
    from creditscope.data.cifar import CIFAR10, CIFAR100
    from creditscope.data.dataset import Dataset, Split, from_tensors
    from creditscope.data.digits import Digits
    from creditscope.data.download import fetch
    from creditscope.data.loader import Loader
    from creditscope.data.mnist import MNIST, FashionMNIST
    from creditscope.data.official import data_root
    from creditscope.data.teacher import Teacher

# name -> the module it lives in; resolved on first use, so that `creditscope data list` needs no torch.
_PUBLIC = {
    "Arrays": "_base",
    "Source": "_base",
    "available": "catalogue",
    "load": "catalogue",
    "Dataset": "dataset",
    "Split": "dataset",
    "from_tensors": "dataset",
    "fetch": "download",
    "Loader": "loader",
    "data_root": "official",
}

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "REGISTRY",
    "Arrays",
    "Dataset",
    "Digits",
    "FashionMNIST",
    "Loader",
    "Source",
    "Split",
    "Teacher",
    "available",
    "data_root",
    "fetch",
    "from_tensors",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"creditscope.data.{_PUBLIC[name]}"), name)
    return REGISTRY.exported(name)
