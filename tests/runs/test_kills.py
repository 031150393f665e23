"""Killed at every step and at random moments, a run ends with the bits and the files of an undisturbed one."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from creditscope.runs import RunDirectory, fingerprint
from tests.runs import workers
from tests.runs.workers import Worker

NEVER = -1


def files_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def undisturbed(path: Path, *, epochs: int, size: int) -> str:
    worker = Worker(workers.train, path, epochs, size, NEVER)
    assert worker.received() == list(range(epochs))
    assert worker.join() == 0
    return fingerprint(RunDirectory.open(path))


def assert_same(path: Path, whole: Path, bits: str) -> None:
    run = RunDirectory.open(path)
    assert run.status.state == "finished"
    assert fingerprint(run) == bits
    assert files_of(path) == files_of(whole)


def test_a_kill_before_any_touch_of_a_file(tmp_path):
    whole = tmp_path / "whole"
    bits = undisturbed(whole, epochs=2, size=4)
    for moment in range(200):
        path = tmp_path / str(moment)
        killed = Worker(workers.train, path, 2, 4, moment)
        said = killed.received()
        if killed.join() == 0:
            break
        assert killed.process.exitcode == -signal.SIGKILL
        resumed = workers.Said()
        workers.train(resumed, path, 2, 4, NEVER)
        assert resumed.messages in (list(range(len(said), 2)), list(range(len(said) + 1, 2)))
        assert_same(path, whole, bits)
    assert moment > 25  # as many moments were tried


def test_killed_at_each_step_of_its_way(tmp_path):
    """Each start gets a little further than the one before, as on a machine that keeps failing."""
    whole, path = tmp_path / "whole", tmp_path / "path"
    bits = undisturbed(whole, epochs=2, size=4)
    kills = 0
    for moment in range(0, 400, 5):
        worker = Worker(workers.train, path, 2, 4, moment)
        worker.received()
        if worker.join() == 0:
            break
        kills += 1
    assert kills > 2
    assert_same(path, whole, bits)


def kill_at_random(folder: Path, *, kills: int, epochs: int, size: int, seed: int) -> None:
    draw = random.Random(seed)
    whole, path = folder / "whole", folder / "path"
    bits = undisturbed(whole, epochs=epochs, size=size)
    committed, killed = -1, 0
    while killed < kills:
        worker = Worker(workers.train, path, epochs, size, NEVER)
        for _ in range(draw.randrange(1, max(2, epochs // kills))):
            committed = max(committed, worker.receive())
        worker.process.join(draw.uniform(0, 0.03))
        worker.kill()
        killed += worker.process.exitcode == -signal.SIGKILL
        committed = max([committed, *worker.received()])
        loaded = RunDirectory.open(path).load_checkpoint("last")
        assert loaded is not None
        _, losses = workers.resumed(*loaded)
        assert len(losses) - 1 in (committed, committed + 1)  # what was said to be saved is there
        if committed >= epochs - 2:
            break
    assert killed > kills // 2
    last = Worker(workers.train, path, epochs, size, NEVER)
    last.received()
    assert last.join() == 0
    assert_same(path, whole, bits)


def test_killed_at_random_moments(tmp_path):
    kill_at_random(tmp_path, kills=4, epochs=24, size=10_000, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_many_random_moments(tmp_path, seed):
    kill_at_random(tmp_path, kills=25, epochs=150, size=1_000_000, seed=seed)
