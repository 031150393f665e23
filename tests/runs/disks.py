"""Disks that refuse: a small one and a read-only one where this process may mount, the nearest thing elsewhere."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this process may not mount a disk: {done.stderr.splitlines()[0]}")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    if not Path("/proc/mounts").exists() or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    _mount("--bind", str(folder), str(folder))  # root may write wherever a disk lets it
    try:
        _mount("-o", "remount,ro,bind", str(folder))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """Let each write fail that makes a file longer, after it has written what fits, as a disk does that fills up."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
