"""Thresholds of the verdict: a small TOML file, each with its unit and where it comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np

from creditscope.errors import MissingError, UsageError, unknown

FORMAT, VERSION = "creditscope.thresholds", 1


@dataclass(frozen=True)
class Threshold:
    """One number that decides a flag."""

    value: float
    unit: str
    flag: str
    above: bool
    """The flag is raised above the value; below it otherwise."""
    evidence: str

    def crossed(self, figure: float) -> bool:
        """Tell whether a figure raises the flag; NaN does not."""
        return figure > self.value if self.above else figure < self.value


Thresholds = Mapping[str, Threshold]


def default_path() -> Path:
    """Return where the shipped thresholds lie."""
    return Path(__file__).with_name("thresholds.toml")


def load_thresholds(path: str | Path | None = None) -> dict[str, Threshold]:
    """Read thresholds; what a user's file leaves out is as shipped."""
    shipped = _read(default_path())
    if path is None:
        return shipped
    given = Path(path)
    if not given.is_file():
        raise MissingError(f"not found: {path}")
    own = _read(given, shipped)
    return shipped | own


def _read(path: Path, shipped: Thresholds | None = None) -> dict[str, Threshold]:
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    if table.pop("format", FORMAT) != FORMAT or table.pop("version", VERSION) not in range(1, VERSION + 1):
        raise UsageError(f"{path} holds no thresholds that this version reads")
    return {name: _threshold(path, name, entry, shipped) for name, entry in table.items()}


def _threshold(path: Path, name: str, entry: Any, shipped: Thresholds | None) -> Threshold:
    if shipped is not None and name not in shipped:
        raise unknown(f"threshold in {path}", name, shipped)
    fields = {"value": entry} if not isinstance(entry, dict) else dict(entry)
    value = fields.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UsageError(f"{path}: {name}.value must be a number, not {value!r}")
    known = [item.name for item in dataclass_fields(Threshold)]
    for key in fields:
        if key not in known:
            raise unknown(f"entry of {name} in {path}", key, known)
    if shipped is None:
        return Threshold(**fields)
    for key in ("flag", "above"):  # what a figure means is not for a file to change
        if fields.get(key, getattr(shipped[name], key)) != getattr(shipped[name], key):
            raise UsageError(f"{path}: {name}.{key} is {getattr(shipped[name], key)!r} and cannot be {fields[key]!r}")
    return replace(shipped[name], **{"evidence": f"from {path.name}", **fields})


def write_thresholds(path: str | Path, thresholds: Thresholds) -> None:
    """Write thresholds as TOML, whole or not at all."""
    from creditscope.runs import files

    lines = [f'format = "{FORMAT}"', f"version = {VERSION}"]
    for name, threshold in thresholds.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in vars(threshold).items())]
    files.write_bytes(Path(path), ("\n".join(lines) + "\n").encode())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Gap:
    """What separates two groups of runs on one figure."""

    name: str
    healthy: tuple[float, float]
    degenerate: tuple[float, float]
    threshold: float
    ratio: float
    """Degenerate end over healthy end of the gap, in the direction of the flag."""


FIGURES = {
    "block_growth": "max_growth",
    "precision_error": "precision_error",
    "best_share": "best_share",
}


def figure(data: Any, name: str, above: bool) -> float:
    """Return the figure of one audit that a threshold judges: the worst over layers."""
    values = data[FIGURES[name]].values if FIGURES[name] in data else np.empty(0)
    finite = values[values == values]
    if finite.size == 0:
        return float("nan")
    return float(finite.max() if above else finite.min())


def calibrate(
    healthy: Iterable[Any],
    degenerate: Iterable[Any],
    *,
    names: Iterable[str] = ("block_growth",),
    path: str | Path | None = None,
) -> tuple[dict[str, Threshold], list[Gap]]:
    """Set thresholds between the user's own healthy and degenerate audits, at the geometric middle of the gap.

    Args:
        healthy: audits of runs that are known to be well.
        degenerate: audits of runs that are known to have failed.
        names: the thresholds to set; the others stay as shipped.
        path: where to write the TOML that ``cs.audit(thresholds=...)`` takes.

    Returns:
        The thresholds, and for each that was set the gap between the groups. Groups that overlap are refused.
    """
    good, bad = list(healthy), list(degenerate)
    if not good or not bad:
        raise UsageError("calibrate needs at least one healthy and one degenerate audit")
    thresholds, gaps = load_thresholds(), []
    for name in names:
        if name not in FIGURES:
            raise unknown("threshold to calibrate", name, FIGURES)
        old = thresholds[name]
        fine = [figure(a.data, name, old.above) for a in good]
        poor = [figure(a.data, name, old.above) for a in bad]
        if any(v != v for v in (*fine, *poor)):
            raise UsageError(f"{name}: an audit has no figure for it")
        low, high = (max(fine), min(poor)) if old.above else (max(poor), min(fine))
        if not low < high:
            raise UsageError(
                f"{name}: the groups overlap (healthy {min(fine):.4g} to {max(fine):.4g}, degenerate {min(poor):.4g} "
                f"to {max(poor):.4g}): no threshold separates them"
            )
        middle = (low * high) ** 0.5 if low > 0 else (low + high) / 2
        evidence = f"{len(good)} healthy runs to {max(fine):.4g}, {len(bad)} degenerate from {min(poor):.4g}"
        thresholds[name] = Threshold(middle, old.unit, old.flag, old.above, evidence)
        gaps.append(
            Gap(name, (min(fine), max(fine)), (min(poor), max(poor)), middle, high / low if low > 0 else float("inf"))
        )
    if path is not None:
        write_thresholds(path, thresholds)
    return thresholds, gaps
