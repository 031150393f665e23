import errno
import fcntl
import json
import os
import socket
import time

import pytest

from creditscope.runs import RunBusyError, RunDirectory, StorageError, lock
from creditscope.runs.lock import Lock, holder
from tests.runs import workers
from tests.runs.workers import Worker


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_one_holder_at_a_time(path):
    first = Lock(path)
    with pytest.raises(
        RunBusyError, match=f"{path.parent} is in use by process {os.getpid()} on {socket.gethostname()}, since 20"
    ):
        Lock(path)
    first.release()
    second = Lock(path)
    assert second.held
    assert not first.held
    second.release()
    assert not path.exists()


def test_released_twice_does_not_take_the_next_holders_lock(path):
    first = Lock(path)
    first.release()
    second = Lock(path)
    first.release()
    assert holder(path) is not None
    second.release()


def test_who_holds_it(path):
    assert holder(path) is None
    held = Lock(path)
    found = holder(path)
    assert found is not None
    assert (found.pid, found.host) == (os.getpid(), socket.gethostname())
    assert found.since.endswith("+00:00")
    held.release()
    assert holder(path) is None


def test_looking_harms_neither_the_holder_nor_the_file(path):
    held = Lock(path)
    text = path.read_bytes()
    for _ in range(3):
        holder(path)
    assert path.read_bytes() == text
    with pytest.raises(RunBusyError):
        Lock(path)
    held.release()


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff"])
def test_a_holder_that_has_not_said_who_it_is(path, text):
    held = Lock(path)
    path.write_bytes(text)
    with pytest.raises(RunBusyError, match=r"is in use by another process$"):
        Lock(path)
    found = holder(path)
    assert found is not None
    assert str(found) == "process 0 on an unknown host, since an unknown time"
    held.release()


def test_the_file_of_a_dead_process_locks_nothing(path):
    """Whatever it says: also the id of a process that lives, which has it by chance."""
    path.write_text(
        json.dumps({"pid": os.getppid(), "host": socket.gethostname(), "since": "2020-01-01T00:00:00+00:00"})
    )
    assert holder(path) is None
    held = Lock(path)
    found = holder(path)
    assert found is not None
    assert found.pid == os.getpid()
    held.release()


def test_a_reader_that_looks_just_now_is_waited_for(path, monkeypatch):
    path.touch()
    reader = os.open(path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    pauses = []

    def leave(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            os.close(reader)

    monkeypatch.setattr(time, "sleep", leave)
    Lock(path).release()
    assert len(pauses) == 2


def test_a_file_removed_between_opening_and_locking_is_not_the_lock(path, monkeypatch):
    """Its holder releases, another takes the new file: who locks the old one must not think that it has it."""
    first, others, open_locked = Lock(path), [], lock._open

    def open_late(*arguments, **options):
        descriptor = os.open(path, os.O_RDWR)  # the file of the first
        first.release()
        monkeypatch.setattr(lock, "_open", open_locked)
        others.append(Lock(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # succeeds: nobody has the removed file
        return descriptor

    monkeypatch.setattr(lock, "_open", open_late)
    with pytest.raises(RunBusyError):
        Lock(path)
    (other,) = others
    assert other.held
    other.release()


def test_a_disk_without_locks(path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    opened, closed, close = [], [], os.close
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(open_file(*arguments)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="/lock cannot be locked: No locks available"):
        Lock(path)
    assert opened == closed


def test_a_platform_without_locks(path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    with pytest.raises(StorageError, match="cannot be locked: this platform has no POSIX file locks"):
        Lock(path)


def test_a_lock_that_cannot_be_signed_is_let_go(path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(StorageError, match="/lock cannot be locked: the disk is full"):
            Lock(path)
    assert not path.exists()
    Lock(path).release()


# --- among processes --------------------------------------------------------------------------------------------------


def test_another_process_has_the_run(tmp_path):
    path = tmp_path / "run"
    worker = Worker(workers.hold, path)
    pid = worker.receive()
    with (
        pytest.raises(RunBusyError, match=rf"/run is in use by process {pid} on .+, since 20"),
        RunDirectory.claim(path, workers.OPTIONS),
    ):
        pass
    looked = RunDirectory.open(path)
    assert looked.status.state == "running"
    found = looked.holder
    assert found is not None
    assert found.pid == pid
    worker.kill()
    assert (looked.status.state, looked.status.epoch) == ("interrupted", 3)
    with RunDirectory.claim(path, workers.OPTIONS) as run:
        assert (run.status.state, run.status.epoch) == ("interrupted", 3)


def test_a_forked_child_does_not_keep_the_run_of_its_killed_parent(tmp_path):
    path = tmp_path / "run"
    worker = Worker(workers.hold_with_child, path)
    child = worker.receive()
    worker.kill()
    try:
        with RunDirectory.claim(path, workers.OPTIONS) as run:
            assert run.status.state == "new"
    finally:
        os.kill(child, 9)


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_claim_at_once_one_wins(tmp_path, stale):
    path = tmp_path / "run"
    if stale:
        killed = Worker(workers.hold, path)
        killed.receive()
        killed.kill()
        assert (path / "lock").exists()
    start = time.time() + 0.5
    competitors = [Worker(workers.compete, path, start) for _ in range(5)]
    said = [worker.receive() for worker in competitors]
    winner = competitors[said.index("won")].process.pid
    assert said.count("won") == 1
    for line in said:
        assert line == "won" or f"in use by process {winner} " in line
    for worker in competitors:
        worker.kill()


def test_many_that_come_and_go_never_meet(tmp_path):
    """The lock's file is removed at each release: none may take the removed one for the lock."""
    rounds, crowd = 100, [Worker(workers.come_and_go, tmp_path, 100) for _ in range(4)]
    entered = [worker.received() for worker in crowd]
    assert [worker.join() for worker in crowd] == [0] * len(crowd)
    assert all(0 < sum(times) <= rounds for times in entered)
    assert list(tmp_path.iterdir()) == []
