"""Small trainings for the tests of ``fit``: data, networks, processes of their own, and what a run leaves on disk."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import creditscope as cs
from creditscope.config import NetworkSpec
from creditscope.data import Dataset, from_tensors
from creditscope.runs import RunDirectory, fingerprint

FEATURES, CLASSES = 6, 3


def task(train: int = 44, test: int = 20, *, validation: int = 0, seed: int = 0, **options: Any) -> Dataset:
    """Clusters that can be told apart, with noise."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=draw)
    y = torch.randint(0, CLASSES, (train + test,), generator=draw)
    x = centres[y] + 0.5 * torch.randn(train + test, FEATURES, generator=draw)
    splits = x[:train], y[:train], x[train:], y[train:]
    return from_tensors(*splits, name="clusters", classes=CLASSES, validation=validation, **options)


def net(width: int = 8, depth: int = 2) -> NetworkSpec:
    return NetworkSpec("resmlp", {"width": width, "depth": depth}, (FEATURES,), CLASSES)


def options(**changes: Any) -> dict[str, Any]:
    return {"epochs": 3, "seed": 1, "batch": 10, "threads": 1, "keep": (0, 2, "last")} | changes


def files_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def bits(path: Path) -> str:
    return fingerprint(RunDirectory.open(path))


def assert_same_run(path: Path, whole: Path) -> None:
    assert RunDirectory.open(path).status.state == RunDirectory.open(whole).status.state
    assert bits(path) == bits(whole)
    assert files_of(path) == files_of(whole)


def small(outbox: Connection, path: Path, pause: float) -> None:
    """Train in a process of its own; say each step, and how it ended."""

    def progress(epoch: int, step: int, steps: int) -> None:
        outbox.send((epoch, step))
        time.sleep(pause)

    try:
        result = cs.fit(net(), cs.rules.DFA(), task(), out=path, progress=progress, **options())
    except KeyboardInterrupt:
        outbox.send("interrupted")
    else:
        outbox.send(result.status)


def long(outbox: Connection, path: Path, epochs: int, depth: int) -> None:
    """Train on the digits in a process of its own; say each epoch that it ended, and ``None`` for a beginning."""
    data = cs.data.load("digits")
    network = NetworkSpec("resmlp", {"width": 64, "depth": depth}, data.shape, data.classes)
    first = [None]

    def progress(epoch: int, step: int, steps: int) -> None:
        if first:
            outbox.send(first.pop())

    given = options(epochs=epochs, batch=16, keep=(0, 5, "last"), evaluate_every=2)
    rule = cs.rules.Handover(cs.rules.DFA.study(), cs.rules.FA(), at=0.5)
    cs.fit(
        network,
        rule,
        data,
        out=path,
        recipe=cs.recipes.study,
        progress=progress,
        callbacks=[lambda end: outbox.send(end.epoch)],
        **given,
    )
