"""Runs on disk, each with the runs that it is compared with, and their audits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from creditscope import config
from creditscope.auditing.result import Audit
from creditscope.auditing.trained import Scope, Scores, audit_trained, final_accuracy, restore, stored_audit, threads_of
from creditscope.errors import UsageError
from creditscope.rules.baselines import baselines_of, is_baseline
from creditscope.runs import RunDirectory
from creditscope.runs.files import write_bytes

BESIDE = ("seed", "keep")
"""Options in which runs of one training may differ: the seed, and what of a run stays on disk."""
OWN = ("baselines", "*", "options.json")


@dataclass(frozen=True)
class Kept:
    """A run on disk that has finished."""

    run: RunDirectory

    @cached_property
    def options(self) -> dict[str, Any]:
        """What it was started with."""
        return self.run.options

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.options["seed"]

    @cached_property
    def accuracy(self) -> float:
        """Its final test accuracy."""
        return final_accuracy(self.run)

    def kind(self, rule: Mapping[str, Any] | None = None) -> str:
        """Return what runs of one training have in common, as a text; of another rule where one is given."""
        shared = {name: value for name, value in self.options.items() if name not in BESIDE}
        return json.dumps(shared | ({"rule": rule} if rule is not None else {}), sort_keys=True)


@dataclass(frozen=True)
class Subject:
    """A run to audit, and the accuracies of its training and of its baselines over seeds."""

    run: RunDirectory
    scores: Scores


def subjects(folders: Iterable[Path]) -> tuple[list[Subject], list[RunDirectory]]:
    """Return the runs that have ended, each with what it is compared with, and those that have not."""
    runs = [Kept(RunDirectory.open(folder)) for folder in folders]
    ended = [kept for kept in runs if kept.run.status.ended]
    if not ended:
        states = ", ".join(f"{kept.run.path} {kept.run.status.state}" for kept in runs[:4])
        raise UsageError(f"no run has finished: {states}; the same `creditscope train` goes on")
    family = [*ended, *(own for kept in ended for own in _own_baselines(kept.run))]
    finished = [kept for kept in family if kept.run.status.state == "finished" and math.isfinite(kept.accuracy)]
    waiting = [kept.run for kept in runs if not kept.run.status.ended]
    return [Subject(kept.run, _scores(kept, finished)) for kept in ended], waiting


def _own_baselines(run: RunDirectory) -> list[Kept]:
    folders = sorted(path.parent for path in run.path.glob(str(Path(*OWN))))
    return [Kept(RunDirectory.open(folder)) for folder in folders]


def _scores(kept: Kept, family: list[Kept]) -> Scores:
    """Look for the runs of the same training, and for those of its baselines."""
    own = _by_seed(family, kept.kind())
    rule = config.rule_from_dict(kept.options["rule"])
    if is_baseline(rule):
        return Scores()
    rules = {name: config.to_dict(baseline) for name, baseline in baselines_of(rule).items()}
    found = {name: _by_seed(family, kept.kind(rule)) for name, rule in rules.items()}
    return Scores([*own.values()], {name: _paired(own, scores) for name, scores in found.items() if scores})


def _by_seed(family: list[Kept], kind: str) -> dict[int, float]:
    return {kept.seed: kept.accuracy for kept in sorted(family, key=lambda kept: kept.seed) if kept.kind() == kind}


def _paired(own: Mapping[int, float], scores: Mapping[int, float]) -> list[float]:
    """Return the accuracies in the order of the rule's seeds, so that equal places are equal seeds; then the others."""
    return [*(scores[seed] for seed in own if seed in scores), *(scores[seed] for seed in scores if seed not in own)]


def audit_run(
    subject: Subject,
    scope: Scope,
    *,
    thresholds: str | Path | None = None,
    again: bool = False,
    make: Callable[[], nn.Module] | None = None,
) -> Audit:
    """Audit a run and write what was found into it; an audit of this version that is there is read."""
    folder, run = subject.run.path, subject.run
    scores = subject.scores
    there = None if again else stored_audit(folder / "audit.nc", scope, scores, thresholds=thresholds)
    if there is not None and (folder / "audit.html").exists() and thresholds is None:
        return there
    with RunDirectory.claim(folder, run.options), threads_of(run):
        found = there or audit_trained(restore(run, scope.epoch, make=make), scope, scores, thresholds=thresholds)
        write(found, folder)
    return found


def write(audit: Audit, folder: Path) -> None:
    """Write the three forms of an audit."""
    audit.save(folder / "audit.nc")
    write_bytes(folder / "audit.md", audit.to_markdown().encode())
    audit.to_html(folder / "audit.html")
