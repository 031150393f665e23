"""Progress on standard error: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from creditscope.cli.command import complain

if TYPE_CHECKING:
    from rich.progress import Progress

    from creditscope.train import EpochEnd


def _bars(*shown: Any) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), *shown, TimeRemainingColumn(compact=True)]
    return Progress(*columns, console=Console(stderr=True), transient=True)


# --- downloads --------------------------------------------------------------------------------------------------------


@contextmanager
def downloading() -> Iterator[Callable[[str, int, int | None], None]]:
    """Give what ``data.fetch`` calls: a bar a file, or a line a tenth."""
    if not sys.stderr.isatty():
        yield _Tenths()
        return
    from rich.progress import DownloadColumn

    with _bars(DownloadColumn()) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int | None) -> None:
            task = tasks.get(name)
            if task is None:
                task = tasks[name] = bars.add_task(name, total=total)
            bars.update(task, completed=done, total=total)

        yield show


class _Tenths:
    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def __call__(self, name: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if self._said.get(name) != tenth:
            self._said[name] = tenth
            complain(f"{name}: {done / 1e6:.1f} MB" + (f" of {total / 1e6:.1f}" if total else ""))


# --- trainings --------------------------------------------------------------------------------------------------------


class Lines:
    """A line for every epoch."""

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Say nothing."""

    def epoch(self, end: EpochEnd) -> None:
        """Say how far it is, and the scores."""
        complain(f"epoch {end.epoch}/{end.epochs}: {scores(end.row)}")


class Bar:
    """A bar over all steps of a training, with the last scores."""

    def __init__(self, bars: Progress, label: str, epochs: int):
        self._bars, self._label, self._epochs = bars, label, epochs
        self._task = bars.add_task(label, total=None)

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Move on."""
        self._bars.update(self._task, completed=(epoch - 1) * steps + step, total=self._epochs * steps)

    def epoch(self, end: EpochEnd) -> None:
        """Show how far it is, and the scores."""
        self._bars.update(self._task, description=f"{self._label}  epoch {end.epoch}/{end.epochs}  {scores(end.row)}")


@contextmanager
def training(label: str, epochs: int) -> Iterator[Lines | Bar]:
    """Give what ``fit`` calls: ``callbacks=[shown.epoch], progress=shown.step``."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    with _bars() as bars:
        yield Bar(bars, label, epochs)


def scores(row: Mapping[str, Any]) -> str:
    """Return the losses and accuracies of an epoch in one line."""
    return ", ".join(f"{key} {row[key]:.3f}" for key in row if key.endswith(("_loss", "_acc")))
