"""Audits of trainings: of the learner that a training gave, and of one that is put together again from its run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from creditscope import config, data
from creditscope.auditing.result import VERSION, Audit, load_audit
from creditscope.auditing.run import audit
from creditscope.data import Dataset, Loader
from creditscope.errors import UsageError
from creditscope.recipes import Recipe
from creditscope.rng import stream
from creditscope.rules._base import Learner
from creditscope.runs import RunDirectory, unflatten

EXAMPLES = 1024
Epoch = int | Literal["last"]
Tier = Literal["quick", "standard", "full"]
Probe = Literal["float64", "published"]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """How a trained learner is audited: with the version, what decides whether an audit on disk is the one wanted."""

    tier: Tier = "standard"
    probe: Probe = "float64"
    n: int = EXAMPLES
    """The first of the test split, or all of it."""
    epoch: Epoch = "last"


@dataclass(frozen=True)
class Trained:
    """A trained learner, with what its audit wants to know of its training."""

    learner: Learner
    data: Dataset
    initial: Mapping[str, Tensor] | None
    """The network at its initialisation; None where that was not kept."""
    about: Mapping[str, str]
    """Data, training, seeds, feedback and accuracy, in words: for the reporting checklist."""


@dataclass(frozen=True)
class Scores:
    """Final test accuracies, one a seed, of a training and of its baselines."""

    own: Sequence[float] = ()
    baselines: Mapping[str, Sequence[float]] | None = None

    @property
    def comparable(self) -> dict[str, Any]:
        """The arguments of ``audit``: both, where there is something on both sides."""
        there = {name: [*values] for name, values in (self.baselines or {}).items() if len(values)}
        return {"accuracies": [*self.own], "baselines": there} if self.own and there else {}


def audit_trained(
    trained: Trained, scope: Scope, scores: Scores, *, seed: int = 0, thresholds: str | Path | None = None
) -> Audit:
    """Audit a trained learner on the first examples of the test split."""
    x, y = examples(trained.learner, trained.data, scope.n)
    found = audit(
        trained.learner,
        x,
        y,
        initial=trained.initial,
        tier=scope.tier,
        probe=scope.probe,
        thresholds=thresholds,
        seed=seed,
        **scores.comparable,
    )
    found.data.attrs["run"] = json.dumps(dict(trained.about))
    found.data.attrs["asked"] = _asked(scope, scores)
    return found


def examples(learner: Learner, data: Dataset, n: int) -> tuple[Tensor, Tensor]:
    """Return the first test examples as the network takes them."""
    like = next(learner.network.parameters())
    batch = min(n, len(data.test))
    loader = Loader(data.test, batch=batch, dataset=data, device=like.device, dtype=like.dtype, augment="none")
    return next(loader.ordered())


def _asked(scope: Scope, scores: Scores) -> str:
    return json.dumps({**vars(scope), **scores.comparable}, sort_keys=True)


def stored_audit(path: Path, scope: Scope, scores: Scores, *, thresholds: str | Path | None = None) -> Audit | None:
    """Return the audit on disk if it is of this version and of the same question; None where one has to be made.

    Thresholds are none of the question: the verdict is taken anew from the same figures.
    """
    if not path.is_file():
        return None
    found = load_audit(path, thresholds)
    same = int(found.data.attrs["version"]) == VERSION and found.data.attrs.get("asked") == _asked(scope, scores)
    return found if same else None


def about_training(options: Mapping[str, Any], data: Dataset, accuracy: float) -> dict[str, str]:
    """Return what a run's options say of its training, in words."""
    recipe = ", ".join(f"{name} {value}" for name, value in options["recipe"].items())
    return {
        "data": f"{data.name}, {len(data.train):,} training, {len(data.test):,} test examples; audited on the latter",
        "training": f"{options['epochs']} epochs; {recipe}",
        "seeds": str(options["seed"]),
        "feedback": f"; drawn from the stream (seed {options['seed']}, 'rule')",
        "accuracy": f"{accuracy:.3f} (n = 1 seed)" if math.isfinite(accuracy) else "not known",
    }


