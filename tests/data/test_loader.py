"""The loader against a slow one that looks at every example, and the promises about its bits."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope.data import Dataset, Loader, from_tensors
from creditscope.data.loader import PADDING
from creditscope.errors import UsageError
from creditscope.rng import stream

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images(examples: int = 23, *, augment="crop-flip", mean=MEAN, std=STD, height: int = 8, width: int = 10) -> Dataset:
    """Images of which no two and no two of whose pixels are alike, as far as bytes go."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, 3, height, width), dtype=torch.uint8, generator=generator)
    y = torch.arange(examples)
    return from_tensors(x, y, x, y, augment=augment, mean=mean, std=std)


def vectors(examples: int = 23) -> Dataset:
    x = torch.randn(examples, 5, generator=torch.Generator().manual_seed(0))
    return from_tensors(x, torch.arange(examples), x, torch.arange(examples))


def loader(data: Dataset, batch: int = 5, **options) -> Loader:
    return Loader(data.train, dataset=data, batch=batch, **options)


def slow_epoch(data: Dataset, seed: int, epoch: int) -> list[tuple[Tensor, int]]:
    """An epoch, one example at a time, by what torchvision's transforms say: pad, crop, flip, to tensor, normalise."""
    n, (_, height, width) = len(data.train), data.shape
    order = torch.randperm(n, generator=stream(seed, "order", epoch))
    corners = torch.randint(0, 2 * PADDING + 1, (2, n), generator=stream(seed, "crop", epoch))
    flips = torch.rand(n, generator=stream(seed, "flip", epoch)) < 0.5
    examples = []
    for place, row in enumerate(order.tolist()):
        padded = torch.zeros(3, height + 2 * PADDING, width + 2 * PADDING, dtype=torch.uint8)
        padded[:, PADDING : PADDING + height, PADDING : PADDING + width] = data.train.x[row]
        top, left = corners[:, place].tolist()
        image = padded[:, top : top + height, left : left + width].double() / 255
        if flips[place]:
            image = image.flip(2)
        for channel in range(3):
            image[channel] = (image[channel] - MEAN[channel]) / STD[channel]
        examples.append((image, int(data.train.y[row])))
    return examples


