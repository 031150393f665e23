"""The result of an audit: its Dataset, its verdict, and the forms that it can be shown in."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from creditscope.auditing.thresholds import Threshold, Thresholds, load_thresholds
from creditscope.auditing.verdict import Judge, Verdict, split_credits, worst
from creditscope.errors import MissingError, UsageError
from creditscope.runs import history

if TYPE_CHECKING:
    from rich.table import Table

    from creditscope.auditing.protocols import Judgement, Protocol

FORMAT, VERSION = "creditscope.audit", 1
LISTED = "json:"


class Audit:
    """The measurements of one or several credits on one evaluation set, and the verdict."""

    def __init__(self, data: xr.Dataset, thresholds: Thresholds | None = None):
        self.data = data
        self._thresholds = thresholds if thresholds is not None else load_thresholds()

    @property
    def thresholds(self) -> Thresholds:
        """What the figures are judged by."""
        return self._thresholds

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each credit, by name."""
        return {name: Judge(own, self._thresholds).verdict() for name, own in split_credits(self.data)}

    @property
    def verdict(self) -> Verdict:
        """The verdict; of several credits the worst."""
        return worst(list(self.verdicts.values()))

    def judge(self, protocol: Protocol, credit: str | None = None) -> Judgement:
        """Return what a published protocol says on the same numbers; nothing is changed."""
        parts = dict(split_credits(self.data))
        if credit is None and len(parts) > 1:
            raise UsageError(f"this audit holds several credits: say which, one of {', '.join(parts)}")
        name = credit if credit is not None else next(iter(parts))
        if name not in parts:
            raise UsageError(f"this audit has no credit '{name}'; it has {', '.join(parts)}")
        return protocol.judge(parts[name])

    # --- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the measurements as netCDF, whole or not at all; the thresholds go along."""
        path = Path(path)
        data = self.data.copy()
        for name in data.variables:
            if data[name].dtype == bool:
                data[name] = data[name].astype(np.int8).assign_attrs({**data[name].attrs, "boolean": 1})
        data.attrs["thresholds"] = json.dumps({name: vars(t) for name, t in self._thresholds.items()})
        for holder in (data, *data.variables.values()):
            holder.attrs = {key: _to_text(value) for key, value in holder.attrs.items()}
        history.save(path, data)
        return path

    # --- shown -----------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Return the figures by layer as a table for a terminal."""
        from creditscope.auditing.show import as_table

        return as_table(self)

    def to_markdown(self) -> str:
        """Return the reporting checklist of the source study, filled in, ready to paste."""
        from creditscope.auditing.show import as_markdown

        return as_markdown(self)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page."""
        from creditscope.auditing.show import write_html

        return write_html(self, Path(path))

    def __repr__(self) -> str:
        return (
            f"Audit({self.verdict.status}; {', '.join(self.verdict.flags) or 'no flags'}; n = {self.data.attrs['n']})"
        )


def load_audit(path: str | Path, thresholds: str | Path | None = None) -> Audit:
    """Read what :meth:`Audit.save` wrote; it is judged by its own thresholds, or by those given."""
    path = Path(path)
    data = history.load(path)
    if data is None:
        raise MissingError(f"not found: {path}")
    if data.attrs.get("format") != FORMAT:
        raise UsageError(f"{path} is no audit of creditscope")
    if int(data.attrs.get("version", 0)) > VERSION:
        raise UsageError(
            f"{path} was written by a newer creditscope (audit version {data.attrs['version']}, this reads {VERSION})"
        )
    for name in data.variables:
        if data[name].attrs.pop("boolean", 0):
            data[name] = data[name].astype(bool)
    for holder in (data, *data.variables.values()):
        holder.attrs = {key: _from_text(value) for key, value in holder.attrs.items()}
    text = data.attrs.pop("thresholds", None)
    own = {name: Threshold(**fields) for name, fields in json.loads(text).items()} if text else load_thresholds()
    return Audit(data, load_thresholds(thresholds) if thresholds is not None else own)


def _to_text(value: Any) -> Any:
    """Netcdf attributes are text and numbers: a list goes as JSON behind a mark."""
    return LISTED + json.dumps(value) if isinstance(value, list | tuple) else value


def _from_text(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(value.removeprefix(LISTED)) if value.startswith(LISTED) else value
    return value.item() if isinstance(value, np.generic) else value
