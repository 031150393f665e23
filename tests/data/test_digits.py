"""The digits that ship: what is in the file, and that the script makes it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import creditscope as cs
from creditscope.data.digits import FILE, Digits

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_digits.py"


def test_what_ships():
    data = cs.data.load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.shape == (1, 8, 8)
    assert data.inputs == 64
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.max() == data.test.x.max() == 16
    assert data.fingerprint() == "c3f7681da98f9b46"


def test_the_split_has_every_class_in_its_share():
    data = cs.data.load("digits")
    train, test = (torch.bincount(part.y, minlength=10) for part in (data.train, data.test))
    assert (test - (train + test) * 360 / 1797).abs().max() < 1
    rows = {tuple(row) for row in data.train.x.flatten(1).tolist()}
    assert not rows & {tuple(row) for row in data.test.x.flatten(1).tolist()}, "no test image is a training image"


def test_the_normalisation_is_that_of_the_training_pixels():
    pixels = np.load(FILE)["x_train"] / 255
    assert abs(pixels.mean() - Digits.mean[0]) < 1e-5
    assert abs(pixels.std() - Digits.std[0]) < 1e-5


def test_source_and_licence_stand_beside_the_file():
    note = FILE.with_suffix(".md").read_text(encoding="utf-8")
    for fact in ("UCI Machine Learning Repository", "CC BY 4.0", "scripts/make_digits.py", "random_state=0"):
        assert fact in note
    assert FILE.stat().st_size < 64_000


def test_the_script_makes_the_file(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn, which only the script needs, is not installed")
    spec = importlib.util.spec_from_file_location("make_digits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make(tmp_path / "one.npz")
    script.make(tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    with np.load(tmp_path / "one.npz") as made, np.load(FILE) as shipped:
        assert made.files == shipped.files
        for name in shipped.files:
            assert np.array_equal(made[name], shipped[name]), name
