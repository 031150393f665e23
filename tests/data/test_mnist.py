"""The idx files of MNIST and Fashion-MNIST, plain and gzipped, whole and broken."""

import gzip

import pytest

import creditscope as cs
from creditscope.errors import MissingError, UsageError
from tests.data import layouts


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist"),
        ("mnist", "."),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "."),
    ],
)
def test_every_place_and_form(tmp_path, name, folder, gz):
    data = layouts.mnist()
    layouts.write_idx(tmp_path / "root" / folder, data, gz=gz)
    loaded = cs.data.load(name, root=tmp_path / "root")
    layouts.assert_holds(loaded, data)
    assert loaded.shape == (1, 28, 28)
    assert loaded.augment == "none"


def test_a_file_that_is_not_there_is_missing_data(tmp_path):
    folder = layouts.write_idx(tmp_path / "MNIST" / "raw", layouts.mnist())
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(MissingError, match="creditscope data fetch mnist"):
        cs.data.load("mnist", root=tmp_path)


@pytest.mark.parametrize("cut", [0, 3, 8, 15, 16, -1])
def test_truncated_file(tmp_path, cut):
    folder = layouts.write_idx(tmp_path / "MNIST" / "raw", layouts.mnist())
    file = folder / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(
        UsageError, match=r"train-images-idx3-ubyte: (not an idx file|its header says 20 x 28 x 28 bytes)"
    ):
        cs.data.load("mnist", root=tmp_path)


def test_file_with_bytes_left_over(tmp_path):
    folder = layouts.write_idx(tmp_path / "MNIST" / "raw", layouts.mnist())
    file = folder / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(UsageError, match="its header says 6 bytes, but 7 follow"):
        cs.data.load("mnist", root=tmp_path)


def test_labels_where_images_should_be(tmp_path):
    folder = layouts.write_idx(tmp_path / "MNIST" / "raw", layouts.mnist())
    (folder / "train-images-idx3-ubyte").write_bytes((folder / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(UsageError, match=r"not an idx file .* with 3 axes \(it begins with 00 00 08 01\)"):
        cs.data.load("mnist", root=tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: b"no gzip", lambda raw: raw[:2000] + b"xxxx" + raw[2004:]]
)
def test_broken_gzip_file(tmp_path, damage):
    folder = layouts.write_idx(tmp_path / "MNIST" / "raw", layouts.mnist(), gz=True)
    file = folder / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(gzip.compress(gzip.decompress(file.read_bytes()))))
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz: truncated or corrupt gzip file"):
        cs.data.load("mnist", root=tmp_path)


def test_images_and_labels_of_different_numbers(tmp_path):
    folder = layouts.write_idx(tmp_path / "MNIST" / "raw", layouts.mnist())
    (folder / "train-labels-idx1-ubyte").write_bytes(layouts.idx(layouts.mnist().y_train[:-1]))
    with pytest.raises(UsageError, match="mnist: train has 20 inputs but 19 labels"):
        cs.data.load("mnist", root=tmp_path)
