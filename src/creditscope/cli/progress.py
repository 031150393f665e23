"""Progress on standard error: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from creditscope.cli.command import complain

if TYPE_CHECKING:
    from rich.progress import Progress

    from creditscope.auditing.result import Audit
    from creditscope.train import EpochEnd, Result


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
    """A bar over all steps of a training, with the last score."""

    def __init__(self, bars: Progress, label: str, epochs: int):
        self._bars, self._label, self._epochs = bars, label, epochs
        self._task = bars.add_task(label, total=None)

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Move on."""
        self._bars.update(self._task, completed=(epoch - 1) * steps + step, total=self._epochs * steps)

    def epoch(self, end: EpochEnd) -> None:
        """Show how far it is, and the score."""
        self._bars.update(self._task, description=f"{self._label}  {_brief(end)}")


@contextmanager
def training(label: str, epochs: int) -> Iterator[Lines | Bar]:
    """Give what ``fit`` calls: ``callbacks=[shown.epoch], progress=shown.step``."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    with _bars() as bars:
        yield Bar(bars, label, epochs)


class Series:
    """A line for every training of several, above a bar over all of them where there is a terminal."""

    def __init__(self, trainings: int, epochs: int, bars: Progress | None):
        self._trainings, self._epochs, self._bars = trainings, epochs, bars
        self._done, self._label = 0, ""
        self._task = bars.add_task("", total=trainings * epochs) if bars else None

    def begin(self, label: str) -> None:
        """Begin the next training."""
        self._label = label
        self._show(0, "")

    def epoch(self, end: EpochEnd) -> None:
        """Show how far it is."""
        self._show(end.epoch, f"  {_brief(end)}")

    def end(self, result: Result) -> None:
        """Say what the training gave."""
        self._done += 1
        accuracy = float(result.history["test_acc"][-1])
        line = f"{self._done:>2}/{self._trainings} {self._label}: {result.status}, test_acc {accuracy:.3f}"
        if self._bars is None:
            complain(line)
        else:
            self._bars.console.print(line, highlight=False)

    def _show(self, epoch: int, text: str) -> None:
        if self._bars is not None and self._task is not None:
            done = self._done * self._epochs + epoch
            self._bars.update(self._task, completed=done, description=f"{self._label}{text}")


@contextmanager
def several(trainings: int, epochs: int) -> Iterator[Series]:
    """Give what goes along with several trainings, one after the other."""
    if not sys.stderr.isatty():
        yield Series(trainings, epochs, None)
        return
    with _bars() as bars:
        yield Series(trainings, epochs, bars)


def auditing(audits: int) -> Callable[[str, Audit], Audit]:
    """Return what says what each of several audits found, and hands it on."""
    done = iter(range(1, audits + 1))

    def show(name: str, audit: Audit) -> Audit:
        verdict = audit.verdict
        complain(f"{next(done):>2}/{audits} audit of {name}: {' '.join([verdict.status, *verdict.flags])}")
        return audit

    return show


def scores(row: Mapping[str, Any]) -> str:
    """Return the losses and accuracies of an epoch in one line."""
    return ", ".join(f"{key} {row[key]:.3f}" for key in row if key.endswith(("_loss", "_acc")))


def _brief(end: EpochEnd) -> str:
    """Return what leaves room for a bar."""
    score = next((f"  {name} {end.row[name]:.3f}" for name in ("test_acc", "test_loss") if name in end.row), "")
    return f"epoch {end.epoch}/{end.epochs}{score}"
