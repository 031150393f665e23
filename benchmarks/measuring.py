"""Ratios of interleaved runs: what is compared takes turns in one process, so that the machine's noise falls on all."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

BUSY = 0.5
"""Processes that wait for a core, for each core: with more than so many, wall time says little."""

Work = Callable[[], object]


class Time(NamedTuple):
    """Seconds on the wall, and of this process on all cores."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Time:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Time) -> Time:
        return Time(self.wall - start.wall, self.cpu - start.cpu)


class Spread(NamedTuple):
    """The median of a ratio over the rounds, and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Spread:
        low, _, high = statistics.quantiles(ratios, n=4)
        return cls(statistics.median(ratios), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio that is to stay below a target, or something that is to hold."""

    what: str
    wall: Spread | None = None
    cpu: Spread | None = None
    target: float | None = None
    holds: bool | None = None
    note: str = ""

    @property
    def judged(self) -> Spread | None:
        """CPU time where it was taken: on a machine with other work on it, it is what tells."""
        return self.cpu or self.wall

    @property
    def ok(self) -> bool | None:
        if self.holds is not None:
            return self.holds
        return None if self.target is None or self.judged is None else self.judged.median <= self.target

    def cells(self) -> tuple[str, ...]:
        verdict = {True: "ok", False: "NOT MET", None: ""}[self.ok]
        target = f"≤ {self.target:g}" if self.target is not None else "yes" if self.holds is not None else ""
        return self.what, str(self.wall or ""), str(self.cpu or ""), target, verdict, self.note


HEAD = ("what", "wall", "CPU", "target", "", "")


def table(rows: Sequence[Row]) -> str:
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Work, device: str, together: int = 1) -> Time:
    synchronise(device)
    start = Time.now()
    for _ in range(together):
        work()
    synchronise(device)
    return Time.now().since(start)


def interleaved(
    steps: Mapping[str, Work], *, rounds: int, device: str = "cpu", together: int = 1
) -> dict[str, list[Time]]:
    """Return the times of each step by round; who comes first changes from round to round."""
    for work in steps.values():
        timed(work, device, 4)  # caches, pools of memory, kernels
    times: dict[str, list[Time]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        order = [*order[1:], order[0]]
        for name in order:
            times[name].append(timed(steps[name], device, together))
    return times


def ratio_row(what: str, over: Sequence[Time], under: Sequence[Time], *, target: float | None, cpu: bool = True) -> Row:
    """Compare two lists of times round by round."""
    pairs = list(zip(over, under, strict=True))
    wall = Spread.of([a.wall / b.wall for a, b in pairs])
    return Row(what, wall, Spread.of([a.cpu / b.cpu for a, b in pairs]) if cpu else None, target)


def load() -> str:
    """Say how busy the machine is with other work, and whether the figures mean anything."""
    waiting, cores = os.getloadavg()[0], os.cpu_count() or 1
    if waiting / cores <= BUSY:
        return f"load {waiting:.1f} on {cores} cores"
    return f"load {waiting:.1f} on {cores} cores: TOO BUSY for wall times, and CPU times suffer too"


def save(folder: Path, name: str, rows: Iterable[Row], about: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {"about": dict(about), "rows": [asdict(row) | {"ok": row.ok} for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
