"""What a training will cost: a few of its steps, timed, and nothing written."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from creditscope.cli.train import Plan, Train
    from creditscope.rules import Learner
    from creditscope.train import EpochEnd

STEPS = 8


@dataclass(frozen=True)
class Estimate:
    """The size of a training, measured on its first steps."""

    parameters: dict[str, int]
    """By section: stem, each block, head."""
    steps_per_epoch: int
    seconds_per_step: float
    seconds_per_evaluation: float
    seconds: float
    """Of the whole training."""
    peak_bytes: int | None
    """The most memory that the process, or the GPU, had in use during those steps; None where that cannot be told."""

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        memory = "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:.0f} MiB"
        return (
            f"parameters  {sum(self.parameters.values()):,}: {counts}\n"
            f"time        about {_duration(self.seconds)}: {self.steps_per_epoch} steps an epoch of "
            f"{1e3 * self.seconds_per_step:.2f} ms, {1e3 * self.seconds_per_evaluation:.0f} ms an evaluation\n"
            f"memory      {memory} at most in the steps timed"
        )


def estimate(train: Train, plan: Plan) -> Estimate:
    """Take the first steps of a training and say what all of it will cost."""
    watch = _Stopwatch(train.device)
    with suppress(_EnoughError):
        train.fit(plan, callbacks=[watch.epoch], progress=watch.step)
    step = median(watch.durations)
    evaluations = 1 + -(-train.epochs // train.evaluate_every)
    seconds = train.epochs * watch.steps * step + evaluations * watch.evaluation
    return Estimate(watch.parameters, watch.steps, step, watch.evaluation, seconds, _peak(train.device))


class _EnoughError(Exception):
    """Enough steps were timed."""


@dataclass
class _Stopwatch:
    device: str
    durations: list[float] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    evaluation: float = 0.0
    _since: float = 0.0

    def epoch(self, end: EpochEnd) -> None:
        if end.epoch == 0:
            self.evaluation = float(end.row["seconds"])
            self.parameters = _counts(end.learner)
        self._since = time.perf_counter()

    def step(self, epoch: int, step: int, steps: int) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.durations.append(now - self._since)
        self._since, self.steps = now, steps
        if len(self.durations) == STEPS:
            raise _EnoughError


def _counts(learner: Learner) -> dict[str, int]:
    parameters = dict(learner.network.named_parameters())
    counts = {name: sum(parameters[key].numel() for key in keys) for name, keys in learner.sections.items()}
    estimators = sum(p.numel() for group in learner.estimator_groups() for p in group["params"])
    return counts | ({"estimators": estimators} if estimators else {})


def _peak(device: str) -> int | None:
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
