import numpy
import pytest
import xarray

from creditscope.errors import UsageError
from creditscope.runs import StorageError, history
from tests.runs.disks import longest_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.nc"


@pytest.fixture
def dataset():
    norms = numpy.array([[1.0, numpy.nan], [numpy.inf, 1e-45]], dtype="float32")
    return xarray.Dataset(
        {
            "train_loss": ("epoch", [numpy.nan, 0.1], {"units": "nats"}),
            "state_norm": (("epoch", "layer"), norms, {"reduced": "median"}),
            "seconds": ("epoch", [0.5, 1.5], {"units": "seconds"}),
            "steps": ("epoch", numpy.array([0, 2**62])),
            "diverged": ("epoch", numpy.array([False, True])),
        },
        coords={"epoch": [0, 1], "block": ("layer", ["stem", "blocks.0 é"])},
        attrs={"rule": "dfa", "batch": 128},
    )


def test_what_goes_in_comes_out(path, dataset):
    history.save(path, dataset)
    found = history.load(path)
    assert found is not None
    xarray.testing.assert_identical(found, dataset)
    for name in dataset.variables:
        assert found[name].dtype == dataset[name].dtype or name == "block"
        assert repr(found[name].values.tolist()) == repr(dataset[name].values.tolist())


def test_what_is_loaded_does_not_depend_on_the_file(path, dataset):
    history.save(path, dataset)
    found = history.load(path)
    path.unlink()
    xarray.testing.assert_identical(found, dataset)


def test_two_savings_have_the_same_bytes(path, dataset):
    history.save(path, dataset)
    first = path.read_bytes()
    history.save(path, dataset)
    assert path.read_bytes() == first


def test_no_epoch_yet(path):
    history.save(path, xarray.Dataset({"loss": ("epoch", numpy.zeros(0))}))
    found = history.load(path)
    assert found is not None
    assert found["loss"].shape == (0,)


def test_none_where_there_is_none(path):
    assert history.load(path) is None


@pytest.mark.parametrize("length", [0, 4, 100, 3000, -1])
def test_cut_short(path, dataset, length):
    history.save(path, dataset)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UsageError, match=r"/history\.nc is corrupt or cut short: ") as caught:
        history.load(path)
    assert "\n" not in str(caught.value)


def test_a_disk_that_takes_a_part_leaves_the_history(path, dataset):
    history.save(path, dataset)
    larger = xarray.Dataset({"x": ("n", numpy.random.default_rng(0).normal(size=10_000))})
    with longest_file(4096), pytest.raises(StorageError, match="cannot be written"):
        history.save(path, larger)
    xarray.testing.assert_identical(history.load(path), dataset)
    assert list(path.parent.iterdir()) == [path]
