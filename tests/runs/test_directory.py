import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import xarray

from creditscope.errors import MissingError, UsageError
from creditscope.runs import (
    STATES,
    OptionsDifferError,
    RunBusyError,
    RunDirectory,
    Status,
    StorageError,
    files,
)
from tests.runs.disks import longest_file, read_only, small_disk

OPTIONS = {"seed": 1, "recipe": {"lr": 0.001}, "keep": (0, "last")}


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "dfa"


@pytest.fixture
def finished(path):
    with RunDirectory.claim(path, OPTIONS, {"threads": 1}) as run:
        run.write_status("running", epoch=1)
        run.save_checkpoint("epoch-0000", {"w": torch.zeros(2)}, {"epoch": 0})
        run.save_checkpoint("last", {"w": torch.ones(2)}, {"epoch": 1})
        run.write_history(xarray.Dataset({"loss": ("epoch", [0.5])}))
        run.log("done")
        run.write_status("finished", epoch=1, loss=0.5)
    return path


def refusal(kind, path, options=OPTIONS):
    """Return the one line with which a claim is refused, having seen that the disk is as before."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(kind) as caught, RunDirectory.claim(path, options):
        raise AssertionError("it was claimed")
    assert "\n" not in str(caught.value)
    assert sorted(path.parent.rglob("*")) == before
    return str(caught.value)


# --- a run's life -----------------------------------------------------------------------------------------------------


def test_a_new_run(path):
    with RunDirectory.claim(path, OPTIONS) as run:
        assert run.status == Status("new", 0, {})
        assert run.options == {"seed": 1, "recipe": {"lr": 0.001}, "keep": [0, "last"]}
        assert run.environment is None
        assert run.history() is None
        assert run.checkpoints() == []
        assert run.load_checkpoint("last") is None
        assert run.holder is not None
    assert sorted(tree(path)) == ["options.json"]


def test_the_files_of_a_finished_run(finished):
    assert sorted(tree(finished)) == [
        "checkpoints/epoch-0000.safetensors",
        "checkpoints/last.safetensors",
        "environment.json",
        "history.nc",
        "log.txt",
        "options.json",
        "status.json",
    ]


def test_what_was_written_is_there_for_who_looks(finished):
    run = RunDirectory.open(finished)
    assert run.status == Status("finished", 1, {"loss": 0.5})
    assert run.status.ended
    assert run.holder is None
    assert run.environment == {"threads": 1}
    assert run.checkpoints() == ["epoch-0000", "last"]
    tensors, meta = run.load_checkpoint("last") or ({}, {})
    assert torch.equal(tensors["w"], torch.ones(2))
    assert meta == {"epoch": 1}
    found = run.history()
    assert found is not None
    assert found["loss"].item() == 0.5


def test_a_claim_of_a_finished_run_changes_nothing(finished):
    before = tree(finished)
    times = {name: (finished / name).stat().st_mtime_ns for name in before}
    with RunDirectory.claim(finished, OPTIONS, {"threads": 2}) as run:
        assert run.status.ended
    assert tree(finished) == before
    assert {name: (finished / name).stat().st_mtime_ns for name in before} == times


@pytest.mark.parametrize("state", STATES)
def test_every_state(path, state):
    with RunDirectory.claim(path, OPTIONS) as run:
        run.write_status(state, epoch=4, step=17, tensor="blocks.0", loss=float("inf"))
        assert run.status == Status(state, 4, {"step": 17, "tensor": "blocks.0", "loss": float("inf")})
        assert run.status.ended == (state in ("finished", "diverged"))


def test_an_unknown_state(path):
    with RunDirectory.claim(path, OPTIONS) as run, pytest.raises(UsageError, match="did you mean 'finished'"):
        run.write_status("finish", epoch=1)


def test_a_run_that_was_left_running_is_interrupted(path):
    def break_off(run):
        run.write_status("running", epoch=2, step=5)
        assert RunDirectory.open(path).status.state == "running"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), RunDirectory.claim(path, OPTIONS) as run:
        break_off(run)
    assert run.status == RunDirectory.open(path).status == Status("interrupted", 2, {"step": 5})
    with RunDirectory.claim(path, OPTIONS) as run:
        assert run.status == Status("interrupted", 2, {"step": 5})


def test_a_second_claim_in_this_process(path):
    with RunDirectory.claim(path, OPTIONS) as run:
        assert f"in use by process {os.getpid()} on" in refusal(RunBusyError, path)
        run.write_status("running", epoch=1)


def test_an_empty_folder_becomes_a_run(path):
    path.mkdir(parents=True)
    with RunDirectory.claim(str(path), OPTIONS) as run:
        assert run.path == path
    assert sorted(tree(path)) == ["options.json"]


def test_a_folder_left_by_a_claim_that_was_killed_at_once(path):
    path.mkdir(parents=True)
    (path / "lock").write_text("{")
    files.temporary(path / "options.json").write_text('{"format')
    with RunDirectory.claim(path, OPTIONS):
        pass
    assert sorted(tree(path)) == ["options.json"]


def test_leftovers_of_a_killed_process_are_removed(finished):
    before = tree(finished)
    for name in ["checkpoints/last.safetensors", "history.nc", "status.json"]:
        files.temporary(finished / name).write_bytes(b"half")
    with RunDirectory.claim(finished, OPTIONS):
        pass
    assert tree(finished) == before


# --- options and environment ------------------------------------------------------------------------------------------


def test_other_options(finished):
    line = refusal(OptionsDifferError, finished, {**OPTIONS, "recipe": {"lr": 0.0003}, "seed": 2})
    assert (
        line
        == f"{finished} was started with other options: seed: 1 there, 2 given; recipe.lr: 0.001 there, 0.0003 given"
    )


def test_another_environment_is_told_once_by_the_log(path):
    with RunDirectory.claim(path, OPTIONS, {"torch": "2.13", "threads": (1, 2)}):
        pass
    for _ in range(2):
        with RunDirectory.claim(path, OPTIONS, {"torch": "2.13", "threads": (1, 2)}):
            pass
    assert not (path / "log.txt").exists()
    with RunDirectory.claim(path, OPTIONS, {"torch": "2.14", "threads": (1, 2)}) as run:
        assert run.environment == {"torch": "2.13", "threads": [1, 2]}
    assert (
        (path / "log.txt").read_text().endswith('goes on in another environment: torch: "2.13" there, "2.14" given\n')
    )


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_file_where_the_folder_should_be(path):
    path.parent.mkdir()
    path.touch()
    assert refusal(UsageError, path) == f"{path} is a file where a folder should be"
    assert refusal(UsageError, path / "deeper" / "run") == f"{path} is a file where a folder should be"


def test_a_folder_with_something_else(path):
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("...")
    assert refusal(UsageError, path) == f"{path} is no run and not empty (it holds thesis.tex): choose another folder"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "options.json is corrupt: it is not JSON"),
        ("{}", "options.json is not from creditscope"),
        ('{"format": "creditscope.run", "version": 2, "options": {}}', "options.json is in format 2 of a newer"),
        ('{"format": "creditscope.run", "version": 1}', "options.json is corrupt: it holds no options"),
    ],
)
def test_options_that_cannot_be_read(finished, text, message):
    (finished / "options.json").write_text(text)
    assert message in refusal(UsageError, finished)
    with pytest.raises(UsageError, match=message):
        RunDirectory.open(finished)


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"state": "fine", "epoch": 1, "detail": {}},
        {"state": "new", "epoch": "1", "detail": {}},
        {"state": "new", "epoch": 1},
    ],
)
def test_a_status_that_cannot_be_read(finished, stored):
    (finished / "status.json").write_text(json.dumps(stored))
    assert "status.json is corrupt: it holds no status" in refusal(UsageError, finished)


def test_options_that_json_does_not_take_leave_no_folder(path):
    with pytest.raises(TypeError), RunDirectory.claim(path, {"rule": object()}):
        pass
    assert not path.exists()


def test_looking_where_nothing_is(tmp_path):
    with pytest.raises(MissingError) as caught:
        RunDirectory.open(tmp_path / "none")
    assert str(caught.value) == f"not found: {tmp_path / 'none'}"


def test_looking_at_what_is_no_run(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match=f"{path} is not a run: it holds no options.json"):
            RunDirectory.open(path)


def test_who_looks_cannot_write(finished):
    before = tree(finished)
    run = RunDirectory.open(finished)
    with RunDirectory.claim(finished, OPTIONS) as released:
        pass
    for reader in (run, released):
        for write in (
            lambda run: run.write_status("running", epoch=1),
            lambda run: run.save_checkpoint("last", {}, {}),
            lambda run: run.delete_checkpoint("last"),
            lambda run: run.write_history(xarray.Dataset()),
            lambda run: run.log("x"),
        ):
            with pytest.raises(UsageError, match="is open for looking only: claim it to write"):
                write(reader)
    assert tree(finished) == before


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_tag_names_its_latest_checkpoint(path):
    with RunDirectory.claim(path, OPTIONS) as run:
        for epoch in range(3):
            run.save_checkpoint("last", {"w": torch.full((2,), float(epoch))}, {"epoch": epoch})
        run.save_checkpoint("best.v1", {}, {})
        assert run.checkpoints() == ["best.v1", "last"]
        tensors, meta = run.load_checkpoint("last") or ({}, {})
        assert (tensors["w"].tolist(), meta) == ([2.0, 2.0], {"epoch": 2})
        run.delete_checkpoint("best.v1")
        run.delete_checkpoint("best.v1")
        assert run.checkpoints() == ["last"]
    assert [file.name for file in (path / "checkpoints").iterdir()] == ["last.safetensors"]


@pytest.mark.parametrize("tag", ["", "../last", "a/b", ".hidden", "a b", "-x", "a\n"])
def test_what_is_no_tag(finished, tag):
    with pytest.raises(UsageError, match="is no tag of a checkpoint"):
        RunDirectory.open(finished).load_checkpoint(tag)


# --- disks that refuse ------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_run_as_it_was(tmp_path):
    with small_disk(tmp_path, "128k"):
        path = tmp_path / "run"
        with RunDirectory.claim(path, OPTIONS) as run:
            run.save_checkpoint("last", {"w": torch.ones(2)}, {"epoch": 1})
            run.write_status("running", epoch=1)
            with pytest.raises(StorageError, match="the disk is full"):
                run.save_checkpoint("last", {"w": torch.zeros(100_000)}, {"epoch": 2})
            fill(tmp_path / "filler")
            with pytest.raises(StorageError, match="the disk is full"):
                run.write_status("failed", epoch=2)
            run.log("is told later")
            (tmp_path / "filler").unlink()
            run.log("there is room again")
            assert run.status == Status("running", 1, {})
            assert (run.load_checkpoint("last") or ({}, {}))[1] == {"epoch": 1}
        assert sorted(tree(path)) == ["checkpoints/last.safetensors", "log.txt", "options.json", "status.json"]
        log = (path / "log.txt").read_text()
        assert log.endswith("there is room again (1 lines before this could not be written)\n")
        assert "is told later" not in log


def fill(path):
    """Take all the room there is on a disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_new_run_on_a_full_disk_leaves_no_folder(tmp_path):
    with small_disk(tmp_path, "64k"):
        fill(tmp_path / "filler")
        assert "the disk is full" in refusal(StorageError, tmp_path / "run")


