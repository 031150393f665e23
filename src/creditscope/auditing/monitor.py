"""The quick audit along a training, in any loop: on a schedule of steps or epochs, into a file as it goes."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import xarray as xr

from creditscope.auditing.run import audit
from creditscope.auditing.verdict import Verdict
from creditscope.calling import Inputs
from creditscope.errors import CreditscopeError, MissingError, UsageError, unknown
from creditscope.rules._base import Learner
from creditscope.runs import files

FORMAT, VERSION = "creditscope.monitor", 1
UNITS = ("step", "epoch")
SHARE = 0.05
"""Of the training time: what a monitor may cost before it warns."""
SETTLED = 3
"""Records after which the share of an even schedule is what it will be."""
LOST = "reference-validity"


class MonitorWarning(UserWarning):
    """A monitor takes more of the training's time than it should."""


class ReferenceLostError(CreditscopeError):
    """The exact gradient is no longer one: what is learned from here on cannot be judged."""


@dataclass(frozen=True)
class Record:
    """What one quick audit found."""

    at: int
    """Steps or epochs done."""
    status: str
    flags: dict[str, str]
    """The flags, each with its sentence."""
    values: dict[str, Any]
    """Each variable: a number, or a list over states or blocks."""
    seconds: float


class Monitor:
    """Audits a learner at a few moments of its training; ``monitor(step)`` stands after ``optimiser.step()``.

    .. code-block:: python

        with cs.Monitor(learner, x, y, out="monitor.jsonl") as monitor:
            for step, batch in enumerate(batches, 1):
                optimiser.zero_grad()
                learner.backward(*batch)
                optimiser.step()
                monitor(step)
        monitor.first_fired   # {"scale-stability": 256}

    A moment is due by its number alone, never by a clock, so that two machines measure the same. Nothing of the
    training changes, to the bit. A call with a number at or before one that is recorded means that the loop went back
    to there, resumed from a checkpoint: later records are dropped and made anew.

    In the quick tier ``scale-stability`` and ``aggregation-collapse`` can be flagged, and ``reference-validity`` where
    states or reference are not finite, in float64 or in the network's own precision, or exactly zero.

    Args:
        learner: what is trained.
        x: inputs to measure on, a few hundred.
        y: their labels.
        every: "log" (0, 1, 2, 4, 8, ...), or n (0, n, 2n, ...).
        unit: what is counted, "step" or "epoch": it names the dimension of :attr:`data`.
        out: a file of JSON lines, one a record, each written whole; one that is there is gone on with.
        stop_on_lost_reference: raise :class:`ReferenceLostError` after a record flagged ``reference-validity``.
        thresholds: as for ``cs.audit``.
    """

    def __init__(
        self,
        learner: Learner,
        x: Inputs,
        y: Any,
        *,
        every: Literal["log"] | int = "log",
        unit: Literal["step", "epoch"] = "step",
        out: str | Path | None = None,
        stop_on_lost_reference: bool = False,
        thresholds: str | Path | None = None,
    ):
        if every != "log" and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise UsageError(f"every must be 'log' or a whole number of at least 1, not {every!r}")
        if unit not in UNITS:
            raise unknown("unit", str(unit), UNITS)
        if not isinstance(learner, Learner):
            raise UsageError(
                f"a monitor takes a learner, as rule.attach(network) gives it, not {type(learner).__name__}"
            )
        self.learner, self.every, self.unit = learner, every, unit
        self._x, self._y, self._thresholds = x, y, thresholds
        self._stops = stop_on_lost_reference
        self._at = 0
        self._file = _File(Path(out)) if out is not None else None
        self._header, self.records = self._file.load(unit) if self._file else (None, [])
        self._seconds, self._warned = 0.0, False
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- measuring -----------------------------------------------------------------------------------------------

    def __call__(self, at: int | None = None) -> Verdict | None:
        """Measure, if it is due after ``at`` steps (or epochs; counted from 1 on, where not given)."""
        self._at = self._at + 1 if at is None else at
        if not self.is_due(self._at):
            return None
        record, verdict = self._measured()
        self._warn_if_dear(settled=isinstance(self.every, int) and len(self.records) >= SETTLED)
        if self._stops and LOST in record.flags:
            raise ReferenceLostError(f"stopped at {self.unit} {self._at}: {record.flags[LOST]}")
        return verdict

    def is_due(self, at: int) -> bool:
        """Tell whether a moment is on the schedule.

        >>> from types import SimpleNamespace
        >>> [at for at in range(20) if Monitor.is_due(SimpleNamespace(every="log"), at)]
        [0, 1, 2, 4, 8, 16]
        """
        return at % self.every == 0 if isinstance(self.every, int) else at & (at - 1) == 0

    def _measured(self) -> tuple[Record, Verdict]:
        _wait(self._x)
        started = time.perf_counter()
        with self.learner._untouched():
            found = audit(self.learner, self._x, self._y, tier="quick", thresholds=self._thresholds)
        seconds = time.perf_counter() - started
        verdict = found.verdict
        flags = _native_loss(found.data) | {key: verdict.reasons[key] for key in verdict.flags}
        status = "cannot judge" if LOST in flags else verdict.status
        values = {name: variable.values.tolist() for name, variable in _kept(found.data).items()}
        record = Record(self._at, status, flags, values, seconds)
        self._keep(record, _header(found.data, self.unit))
        self._seconds += time.perf_counter() - started
        return record, verdict

    def _keep(self, record: Record, header: dict[str, Any]) -> None:
        before = [old for old in self.records if old.at < record.at]
        went_back = len(before) < len(self.records)
        self._require_same(header)
        self._header, self.records = header, [*before, record]
        if self._file is not None:
            self._file.add(header, self.records, whole=went_back)

    def _require_same(self, header: dict[str, Any]) -> None:
        if self._header is not None and self._file is not None and self._header["blocks"] != header["blocks"]:
            raise UsageError(f"{self._file.path} is of another network: it has the blocks {self._header['blocks']}")

    # --- what was found ------------------------------------------------------------------------------------------

    @property
    def first_fired(self) -> dict[str, int]:
        """For each flag that fired, the step or epoch of the first record that had it."""
        return _first_fired(self.records)

    @property
    def data(self) -> xr.Dataset:
        """All records as one Dataset, along "step" or "epoch"."""
        if self._header is None:
            raise UsageError("the monitor has not measured anything yet")
        return _as_dataset(self._header, self.records)

    @property
    def share(self) -> float:
        """The share of the time since the monitor was made that it has itself taken."""
        return self._seconds / max(time.perf_counter() - self._started, 1e-9)

    def close(self) -> None:
        """Warn if the monitor took more than 5 % of the time; a ``with`` block does this at its end."""
        self._warn_if_dear(settled=bool(self._seconds))

    def _warn_if_dear(self, *, settled: bool) -> None:
        share = self.share
        if settled and share > SHARE and not self._warned:
            self._warned = True
            text = f"the monitor took {share:.0%} of the time: measure less often, or on fewer than the examples given"
            warnings.warn(text, MonitorWarning, stacklevel=3)