def joined(batches) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (42, 7)])
def test_an_augmented_epoch_is_the_slow_one(seed, epoch):
    data = images()
    x, y = joined(loader(data, dtype=torch.float64).epoch(seed, epoch))
    slow = slow_epoch(data, seed, epoch)
    assert y.tolist() == [label for _, label in slow]
    torch.testing.assert_close(x, torch.stack([image for image, _ in slow]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_other_types(dtype, atol):
    data = images()
    x, _ = joined(loader(data, dtype=dtype).epoch(0, 0))
    assert x.dtype == dtype
    slow = torch.stack([image for image, _ in slow_epoch(data, 0, 0)])
    torch.testing.assert_close(x.double(), slow, rtol=0, atol=atol)


def test_a_low_precision_type_is_rounded_once():
    data = images()
    exact, rounded = (joined(loader(data, dtype=dtype).epoch(0, 0))[0] for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.bfloat16(), rounded)


def test_floating_point_images_are_cropped_and_flipped_alike():
    """By the same draws, as the bytes are; their mean and std are in their own units."""
    bytes_ = images()
    x, y = bytes_.train.x / 255, bytes_.train.y
    floats = from_tensors(x, y, x, y, augment="crop-flip", mean=MEAN, std=STD)
    torch.testing.assert_close(
        joined(loader(floats, dtype=torch.float64).epoch(3, 1))[0],
        joined(loader(bytes_, dtype=torch.float64).epoch(3, 1))[0],
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("data", [images(), images(augment="none"), vectors()], ids=["augmented", "plain", "vectors"])
class TestEveryKind:
    def test_every_example_comes_once_an_epoch(self, data):
        for epoch in range(3):
            _, y = joined(loader(data).epoch(0, epoch))
            assert sorted(y.tolist()) == list(range(len(data.train)))

    def test_the_same_seed_gives_the_same_bits(self, data):
        x, y = joined(loader(data).epoch(5, 2))
        x2, y2 = joined(loader(data).epoch(5, 2))
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)

    def test_seeds_and_epochs_differ(self, data):
        orders = {tuple(joined(loader(data).epoch(seed, epoch))[1].tolist()) for seed in (0, 1) for epoch in (0, 1)}
        assert len(orders) == 4

    @pytest.mark.parametrize("batch", [1, 4, 23])
    def test_the_batch_size_does_not_change_what_comes(self, data, batch):
        x, y = joined(loader(data).epoch(0, 0))
        x2, y2 = joined(loader(data, batch).epoch(0, 0))
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)

    @pytest.mark.parametrize("skip", range(6))
    def test_skipping_is_slicing(self, data, skip):
        whole = list(loader(data).epoch(1, 1))
        rest = list(loader(data).epoch(1, 1, skip=skip))
        assert len(rest) == len(whole) - skip
        for (x, y), (x2, y2) in zip(whole[skip:], rest, strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)

    @pytest.mark.parametrize(("drop_last", "sizes"), [(False, [5, 5, 5, 5, 3]), (True, [5, 5, 5, 5])])
    def test_the_last_batch(self, data, drop_last, sizes):
        made = loader(data, drop_last=drop_last)
        assert [len(y) for _, y in made.epoch(0, 0)] == sizes
        assert len(made) == len(sizes)
        assert made.examples == sum(sizes)
        assert sum(len(y) for _, y in made.ordered()) == 23, "evaluation leaves nothing out"

    def test_ordered_is_the_split_as_it_is(self, data):
        x, y = joined(loader(data).ordered())
        assert torch.equal(y, data.train.y)
        expected = data.train.x.double()
        if data.mean is not None:
            expected = (expected / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-6)

    def test_batches_may_be_written_into(self, data):
        before = data.fingerprint()
        made = loader(data)
        kept = joined((x.clone(), y) for x, y in made.ordered())[0]
        for x, _ in itertools.chain(made.ordered(), made.epoch(0, 0)):
            x.zero_()
        assert torch.equal(joined(made.ordered())[0], kept)
        assert Dataset(data.name, data.train, data.test, data.classes).fingerprint() == before

    @pytest.mark.usefixtures("untouched_rng")
    def test_a_generator_of_the_user(self, data):
        x, y = joined(loader(data).batches(torch.Generator().manual_seed(3)))
        x2, y2 = joined(loader(data).batches(torch.Generator().manual_seed(3)))
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
        rest = joined(loader(data).batches(torch.Generator().manual_seed(3), skip=2))
        assert torch.equal(rest[1], y[10:])


@pytest.mark.usefixtures("untouched_rng")
def test_epochs_may_be_had_in_any_order_and_at_once():
    made = loader(images())
    third, second = made.epoch(0, 3), made.epoch(0, 2)
    together = [(next(third)[1], next(second)[1]) for _ in range(5)]
    assert torch.equal(torch.cat([pair[0] for pair in together]), joined(made.epoch(0, 3))[1])
    assert torch.equal(torch.cat([pair[1] for pair in together]), joined(made.epoch(0, 2))[1])


def test_draws_are_spread_over_all_offsets_and_both_sides():
    """An image with one bright pixel shows where it was cut: 81 offsets, half of them flipped."""
    n, size = 20_000, 9
    x = torch.zeros(n, 1, size, size, dtype=torch.uint8)
    x[:, 0, 4, 4] = 255  # in the middle, so that it is never cut off
    y = torch.zeros(n, dtype=torch.int64)
    data = from_tensors(x, y, x[:1], y[:1], augment="crop-flip")
    seen, _ = joined(Loader(data.train, dataset=data, batch=1000).epoch(0, 0))
    counts = seen.sum((0, 1))
    assert counts.sum() == n
    expected = n / size**2
    assert ((counts - expected) ** 2 / expected).sum() < 130, "chi-square of 80 degrees, p < 4e-4"


def test_half_of_the_images_are_flipped():
    n = 20_000
    x = torch.arange(16, dtype=torch.uint8).repeat(n, 1, 16, 1)  # grows to the right
    y = torch.zeros(n, dtype=torch.int64)
    data = from_tensors(x, y, x[:1], y[:1], augment="crop-flip")
    seen, _ = joined(Loader(data.train, dataset=data, batch=1000).epoch(0, 0))
    flipped = seen[:, 0, 8, 7] > seen[:, 0, 8, 8]
    assert abs(flipped.float().mean() - 0.5) < 0.015, "more than four standard errors"


def test_the_layout_of_the_data_in_memory_does_not_matter():
    data = images()
    x = data.train.x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not x.is_contiguous()
    turned = from_tensors(x, data.train.y, x, data.train.y, augment="crop-flip", mean=MEAN, std=STD)
    for augment in ("crop-flip", "none"):
        expected, found = (joined(loader(each, augment=augment).epoch(0, 0)) for each in (data, turned))
        assert torch.equal(expected[0], found[0])
    assert all(x.is_contiguous() for made in (loader(turned),) for x, _ in (*made.epoch(0, 0), *made.ordered()))


def test_other_devices_get_batches_that_the_cpu_made():
    made = loader(images(), device="meta")
    for batches in (made.epoch(0, 0), made.ordered()):
        sizes = [(x.device.type, y.device.type, tuple(x.shape)) for x, y in batches]
        assert sizes == [("meta", "meta", (size, 3, 8, 10)) for size in (5, 5, 5, 5, 3)]


def test_augmentation_can_be_left_out():
    data = images()
    plain = joined(loader(data, augment="none").epoch(0, 0))[0]
    assert torch.equal(plain, joined(loader(images(augment="none")).epoch(0, 0))[0])


def test_bytes_without_a_mean_are_between_0_and_1():
    data = images(augment="none", mean=None, std=None)
    x, _ = joined(loader(data, dtype=torch.float64).ordered())
    torch.testing.assert_close(x, data.train.x.double() / 255)


@given(
    examples=st.integers(1, 40),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
    rest=st.data(),
)
def test_any_size_keeps_the_promises(examples, height, width, seed, rest):
    data = images(examples, height=height, width=width)
    made = loader(data, rest.draw(st.integers(1, examples)), dtype=torch.float64)
    skip = rest.draw(st.integers(0, len(made)))
    slow = slow_epoch(data, seed, 0)[skip * made.batch :]
    batches = list(made.epoch(seed, 0, skip=skip))
    assert len(batches) == len(made) - skip
    if batches:
        x, y = joined(batches)
        assert y.tolist() == [label for _, label in slow]
        torch.testing.assert_close(x, torch.stack([image for image, _ in slow]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 24}, "a batch of 24 is larger than the set of 23 examples"),
        ({"batch": 0}, "batch must be a whole number of at least 1, not 0"),
        ({"batch": 2.5}, "batch must be a whole number of at least 1, not 2.5"),
        ({"augment": "crops"}, "unknown augmentation 'crops': did you mean 'crop-flip'"),
        ({"dtype": torch.int64}, "dtype must be a floating point type, not int64"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        loader(images(), **options)


def test_augmentation_of_vectors_is_refused():
    with pytest.raises(UsageError, match=r"'crop-flip' is for images \(C, H, W\), not for inputs of \(5,\)"):
        loader(vectors(), augment="crop-flip")


@pytest.mark.parametrize("skip", [-1, 6])
def test_skipping_past_the_end_is_refused_at_the_call(skip):
    with pytest.raises(UsageError, match=f"skip={skip} is not a batch of an epoch of 5 batches"):
        loader(images()).epoch(0, 0, skip=skip)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("data", [images(300), images(300, augment="none"), vectors(300)])
def test_a_gpu_gets_the_bits_of_the_cpu_and_is_never_waited_for(data):
    made = loader(data, 7, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = [*made.epoch(0, 0, skip=2), *made.ordered()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    here = loader(data, 7)
    for (x, y), (x2, y2) in zip(there, [*here.epoch(0, 0, skip=2), *here.ordered()], strict=True):
        assert torch.equal(y.cpu(), y2)
        assert torch.equal(x.cpu(), x2)
