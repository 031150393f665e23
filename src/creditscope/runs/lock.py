"""One process at a time: a lock that the kernel releases when its holder dies, so none is ever stale.

The lock is ``flock`` on a file that stays open; the file's text only says who holds it. A process that is killed,
however hard, thereby gives the lock up, and no process id is compared, so one that is used again fools nobody. On a
network file system this holds among hosts as far as ``flock`` is passed on (NFS on Linux does so, unless it is mounted
with ``nolock`` or ``local_lock``; Lustre with ``-o flock``); one that has no locks at all is refused in one line.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from creditscope.errors import CreditscopeError
from creditscope.runs.files import one_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# A reader that looks whether a run is held has it for an instant; so does one that has just let go of it.
_ATTEMPTS = 20
_PAUSE = 0.025  # seconds


class RunBusyError(CreditscopeError):
    """Another process works on the run."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: a process, its host, and since when (UTC)."""

    pid: int
    host: str
    since: str

    @classmethod
    def ourselves(cls) -> Holder:
        """Return this process."""
        return cls(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """A lock file that this process holds until :meth:`release`, or until its death."""

    def __init__(self, path: Path):
        """Take the lock, or raise :class:`RunBusyError` that says who has it."""
        self._path = path
        self._descriptor: int | None = None
        with one_line(path, "locked"):
            self._descriptor = descriptor = _take(path)
            _held.add(self)
            try:
                _sign(descriptor)
            except BaseException:
                self.release()
                raise

    @property
    def held(self) -> bool:
        """Whether the lock is still ours."""
        return self._descriptor is not None

    def release(self) -> None:
        """Remove the file and let go, in this order: who has opened the removed file sees that it is not there."""
        if self.held:
            with suppress(OSError):  # the folder may be gone, or its disk; the kernel's lock goes all the same
                self._path.unlink()
            self.drop()

    def drop(self) -> None:
        """Close the file and leave it there: what a forked child does with the lock of its parent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop()


if hasattr(
    os, "register_at_fork"
):  # a forked child shares the open file, and would hold the lock after its parent's death
    os.register_at_fork(after_in_child=_drop_all)


def holder(path: Path) -> Holder | None:
    """Return who holds the lock, or None where nobody does; takes it for an instant, beside other readers."""
    with one_line(path, "read"):
        try:
            descriptor = _open(path, os.O_RDONLY, exclusive=False)
        except FileNotFoundError:
            return None
    if descriptor is None:
        return _read(path) or Holder(0, "an unknown host", "an unknown time")
    os.close(descriptor)
    return None


def _take(path: Path) -> int:
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE)
        descriptor = _open(path, os.O_RDWR | os.O_CREAT, exclusive=True)
        if descriptor is not None:
            if _stands(descriptor, path):
                return descriptor
            os.close(descriptor)
    raise RunBusyError(f"{path.parent} is in use by {_read(path) or 'another process'}")


def _open(path: Path, flags: int, *, exclusive: bool) -> int | None:
    """Open a file and lock it, without waiting; None where another process has it locked."""
    descriptor = os.open(path, flags, 0o644)
    try:
        _flock(descriptor, exclusive=exclusive)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _flock(descriptor: int, *, exclusive: bool) -> None:
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this platform has no POSIX file locks")
    fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def _stands(descriptor: int, path: Path) -> bool:
    """Whether the opened file is the one that stands there now, not one that its holder has removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(asdict(Holder.ourselves())).encode())


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # gone, or not yet written: nothing but a message depends on the text
        return None