def load_monitor(path: str | Path) -> xr.Dataset:
    """Return what a monitor has written, as one Dataset along "step" or "epoch"; it may still be at work."""
    header, records = _File(Path(path)).load()
    if header is None:
        raise MissingError(f"not found: {path}")
    return _as_dataset(header, records)


def _native_loss(data: xr.Dataset) -> dict[str, str]:
    """Flag a gradient that has overflowed where the network computes, although it has not in float64."""
    lost = [l for l, norm in enumerate(data["published_reference_norm"].values) if not math.isfinite(norm)]
    return {LOST: f"in the network's own precision the gradient is not finite at states {lost}"} if lost else {}


# --- records ----------------------------------------------------------------------------------------------------------


def _wait(x: Inputs) -> None:
    """Let a device finish the training's steps, which are not ours to pay for."""
    if isinstance(x, torch.Tensor) and x.is_cuda:
        torch.cuda.synchronize(x.device)


def _kept(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the numbers, and the numbers by state or block."""
    return {
        str(name): variable
        for name, variable in data.data_vars.items()
        if variable.dtype.kind == "f" and variable.dims in ((), ("layer",), ("block",))
    }


def _header(data: xr.Dataset, unit: str) -> dict[str, Any]:
    variables = {name: {"dims": [*v.dims], "attrs": v.attrs} for name, v in _kept(data).items()}
    about = {name: data.attrs[name] for name in ("creditscope", "torch", "n", "blocks", "credit")}
    return {"format": FORMAT, "version": VERSION, "unit": unit, **about, "variables": variables}


def _first_fired(records: list[Record]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in records:
        for key in record.flags:
            found.setdefault(key, record.at)
    return found


def _as_dataset(header: Mapping[str, Any], records: list[Record]) -> xr.Dataset:
    unit = header["unit"]
    data = xr.Dataset(coords={unit: [record.at for record in records]})
    for name, about in header["variables"].items():
        values = np.array([record.values[name] for record in records], dtype=np.float64)
        data[name] = ((unit, *about["dims"]), values, about["attrs"])
    data["status"] = (unit, [record.status for record in records], {"long_name": "status of the quick verdict"})
    data["flags"] = (unit, [", ".join(record.flags) for record in records], {"long_name": "flags"})
    data["seconds"] = (unit, [record.seconds for record in records], {"long_name": "time taken", "units": "s"})
    if "block" in data.dims:
        data = data.assign_coords(block=header["blocks"])
    fired = json.dumps(_first_fired(records))
    return data.assign_attrs({key: header[key] for key in ("n", "credit", "creditscope", "torch")}, first_fired=fired)


class _File:
    """JSON lines: what the records hold, then a record a line."""

    def __init__(self, path: Path):
        self.path = path
        self._whole = False
        """Whether what is on disk is ours, line by line."""

    def load(self, unit: str | None = None) -> tuple[dict[str, Any] | None, list[Record]]:
        """Return the header and the records; a last line that a kill cut short does not count."""
        data = files.read_bytes(self.path)
        if not data:
            return None, []
        lines = data.split(b"\n")
        self._whole = not lines.pop()  # what stands behind the last end of a line is cut short
        try:
            header, *rows = [files.json_object(line) for line in lines]
            files.check_format(
                self.path, found=header.get("format"), version=header.get("version"), ours=FORMAT, latest=VERSION
            )
            records = [Record(**row) for row in rows]
        except (TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{self.path} is corrupt or no monitor's: {error}") from error
        if unit is not None and header["unit"] != unit:
            raise UsageError(f"{self.path} counts {header['unit']}s, and this monitor {unit}s: choose another file")
        return header, records

    def add(self, header: dict[str, Any], records: list[Record], *, whole: bool) -> None:
        """Append the last record; write all of them anew where the file is not what stands before it."""
        if whole or not self._whole or not self.path.exists():
            with files.one_line(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(self.path, b"".join(map(_line, [header, *map(asdict, records)])))
            self._whole = True
            return
        with files.one_line(self.path), self.path.open("ab", buffering=0) as file:
            file.write(_line(asdict(records[-1])))  # one write: whole, or cut short by a kill and then not counted


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
