"""What a data set checks, derives and remembers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import creditscope as cs
from creditscope.data import Dataset, Split, from_tensors
from creditscope.errors import UsageError


def images(examples: int, *, seed: int = 0, shape: tuple[int, ...] = (3, 8, 8)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (examples, *shape), dtype=torch.uint8, generator=generator)


def labels(examples: int, classes: int = 4) -> torch.Tensor:
    return torch.arange(examples) % classes


def data(**changes) -> Dataset:
    parts = {"x_train": images(12), "y_train": labels(12), "x_test": images(5, seed=1), "y_test": labels(5)}
    return from_tensors(**{**parts, "name": "mine", **changes})


def test_what_is_derived():
    mine = data()
    assert mine.shape == (3, 8, 8)
    assert mine.inputs == 192
    assert mine.classes == 4
    assert list(mine.splits) == ["train", "test"]
    assert (len(mine.train), len(mine.test)) == (12, 5)
    assert mine.train.y.dtype == torch.int64


def test_arrays_lists_and_read_only_arrays_are_taken():
    x, y = np.arange(24.0).reshape(6, 4), np.array([0, 1, 2, 0, 1, 2], np.int8)
    x.flags.writeable = False
    mine = from_tensors(x, y, x[:2].tolist(), [0, 1])
    assert mine.train.x.dtype == torch.float32
    assert torch.equal(mine.test.x, mine.train.x[:2])
    assert mine.classes == 3


def test_an_array_is_copied():
    x = np.zeros((4, 2), np.float32)
    mine = from_tensors(x, [0, 1, 0, 1], x, [0, 1, 0, 1])
    x[:] = 1
    assert not mine.train.x.any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": 3}, r"mine: train labels must be in 0\.\.2; example 3 has 3"),
        ({"y_test": torch.tensor([0, 1, 2, -1, 0])}, r"mine: test labels must be in 0\.\.3; example 3 has -1"),
        ({"y_test": torch.tensor([0, 1, 2, 4, 0])}, r"mine: test labels must be in 0\.\.3; example 3 has 4"),
        ({"y_train": labels(11)}, "mine: train has 12 inputs but 11 labels"),
        ({"y_train": labels(12)[:, None]}, r"mine: train labels must be int64 of one axis, not int64 of \(12, 1\)"),
        ({"y_train": labels(12).float()}, "mine: labels must be whole numbers, not float32"),
        ({"x_train": images(12).long()}, r"mine: inputs must be bytes \(uint8\) or floating point, not int64"),
        (
            {"x_train": torch.rand(12), "x_test": torch.rand(5)},
            r"train inputs must be bytes or floating point \(N, ...\)",
        ),
        ({"x_test": images(5, shape=(3, 8, 9))}, r"test has examples of \(3, 8, 9\), but the training examples have"),
        ({"x_train": images(0), "y_train": labels(0)}, "mine: train is empty"),
        ({"x_test": images(0), "y_test": labels(0)}, "mine: test is empty"),
        ({"x_train": [[1, 2], [3]]}, "mine: not a tensor or an array of numbers"),
        ({"augment": "flip"}, "unknown augmentation 'flip': did you mean 'crop-flip'"),
        ({"mean": (0.5,) * 3}, "mean and std go together; only mean was given"),
        ({"mean": (0.5,), "std": (0.5,)}, "1 means and 1 stds for 3 channels"),
        ({"mean": (0.5,) * 3, "std": (0.5, 0.5, 0.0)}, "std above 0"),
        ({"mean": (0.5, 0.5, math.nan), "std": (0.5,) * 3}, "must be finite"),
        ({"validation": 12}, "validation=12 must be a whole number above 0 and below the 12 training examples"),
        ({"validation": -1}, "validation=-1"),
        ({"validation": 0.1}, "validation=0.1"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(changes, said):
    with pytest.raises(UsageError, match=said) as caught:
        data(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite(value):
    x = torch.rand(12, 3)
    x[7, 2] = x[9, 0] = value
    with pytest.raises(
        UsageError, match="train inputs have NaN or infinite values in 2 examples; the first is example 7"
    ):
        from_tensors(x, labels(12), torch.rand(5, 3), labels(5))


def test_augmentation_is_for_images():
    with pytest.raises(UsageError, match=r"'crop-flip' is for images \(C, H, W\), not for inputs of \(3,\)"):
        from_tensors(torch.rand(12, 3), labels(12), torch.rand(5, 3), labels(5), augment="crop-flip")


def test_a_data_set_made_by_hand_is_checked_too():
    good = Split(images(4), labels(4))
    Dataset("mine", good, good, classes=4)
    with pytest.raises(UsageError, match="train labels must be int64 of one axis, not int32"):
        Dataset("mine", Split(images(4), labels(4).int()), good, classes=4)


@given(examples=st.integers(2, 60), seed=st.integers(0, 2**32), rest=st.data())
def test_holding_out_splits_the_training_set_and_nothing_else(examples, seed, rest):
    held = rest.draw(st.integers(1, examples - 1))
    x = torch.arange(examples, dtype=torch.float32)[:, None]
    whole = from_tensors(x, labels(examples), x, labels(examples))
    mine = whole.hold_out(held, seed=seed)
    assert mine.validation is not None
    assert len(mine.validation) == held
    kept, out = mine.train.x.flatten(), mine.validation.x.flatten()
    assert torch.equal(torch.cat([kept, out]).sort().values, x.flatten())
    assert torch.equal(kept, kept.sort().values)
    assert torch.equal(mine.train.y, whole.train.y[kept.long()])
    assert torch.equal(mine.validation.y, whole.train.y[out.long()])
    assert torch.equal(mine.test.x, whole.test.x)
    assert mine.options == {"validation": held, "seed": seed}


@pytest.mark.usefixtures("untouched_rng")
def test_holding_out_is_drawn_from_its_seed_alone():
    one, same, other = (data(validation=5, seed=seed) for seed in (1, 1, 2))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    with pytest.raises(UsageError, match="has a validation split of 5 already"):
        one.hold_out(2)


def test_the_fingerprint_sees_every_bit_shape_type_and_split():
    x, y = images(4), labels(4)
    base = from_tensors(x, y, x, y)
    changed = x.clone()
    changed[2, 1, 3, 3] ^= 1
    others = [
        from_tensors(changed, y, x, y),
        from_tensors(x, y, changed, y),
        from_tensors(x, y.flip(0), x, y),
        from_tensors(x.reshape(4, 3, 4, 16), y, x.reshape(4, 3, 4, 16), y),
        from_tensors(x.float(), y, x.float(), y),
        from_tensors(x, y, x, y, validation=1),
    ]
    found = [base.fingerprint(), *(other.fingerprint() for other in others)]
    assert len(set(found)) == len(found)
    assert from_tensors(x.clone(), y, x, y, name="another name").fingerprint() == base.fingerprint()
    assert len(base.fingerprint()) == 16


def test_the_fingerprint_does_not_depend_on_the_layout_in_memory():
    x, y = images(4), labels(4)
    columns_first = x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    assert not columns_first.is_contiguous()
    assert from_tensors(columns_first, y, x, y).fingerprint() == from_tensors(x, y, x, y).fingerprint()


def test_the_public_names_are_those_of_the_package():
    for name in cs.data.__all__:
        assert getattr(cs.data, name) is not None