@contextmanager
def threads_of(run: RunDirectory) -> Iterator[None]:
    """Measure with as many threads as the run was trained with: the last bits hang on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(run.options["threads"])
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- put together again -----------------------------------------------------------------------------------------------


def restore(run: RunDirectory, epoch: Epoch = "last", *, make: Callable[[], nn.Module] | None = None) -> Trained:
    """Make network and learner of a run again, as they were at an epoch whose checkpoint is kept.

    ``make`` makes the network of a run that was given its network as a module, and so did not record how to make it.
    """
    options = run.options
    dataset = _data_of(run)
    network = _network_of(run, dataset, make)
    recipe = Recipe(**options["recipe"])
    network = network.to(torch.float64 if recipe.precision == "float64" else torch.float32)
    learner = config.rule_from_dict(options["rule"]).attach(
        network,
        **_attach_options(run),
        training_steps=options["epochs"] * _steps(dataset, recipe),
        example=_example(network, dataset),
        generator=stream(options["seed"], "rule"),
    )
    initial = _saved(run, "epoch-0000")
    learner.load_state_dict(_checkpoint(run, epoch))
    about = about_training(options, dataset, final_accuracy(run, epoch))
    return Trained(learner, dataset, None if initial is None else network_part(initial), about)


def _data_of(run: RunDirectory) -> Dataset:
    recorded = run.options["data"]
    if recorded["name"] not in data.REGISTRY.entries:
        raise UsageError(
            f"{run.path} was trained on '{recorded['name']}', which is no data set that can be loaded by its name: "
            "audit it where it is trained, as fit(...).audit"
        )
    dataset = data.load(recorded["name"], **recorded["options"])
    if dataset.fingerprint() != recorded["fingerprint"]:
        raise UsageError(
            f"{run.path} was trained on other data than the {dataset.name} that is here now (fingerprint "
            f"{recorded['fingerprint']} there, {dataset.fingerprint()} here)"
        )
    return dataset


def _network_of(run: RunDirectory, dataset: Dataset, make: Callable[[], nn.Module] | None) -> nn.Module:
    recorded = run.options["network"]
    if make is None and "options" not in recorded:
        raise UsageError(
            f"{run.path} trained a network that was given as a module ({recorded['name']}) and did not record how to "
            "make it: pass --module package.file:function, which makes one"
        )
    if make is None:
        make = config.NetworkSpec(recorded["name"], recorded["options"], dataset.shape, dataset.classes)
    with torch.random.fork_rng(devices=[]):
        return make()


def _attach_options(run: RunDirectory) -> dict[str, Any]:
    """Return how the rule was attached; a function cannot be made again from its name."""
    recorded = run.options["attach"]
    if recorded["state"] is not None or recorded["loss"] != "creditscope.tape.cross_entropy":
        given = f"state={recorded['state']}" if recorded["state"] is not None else f"loss={recorded['loss']}"
        raise UsageError(
            f"{run.path} was trained with {given}, a function: audit it where it is trained, as fit(...).audit"
        )
    return {"blocks": recorded["blocks"], "head": recorded["head"]}


def _steps(dataset: Dataset, recipe: Recipe) -> int:
    examples = len(dataset.train)
    return examples // recipe.batch if recipe.drop_last else -(-examples // recipe.batch)


def _example(network: nn.Module, dataset: Dataset) -> Tensor:
    like = next(network.parameters())
    loader = Loader(dataset.test, batch=2, dataset=dataset, device=like.device, dtype=like.dtype, augment="none")
    return next(loader.ordered())[0]


def _checkpoint(run: RunDirectory, epoch: Epoch) -> dict[str, Any]:
    """Return the learner's state at an epoch, from its own checkpoint or, of the last one, from where the run ended."""
    last = run.status.epoch
    tag = "last" if epoch == "last" else f"epoch-{epoch:04d}"
    found = _saved(run, tag)
    if found is None and epoch == last:
        found = _saved(run, "last")
    if found is None and epoch == "last":
        found = _saved(run, f"epoch-{last:04d}")
    if found is None:
        there = ", ".join(run.checkpoints()) or "none"
        raise UsageError(
            f"{run.path} has no checkpoint of epoch {epoch}; there are {there} (train --keep says which stay)"
        )
    return found


def _saved(run: RunDirectory, tag: str) -> dict[str, Any] | None:
    saved = run.load_checkpoint(tag)
    return None if saved is None else unflatten(*saved)["learner"]


def network_part(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the network's tensors of a learner's state."""
    prefix = "network."
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def final_accuracy(run: RunDirectory, epoch: Epoch = "last") -> float:
    """Return the test accuracy of a run at an epoch; NaN where it was not evaluated."""
    history = run.history()
    if history is None or "test_acc" not in history or not history.sizes["epoch"]:
        return math.nan
    rows = history["test_acc"].isel(epoch=[-1]) if epoch == "last" else history["test_acc"].sel(epoch=[epoch])
    return float(rows.values[0])
