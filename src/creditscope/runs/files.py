"""Files that are whole or not there: each is written to a temporary file beside it, then moved to its place at once."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError, UsageError

_REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


class StorageError(CreditscopeError):
    """The disk refused: it is full, read-only, not ours, or broken."""


@contextmanager
def one_line(path: Path, verb: str = "written") -> Iterator[None]:
    """Say in one line what the file system refused."""
    try:
        yield
    except CreditscopeError:
        raise
    except OSError as error:
        reason = _REFUSALS.get(error.errno or 0) or error.strerror or str(error)
        raise StorageError(f"{path} cannot be {verb}: {reason}") from error


def temporary(path: Path) -> Path:
    """Return the name under which a file is prepared. It is fixed, so kills cannot pile up leftovers."""
    return path.with_name(f".{path.name}.tmp")


def sweep(folder: Path) -> None:
    """Remove what killed writes have left in a folder. Only for who has claimed it."""
    with one_line(folder):
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Put the data in place of a file, in one step; where that fails, the file stays as it was.

    The data is on the disk before it gets its name. The new name itself may be lost in a power cut, and the older
    file, whole as well, is then still there; so the folder need not be synchronised too.
    """
    prepared = temporary(path)
    with one_line(path):
        try:
            with prepared.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            prepared.replace(path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                prepared.unlink(missing_ok=True)
            raise


def read_bytes(path: Path) -> bytes | None:
    """Return what a file holds, or None where there is none."""
    with one_line(path, "read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object for people and programs, with NaN and Infinity as Python writes them."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None where there is no file."""
    data = read_bytes(path)
    if data is None:
        return None
    try:
        return json_object(data)
    except ValueError as error:
        raise UsageError(f"{path} is corrupt: {error}") from error


def json_object(data: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text is, or raise a ValueError that says what it is instead."""
    try:
        value = json.loads(data)
    except ValueError as error:  # also of bytes that are no UTF-8
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def check_format(path: Path, *, found: object, version: object, ours: str, latest: int) -> None:
    """Refuse a file that is not ours, or that a newer creditscope has written in a newer format."""
    if found != ours:
        raise UsageError(f"{path} is not from creditscope: it does not say '{ours}'")
    if not str(version).isdecimal():
        raise UsageError(f"{path} is corrupt: it has no format version")
    if int(str(version)) > latest:
        raise UsageError(f"{path} is in format {version} of a newer creditscope; this one reads up to {latest}")
