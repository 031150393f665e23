"""The real data sets, where this machine has them: read, verified, and of the known numbers."""

import os

import pytest
import torch

import creditscope as cs
from creditscope.data import Loader, official

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("CREDITSCOPE_DATA"), reason="CREDITSCOPE_DATA is not set"),
]


def loaded(name: str) -> cs.data.Dataset:
    if official.locate(name) is None:
        pytest.skip(f"{name} is not in CREDITSCOPE_DATA")
    return cs.data.load(name)


@pytest.mark.parametrize("name", list(official.OFFICIAL))
def test_the_files_are_the_published_ones(name):
    place = official.locate(name)
    if place is None:
        pytest.skip(f"{name} is not in CREDITSCOPE_DATA")
    assert all(official.is_genuine(place.folder, file, place.layout) for file in place.layout.files)


@pytest.mark.parametrize(
    ("name", "train", "test", "fingerprint"),
    [
        ("cifar10", 50_000, 10_000, "1856dfbf075650eb"),
        ("cifar100", 50_000, 10_000, None),
        ("mnist", 60_000, 10_000, "6f7c2d9ea925c82f"),
        ("fashion-mnist", 60_000, 10_000, "459589dce1b7536d"),
    ],
)
def test_numbers_and_normalisation(name, train, test, fingerprint):
    data = loaded(name)
    assert (len(data.train), len(data.test)) == (train, test)
    if fingerprint is not None:
        assert data.fingerprint() == fingerprint
    x = torch.cat([x for x, _ in Loader(data.train, dataset=data, batch=5000, augment="none").ordered()])
    assert x.mean((0, 2, 3)).abs().max() < 1e-3
    assert (x.std((0, 2, 3)) - 1).abs().max() < 1e-3


@pytest.mark.parametrize(("name", "share"), [("cifar10", 5000), ("cifar100", 500), ("fashion-mnist", 6000)])
def test_classes_are_balanced(name, share):
    assert set(torch.bincount(loaded(name).train.y).tolist()) == {share}


def test_the_first_images_of_cifar10_are_a_frog_and_two_trucks():
    assert loaded("cifar10").train.y[:3].tolist() == [6, 9, 9]
