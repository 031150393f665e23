"""Processes that work on a run until they end or are killed; each is forked from one that has torch loaded already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import xarray

from creditscope.errors import CreditscopeError
from creditscope.runs import RunBusyError, RunDirectory
from creditscope.runs.lock import Lock

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.runs.workers"])
_TOUCHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock"}
OPTIONS = {"seed": 1, "keep": [0, "last"]}


class Outbox(Protocol):
    """Where a worker says something."""

    def send(self, message: Any) -> None: ...


@dataclass
class Said:
    """What was said by who works in this process."""

    messages: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.messages.append(message)


class Worker:
    """One process, and what it sends."""

    def __init__(self, work: Any, *arguments: Any):
        self.inbox, outbox = _FORKS.Pipe(duplex=False)
        self.process = _FORKS.Process(target=work, args=(outbox, *arguments))
        self.process.start()
        outbox.close()

    def receive(self) -> Any:
        if not self.inbox.poll(120):
            raise TimeoutError("the worker said nothing")
        return self.inbox.recv()

    def received(self) -> list[Any]:
        """Return all that came before the process ended."""
        messages = []
        try:
            while self.inbox.poll(120):
                messages.append(self.inbox.recv())
        except EOFError:
            pass
        return messages

    def kill(self) -> None:
        self.process.kill()
        self.join()

    def join(self) -> int | None:
        self.process.join(120)
        return self.process.exitcode


def train(outbox: Outbox, path: Path, epochs: int, size: int, dies_at: int) -> None:
    """Train for some epochs, from where the run stands; say each epoch once it is on the disk."""
    if dies_at >= 0:
        _die_at(dies_at, path)
    with RunDirectory.claim(path, OPTIONS, {"threads": 1}) as run:
        if run.status.ended:
            return
        last = run.load_checkpoint("last")
        weights, losses = ({"w": torch.zeros(size), "v": torch.zeros(3)}, []) if last is None else resumed(*last)
        for epoch in range(len(losses), epochs):
            weights = {name: weight * 0.5 + epoch + 1 for name, weight in weights.items()}
            losses = [*losses, float(weights["v"][0])]
            run.write_history(history_of(losses))
            if epoch == 0:
                run.save_checkpoint("epoch-0000", weights, {"epoch": 0})
            run.save_checkpoint("before", weights, {})
            run.save_checkpoint("last", weights, {"epoch": epoch, "losses": losses})
            run.write_status("running", epoch=epoch)
            outbox.send(epoch)
        run.delete_checkpoint("before")
        run.write_status("finished", epoch=epochs)


def resumed(tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights and losses of a checkpoint, having seen that they belong together."""
    assert len({float(weight[0]) for weight in tensors.values()}) == 1
    assert all(bool((weight == weight[0]).all()) for weight in tensors.values())
    assert float(tensors["v"][0]) == meta["losses"][-1]
    assert len(meta["losses"]) == meta["epoch"] + 1
    return tensors, meta["losses"]


def history_of(losses: list[float]) -> xarray.Dataset:
    seconds = [time.perf_counter() for _ in losses]
    return xarray.Dataset({"train_loss": ("epoch", losses), "seconds": ("epoch", seconds, {"units": "seconds"})})


def _die_at(number: int, folder: Path) -> None:
    """Kill this process, uncatchably, just before it touches a file for the n-th time."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in _TOUCHING or not (event == "fcntl.flock" or str(arguments[0]).startswith(str(folder))):
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(hook)


def hold(outbox: Connection, path: Path) -> None:
    """Claim a run and keep it until killed."""
    with RunDirectory.claim(path, OPTIONS) as run:
        run.write_status("running", epoch=3)
        outbox.send(os.getpid())
        time.sleep(600)


def hold_with_child(outbox: Connection, path: Path) -> None:
    """Claim a run, fork a child that lives on, and keep the run until killed."""
    with RunDirectory.claim(path, OPTIONS):
        child = os.fork()
        if not child:
            time.sleep(600)
        outbox.send(child)
        time.sleep(600)


def come_and_go(outbox: Connection, folder: Path, rounds: int) -> None:
    """Take a lock and let it go, again and again; fail where somebody else is in at the same time. Say how often in."""
    entered = 0
    for _ in range(rounds):
        try:
            lock = Lock(folder / "lock")
        except RunBusyError:
            continue
        (folder / "inside").touch(exist_ok=False)
        (folder / "inside").unlink()
        lock.release()
        entered += 1
    outbox.send(entered)


def compete(outbox: Connection, path: Path, start: float) -> None:
    """Claim a run at a given moment, with others; say whether it was won, and keep it for a while."""
    time.sleep(max(0.0, start - time.time()))
    try:
        with RunDirectory.claim(path, OPTIONS):
            outbox.send("won")
            time.sleep(3)
    except CreditscopeError as error:
        outbox.send(str(error))
