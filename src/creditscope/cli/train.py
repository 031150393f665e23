"""``creditscope train``: one run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from creditscope import config
from creditscope.cli.command import Command, Exit, columns, complain, flag, say, say_json
from creditscope.cli.progress import scores, training
from creditscope.errors import UsageError
from creditscope.recipes import Recipe

if TYPE_CHECKING:
    from creditscope.data import Dataset
    from creditscope.rules import Rule
    from creditscope.train import Result

SECTIONS = ("rule", "net", "data", "recipe")
FIT_OPTIONS = ("epochs", "seed", "device", "threads", "evaluate_every", "keep", "probe", "graph", "compile")
"""The flags that are arguments of ``fit`` as they are."""


@dataclass(frozen=True)
class Plan:
    """What a training is made of."""

    rule: Rule
    network: config.NetworkSpec
    data: Dataset
    recipe: Recipe
    out: Path


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Train one network by one rule. The same command again goes on where it stopped, to the same bits.

    `--rule dfa:study` takes the source study's options of a rule, `--recipe study` its batch, optimiser, schedule and
    clipping; --set changes any of them. `creditscope list rules dfa` shows what can be set of a rule, `list nets
    resmlp` of a network, `list data teacher` of a data set.
    """

    rule: str = flag()
    """The learning rule."""
    net: str = "resmlp"
    """The network; inputs and classes are taken from the data."""
    data: str = "digits"
    """The data set, or a folder that holds one in its official layout."""
    epochs: int = 10
    """Passes over the training split."""
    seed: int = 0
    """The seed of everything that is drawn."""
    assignments: tuple[str, ...] = flag((), spelling="--set", value="rule.scale=2", repeated=True)
    """Set an option of rule, net, data or recipe; can be given several times."""
    recipe: str = "default"
    """Batch, optimiser, schedule, clipping and precision, under one name: default or study."""
    validation: int = 0
    """Hold this many training examples out as a validation split."""
    out: str | None = flag(None, value="DIR")
    """The run's folder (default: runs/DATA-NET-RULE-SEED)."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, ..."""
    threads: int | None = None
    """CPU threads; they are recorded, since the bits hang on them (default: what torch takes)."""
    evaluate_every: int = 1
    """Epochs between evaluations; the first and the last are always evaluated."""
    keep: tuple[int | Literal["last"], ...] = flag((0, "last"), value="EPOCHS")
    """The epochs whose checkpoints stay."""
    probe: int = 1024
    """Test examples on which the norms of states and references are taken."""
    graph: Literal["auto", "off"] = flag("auto", value="auto|off")
    """Whether to capture the step in a CUDA graph, on a GPU."""
    compile: bool = False
    """Compile each block's forward."""
    baselines: bool = False
    """Train the matched baselines too, in baselines/ below the run's folder: frozen-bp, frozen-rule, shallow."""
    monitor: bool = False
    """Run the quick audit along the training, at steps 0, 1, 2, 4, 8, ..., into monitor.jsonl."""
    dry_run: bool = False
    """Train nothing: print the resolved options, the parameters, and an estimate of time and memory."""

    def run(self) -> Exit:
        """Train, or say what would be done."""
        plan = self.plan()
        if self.dry_run:
            return self._estimate(plan)
        with training(plan.out.name, self.epochs) as shown, warnings_as_lines():
            more: dict[str, Any] = {"baselines": self.baselines, "monitor": self.monitor}
            result = self.fit(plan, out=plan.out, callbacks=[shown.epoch], progress=shown.step, **more)
        self._report(result)
        return Exit.DIVERGED if result.status == "diverged" else Exit.DONE

    def plan(self) -> Plan:
        """Resolve every name and option, and load the data."""
        given = config.parse_assignments(self.assignments, SECTIONS)
        rule = config.make_rule(self.rule, given["rule"])
        options = config.network_options(self.net, given["net"])
        recipe = config.make_recipe(self.recipe, given["recipe"])
        require_device(self.device)
        data = config.load_data(self.data, given["data"], validation=self.validation)
        network = config.NetworkSpec(self.net, options, data.shape, data.classes)
        name = f"{data.name}-{self.net}-{self.rule.replace(':', '-')}-{self.seed}"
        return Plan(rule, network, data, recipe, Path(self.out or Path("runs", name)))

    def fit(self, plan: Plan, **options: Any) -> Result:
        """Train by the plan."""
        from creditscope.train import fit

        own = {name: getattr(self, name) for name in FIT_OPTIONS}
        return fit(plan.network, plan.rule, plan.data, recipe=plan.recipe, **own, **options)

    def _report(self, result: Result) -> None:
        last = {str(name): float(row[-1]) for name, row in result.history.items() if row.dims == ("epoch",)}
        if self.json:
            found = {"status": result.status, "path": str(result.directory), "already_done": result.resumed}
            found |= {"epoch": int(result.history.epoch[-1]), **_without_nan(last), **result.detail}
            say_json(found | self._extras(result))
            return
        state = f"{result.status} before; nothing was done" if result.resumed else result.status
        say(f"{state}: {scores(last)}" if result.status == "finished" else f"{state}: {_place(result.detail)}")
        for name, value in self._extras(result).items():
            say(f"{name.replace('_', ' ')}: {_place(value) or 'none'}")
        say(str(result.directory))

    def _extras(self, result: Result) -> dict[str, dict[str, Any]]:
        """Return what was asked for beside the training itself."""
        found: dict[str, dict[str, Any]] = {}
        if self.baselines:
            found["baselines"] = {name: round(values[0], 4) for name, values in result.baselines.items()}
            if result.refused:
                found["without_an_accuracy"] = result.refused
        if result.monitor is not None:
            found["first_fired"] = result.monitor.first_fired
        return found

    def _estimate(self, plan: Plan) -> Exit:
        from creditscope.cli.estimate import estimate

        found = estimate(self, plan)
        options = {
            "rule": config.to_dict(plan.rule),
            "net": {"name": plan.network.name, **plan.network.options},
            "data": {"name": plan.data.name, **plan.data.options},
            "recipe": asdict(plan.recipe),
            "run": {name: getattr(self, name) for name in FIT_OPTIONS},
            "out": str(plan.out),
        }
        if self.json:
            say_json({"options": options, "estimate": asdict(found)})
            return Exit.DONE
        say(columns([(key, _assignments(value)) for key, value in options.items()]))
        say()
        say(str(found))
        return Exit.DONE


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Say what a monitor costs in one line, and not with the place in the source."""
    from creditscope.auditing.monitor import MonitorWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", MonitorWarning)
        warnings.showwarning = lambda message, *_, **__: complain(f"creditscope: {message}")
        yield


def require_device(device: str) -> None:
    """Refuse a device that is not there, in one line."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from error


def _assignments(options: Any) -> str:
    if not isinstance(options, dict):
        return str(options)
    name = [options["name"]] if "name" in options else []
    return " ".join([*name, *(f"{key}={_inner(value)}" for key, value in options.items() if key != "name")])


def _inner(value: Any) -> str:
    return f"({_assignments(value)})" if isinstance(value, dict) else str(value)


def _place(detail: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in detail.items())


def _without_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