def test_a_disk_that_takes_a_part_leaves_no_folder(path):
    path.parent.mkdir()
    with longest_file(200):
        assert "options.json cannot be written: File too large" in refusal(StorageError, path, {"long": "x" * 1000})


def test_a_log_that_cannot_be_written_stops_nothing(path):
    with RunDirectory.claim(path, OPTIONS) as run:
        (path / "log.txt").mkdir()
        run.log("one")
        run.log("two")
        (path / "log.txt").rmdir()
        run.log("three")
        run.log("four")
    lines = (path / "log.txt").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["three (2 lines before this could not be written)", "four"]
    assert all(line.partition(" ")[0].endswith("+00:00") for line in lines)


def test_a_read_only_disk(finished):
    with read_only(finished.parent):
        assert "cannot be made: " in refusal(StorageError, finished.parent / "other")
        assert "cannot be locked: " in refusal(StorageError, finished)
        looked = RunDirectory.open(finished)
        assert looked.status.state == "finished"
        assert looked.load_checkpoint("last") is not None


def test_a_folder_removed_while_it_was_claimed(path):
    with RunDirectory.claim(path, OPTIONS) as run:
        (path / "options.json").unlink()
        (path / "lock").unlink()
        path.rmdir()
        with pytest.raises(StorageError, match="No such file or directory"):
            run.write_status("running", epoch=1)


# --- light ------------------------------------------------------------------------------------------------------------


def test_looking_loads_no_torch(finished):
    code = (
        "import sys; from creditscope.runs import RunDirectory; run = RunDirectory.open(sys.argv[1]);"
        "run.status, run.options, run.environment, run.checkpoints(), run.holder; assert 'xarray' not in sys.modules;"
        "run.history(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(finished)], check=True)
