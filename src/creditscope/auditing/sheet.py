"""Labelled results: every number with its unit, its n, how it was reduced, its interval, and why it is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor

BOUNDS = ["low", "high"]


@dataclass(frozen=True)
class Entry:
    """One variable before it is labelled."""

    values: np.ndarray
    dims: tuple[str, ...]
    attrs: dict[str, Any]


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().double().cpu().numpy()
    return np.asarray(values)


@dataclass
class Sheet:
    """The variables of one credit, or those that all credits share, in the order in which they were measured."""

    intervals: bool = True
    """Whether intervals are known; in the quick tier they are not."""
    entries: dict[str, Entry] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def put(
        self,
        name: str,
        values: Any,
        dims: Sequence[str],
        label: str,
        *,
        unit: str = "1",
        n: Any = None,
        how: str = "none",
        interval: Any = None,
        missing: str = "",
        **attrs: Any,
    ) -> None:
        """Add a variable; ``interval`` has a last axis of two bounds and becomes ``NAME_interval``."""
        about = {"long_name": label, "units": unit, "reduction": how, **attrs}
        if n is not None:
            about["n"] = n
        if missing:
            about["why_nan"] = missing
        array = _array(values)
        self.entries[name] = Entry(array, tuple(dims), about)
        if interval is not None:
            bounds = {**about, "long_name": f"95 % interval of: {label}", "interval": "bootstrap over examples, seeded"}
            ends = _array(interval)
            if not self.intervals:
                bounds["why_nan"], ends = "intervals are part of the standard tier", np.full_like(ends, np.nan)
            self.entries[f"{name}_interval"] = Entry(ends, (*dims, "bound"), bounds)
        elif how.startswith("maximum"):
            about["interval"] = "none: a maximum's bootstrap interval does not cover it"

    @contextmanager
    def timed(self, measurement: str) -> Iterator[None]:
        """Record the seconds that a measurement took."""
        started = perf_counter()
        yield
        self.seconds[measurement] = self.seconds.get(measurement, 0.0) + perf_counter() - started


def to_dataset(
    shared: Sheet, claims: Mapping[str, Sheet], *, labelled: bool, coords: Mapping[str, Any], attrs: Mapping[str, Any]
) -> xr.Dataset:
    """Put the sheets together; where several credits were given, theirs get a leading dimension "credit"."""
    variables: dict[str, Any] = {name: (e.dims, e.values, e.attrs) for name, e in shared.entries.items()}
    sheets = list(claims.values())
    for name in dict.fromkeys(name for sheet in sheets for name in sheet.entries):
        given = [sheet.entries.get(name) for sheet in sheets]
        like = next(entry for entry in given if entry is not None)
        arrays = [_missing(like) if entry is None else entry.values for entry in given]
        if labelled:
            variables[name] = (("credit", *like.dims), np.stack(arrays), _told_apart(list(claims), given))
        else:
            variables[name] = (like.dims, arrays[0], like.attrs)
    data = xr.Dataset(variables, attrs=dict(attrs))
    if labelled:
        data = data.assign_coords(credit=("credit", list(claims)))
    known = {name: value for name, value in coords.items() if name in data.dims}
    if "bound" in data.dims:
        known["bound"] = ("bound", BOUNDS)
    data = data.assign_coords(known)
    seconds = dict(shared.seconds)
    for sheet in sheets:
        for name, value in sheet.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    if seconds:
        data["seconds"] = (
            "measurement",
            list(seconds.values()),
            {"long_name": "time taken", "units": "s", "reduction": "sum"},
        )
        data = data.assign_coords(measurement=("measurement", list(seconds)))
    return data


def _told_apart(names: Sequence[str], given: Sequence[Entry | None]) -> dict[str, Any]:
    """Return the attributes that all credits share, and those that differ as ``attribute@credit``."""
    own = {name: entry.attrs for name, entry in zip(names, given, strict=True) if entry is not None}
    first = next(iter(own.values()))
    shared = {key: v for key, v in first.items() if all(attrs.get(key) == v for attrs in own.values())}
    return shared | {f"{key}@{name}": v for name, attrs in own.items() for key, v in attrs.items() if key not in shared}


def _missing(like: Entry) -> np.ndarray:
    if like.values.dtype.kind in "US":
        return np.full_like(like.values, "")
    if like.values.dtype.kind == "b":
        return np.zeros_like(like.values)
    return np.full(like.values.shape, np.nan)
