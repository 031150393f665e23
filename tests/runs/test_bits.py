import numpy
import pytest
import torch
import xarray

from creditscope.runs import RunDirectory, fingerprint


def made(path, *, weight=1.0, loss=0.5, seconds=1.0, tag="last", name="loss", dtype="float64", title="a", meta=0):
    dataset = xarray.Dataset(
        {name: ("epoch", numpy.array([loss], dtype=dtype), {"time": title}), "seconds": ("epoch", [seconds])},
        attrs={"started": title},
    )
    with RunDirectory.claim(path, {"seed": 1}) as run:
        run.save_checkpoint(tag, {"w": torch.tensor([weight])}, {"seconds": meta})
        run.write_history(dataset)
        run.log(title)
        return fingerprint(run)


@pytest.mark.parametrize("change", [{}, {"seconds": 2.0}, {"title": "b"}, {"meta": 1}, {"loss": 0.5}], ids=str)
def test_time_is_no_bit_of_a_run(tmp_path, change):
    assert made(tmp_path / "a") == made(tmp_path / "b", **change)


@pytest.mark.parametrize(
    "change",
    [{"weight": 1.0000001}, {"loss": 0.5 + 1e-16}, {"tag": "epoch-0000"}, {"name": "acc"}, {"dtype": "float32"}],
    ids=str,
)
def test_each_bit_counts(tmp_path, change):
    assert made(tmp_path / "a") != made(tmp_path / "b", **change)


def test_words_and_nan_have_bits_too(tmp_path):
    def made(path, words):
        with RunDirectory.claim(path, {}) as run:
            run.write_history(xarray.Dataset({"x": ("epoch", [numpy.nan])}, coords={"block": ("layer", words)}))
            return fingerprint(run)

    assert made(tmp_path / "a", ["p", "q"]) == made(tmp_path / "b", ["p", "q"])
    assert made(tmp_path / "a", ["p", "q"]) != made(tmp_path / "c", ["p", "r"])


def test_a_run_with_nothing_yet(tmp_path):
    with RunDirectory.claim(tmp_path / "a", {}) as run:
        assert len(fingerprint(run)) == 64
