"""The record of what a run ran on: with the same record, the same seed gives the same bits."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from creditscope import __version__


def environment(
    *, device: torch.device | str = "cpu", folder: str | Path | None = None, **extra: Any
) -> dict[str, Any]:
    """Return versions, machine, device, threads and determinism, as JSON takes them.

    ``folder``, of a study's file say, adds its git commit, where it lies in a repository; ``extra`` is added as it is.
    """
    record = {
        "versions": _versions(),
        "machine": _machine(),
        "device": _device(torch.device(device)),
        "torch": _flags(),
    }
    if folder is not None:
        record["git"] = _git(Path(folder))
    return {**record, **extra}


def _versions() -> dict[str, str | None]:
    return {
        "creditscope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
    }


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # they decide the bits too
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _device(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"type": device.type, "name": name}


def _flags() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a folder and whether tracked files differ from it; None outside git, or without it."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    # Untracked files do not count: the runs themselves often lie in the repository.
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # looking must not write into the repository
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
