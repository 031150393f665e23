"""The history of a run as netCDF, made and read in memory: HDF5 then never meets a full disk, which it takes badly."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from creditscope.errors import UsageError
from creditscope.runs.files import read_bytes, write_bytes

if TYPE_CHECKING:
    import xarray


def save(path: Path, dataset: xarray.Dataset) -> None:
    """Write a data set in place of the one that is there, in one step."""
    buffer = io.BytesIO()
    dataset.to_netcdf(buffer, engine="h5netcdf")
    write_bytes(path, buffer.getvalue())


def load(path: Path) -> xarray.Dataset | None:
    """Return the data set in a file, held in memory; None where there is no file."""
    data = read_bytes(path)
    if data is None:
        return None
    import xarray  # a third of a second, for who reads no history

    try:  # a variable in units of "seconds" is a number here, and no duration
        return xarray.load_dataset(io.BytesIO(data), engine="h5netcdf", decode_times=False, decode_timedelta=False)
    except Exception as error:  # HDF5 knows many ways to fail, and each means the same
        raise UsageError(f"{path} is corrupt or cut short: {error}") from error
