"""The bits of a run as one number, to compare two runs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy

from creditscope.runs import checkpoint
from creditscope.runs import history as netcdf

if TYPE_CHECKING:
    import xarray

    from creditscope.runs.directory import RunDirectory

_WALL_TIME = "seconds"  # the one variable that two equal runs do not share


def fingerprint(run: RunDirectory) -> str:
    """Return the SHA-256 of a run's bits: its checkpoints' tensors, and the values of its history and of its audit.

    Seconds are no part of them.
    """
    sha = hashlib.sha256()
    for tag in run.checkpoints():
        loaded = run.load_checkpoint(tag)
        assert loaded is not None
        sha.update(f"{tag}\0{checkpoint.digest(loaded[0])}\0".encode())
    for dataset in (run.history(), netcdf.load(run.path / "audit.nc")):
        if dataset is not None:
            sha.update(_values(dataset))
    return sha.hexdigest()


def _values(dataset: xarray.Dataset) -> bytes:
    """Return names, dimensions, dtypes and values of a data set. Its attributes say words, and may say times."""
    parts = []
    for name in sorted(map(str, dataset.variables)):
        if name != _WALL_TIME:
            variable = dataset.variables[name]
            values = numpy.ascontiguousarray(variable.values)
            data = values.tobytes() if values.dtype != object else repr(values.tolist()).encode()
            parts.append(f"\0{name}\0{variable.dims}\0{values.dtype}\0{values.shape}\0".encode() + data)
    return b"".join(parts)
