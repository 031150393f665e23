"""Both versions of CIFAR-10 and CIFAR-100, from files written here, whole and broken."""

import pickle

import numpy as np
import pytest

import creditscope as cs
from creditscope.errors import UsageError
from tests.data import layouts


def test_binary_version_of_cifar10(tmp_path):
    data = layouts.cifar10()
    layouts.write_cifar10_binary(tmp_path / "cifar-10-batches-bin", data)
    loaded = cs.data.load("cifar10", root=tmp_path)
    layouts.assert_holds(loaded, data)
    assert loaded.shape == (3, 32, 32)
    assert loaded.inputs == 3072
    assert loaded.classes == 10
    assert loaded.augment == "crop-flip"


def test_binary_version_of_cifar100_gives_the_fine_label(tmp_path):
    data = layouts.cifar100()
    layouts.write_cifar100_binary(tmp_path / "cifar-100-binary", data)
    loaded = cs.data.load("cifar100", root=tmp_path)
    layouts.assert_holds(loaded, data)
    assert loaded.classes == 100


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_python_version_of_cifar10(tmp_path, protocol):
    data = layouts.cifar10()
    layouts.write_cifar10_python(tmp_path / "cifar-10-batches-py", data, protocol)
    layouts.assert_holds(cs.data.load("cifar10", root=tmp_path), data)


def test_python_version_of_cifar100(tmp_path):
    data = layouts.cifar100()
    layouts.write_cifar100_python(tmp_path / "cifar-100-python", data)
    layouts.assert_holds(cs.data.load("cifar100", root=tmp_path), data)


def test_both_versions_give_the_same_fingerprint(tmp_path):
    data = layouts.cifar10()
    layouts.write_cifar10_binary(tmp_path / "a" / "cifar-10-batches-bin", data)
    layouts.write_cifar10_python(tmp_path / "b" / "cifar-10-batches-py", data)
    binary, python = (cs.data.load("cifar10", root=tmp_path / side) for side in "ab")
    assert binary.fingerprint() == python.fingerprint()


@pytest.mark.parametrize("size", [0, 3072, 3 * 3073 - 1])
def test_truncated_binary_file(tmp_path, size):
    folder = layouts.write_cifar10_binary(tmp_path / "cifar-10-batches-bin", layouts.cifar10())
    file = folder / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UsageError, match=rf"data_batch_3.bin: {size} bytes .* records of 3073: truncated"):
        cs.data.load("cifar10", root=tmp_path)


def test_label_out_of_range(tmp_path):
    folder = layouts.write_cifar10_binary(tmp_path / "cifar-10-batches-bin", layouts.cifar10())
    file = folder / "test_batch.bin"
    raw = bytearray(file.read_bytes())
    raw[2 * 3073] = 77
    file.write_bytes(raw)
    with pytest.raises(UsageError, match=r"cifar10: test labels must be in 0..9; example 2 has 77"):
        cs.data.load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({b"labels": [0]}, "has no 'data'"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "has no 'labels'"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [0]}, "not an array of rows of 3072 bytes"),
        ({b"data": [[0] * 3072], b"labels": [0]}, "not an array of rows of 3072 bytes"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, "2 images but 1 labels"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0.5]}, "not a list of whole numbers"),
        ([1, 2], "a list where a dict should be"),
    ],
)
def test_pickle_that_is_no_batch(tmp_path, batch, said):
    folder = layouts.write_cifar10_python(tmp_path / "cifar-10-batches-py", layouts.cifar10())
    (folder / "data_batch_2").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(UsageError, match=f"data_batch_2: .*{said}"):
        cs.data.load("cifar10", root=tmp_path)


def test_an_option_changes_the_augmentation(tmp_path):
    layouts.WRITERS["cifar10"](tmp_path)
    assert cs.data.load("cifar10", root=tmp_path, augment="none").augment == "none"
    with pytest.raises(UsageError, match="unknown augmentation 'crop': did you mean 'crop-flip'"):
        cs.data.load("cifar10", root=tmp_path, augment="crop")
