"""The run directory: a run on disk, whole at any moment. Nothing of it loads torch but checkpoints and environments."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from creditscope.runs.bits import fingerprint
    from creditscope.runs.directory import STATES, RunDirectory, Status
    from creditscope.runs.files import StorageError
    from creditscope.runs.lock import Holder, RunBusyError
    from creditscope.runs.machine import environment
    from creditscope.runs.options import OptionsDifferError
    from creditscope.runs.state import flatten, unflatten

# name -> the module it lives in; resolved on first use
_PUBLIC = {
    "STATES": "directory",
    "Holder": "lock",
    "OptionsDifferError": "options",
    "RunBusyError": "lock",
    "RunDirectory": "directory",
    "Status": "directory",
    "StorageError": "files",
    "environment": "machine",
    "fingerprint": "bits",
    "flatten": "state",
    "unflatten": "state",
}

__all__ = [
    "STATES",
    "Holder",
    "OptionsDifferError",
    "RunBusyError",
    "RunDirectory",
    "Status",
    "StorageError",
    "environment",
    "fingerprint",
    "flatten",
    "unflatten",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"creditscope.runs.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'creditscope.runs' has no attribute '{name}'")
