"""What the demo does: train three rules and their baselines, draw, and write the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from creditscope import figures
from creditscope.cli.progress import several
from creditscope.cli.train import Plan, Train
from creditscope.report import Illustration, Page, Table, accuracies
from creditscope.runs import RunDirectory
from creditscope.runs.files import write_bytes
from creditscope.train import Result

RULES = {"bp": "backpropagation (BP)", "fa": "feedback alignment (FA)", "dfa": "direct feedback alignment (DFA)"}
METHODS = {
    "bp": ("bp",),
    "fa": ("fa",),
    "dfa": ("dfa",),
    "frozen-bp": ("frozen", "rule.stem=bp"),
    "frozen-fa": ("last-k", "rule.rule=fa", "rule.k=0"),
    "frozen-dfa": ("frozen", "rule.stem=dfa"),
    "shallow": ("shallow",),
}
"""The rule of each method, and what is set of it: each rule stands beside itself with no block learning."""
SEEDS = (42, 123, 456)
EPOCHS = 30
SETTINGS = ("net.width=128", "net.depth=4", "recipe.batch=64")

LEAD = (
    "Three rules train the same networks on the same data, from the same initialisations. Beside each stands the same "
    "rule with the blocks left as they were initialised, and the network without its blocks: only a rule that exceeds "
    "both has made use of the depth."
)


@dataclass(frozen=True)
class Story:
    """What there is to tell."""

    table: Table
    report: Path
    diverged: list[str]
    """The folders of runs that diverged."""


def tell(out: Path, command: str) -> Story:
    """Train what is not trained yet, and write figures and report into ``out``; ``command`` is what did that."""
    trainings = [_training(out, method, seed) for method in METHODS for seed in SEEDS]
    plans, results = _train(trainings)
    data = _gathered(results)
    table, illustrations = accuracies(data, RULES), _illustrations(data)
    page = Page(
        title="Three rules and their baselines on the digits",
        lead=LEAD,
        table=table,
        illustrations=(*illustrations.values(),),
        settings=_settings(plans[0], results[0]),
        environment=RunDirectory.open(plans[0].out).environment or {},
        repeat=command,
        commands=tuple(" ".join(["creditscope train", *train.arguments()]) for train in trainings),
    )
    _draw(out / "figures", illustrations)
    write_bytes(out / "report.html", page.html().encode())
    return Story(table, out / "report.html", [str(r.directory) for r in results if r.status == "diverged"])


def _training(out: Path, method: str, seed: int) -> Train:
    rule, *assignments = METHODS[method]
    return Train(
        rule=rule,
        epochs=EPOCHS,
        seed=seed,
        threads=1,  # the network is so small that a second thread costs more than it brings
        assignments=(*SETTINGS, *assignments),
        out=str(out / f"{method}-{seed}"),
    )


def _train(trainings: list[Train]) -> tuple[list[Plan], list[Result]]:
    plans, results = [train.plan() for train in trainings], []
    with several(len(trainings), EPOCHS) as shown:
        for train, plan in zip(trainings, plans, strict=True):
            shown.begin(plan.out.name)
            results.append(train.fit(plan, out=plan.out, callbacks=[shown.epoch]))
            shown.end(results[-1])
    return plans, results


def _gathered(results: list[Result]) -> xr.Dataset:
    """Return the histories as one Dataset (rule, seed, epoch, layer); epochs that a run did not reach are NaN."""
    names = ["test_acc", "state_norm", "reference_norm"]
    histories = iter([result.history[names].reindex(epoch=range(EPOCHS + 1)) for result in results])
    plainly: Any = {"data_vars": "all", "coords": "minimal", "compat": "override", "join": "exact"}
    rules = [xr.concat([next(histories) for _ in SEEDS], "seed", **plainly) for _ in METHODS]
    return xr.concat(rules, "rule", **plainly).assign_coords(seed=[*SEEDS], rule=[*METHODS])


def _illustrations(data: xr.Dataset) -> dict[str, Illustration]:
    return {
        "accuracy": Illustration(
            figures.accuracy(data, [*RULES]),
            "Accuracy by epoch",
            "Solid: the rule in all blocks. Dashed: the same rule with the blocks left as they were initialised, so "
            "that stem and head alone learn. Dotted: the network without its blocks, trained by backpropagation.",
        ),
        "norms": Illustration(
            figures.norms(data, [*RULES]),
            "Norms by epoch",
            "Left: the last state h_L, whose norm the terminal LayerNorm divides out again. Right: the exact credit "
            "g_L = ∂(Σᵢ ℓᵢ)/∂h_L, the reference that a rule's credit is compared with.",
        ),
    }


def _draw(folder: Path, illustrations: dict[str, Illustration]) -> None:
    folder.mkdir(exist_ok=True)
    for name, illustration in illustrations.items():
        for kind in ("png", "pdf"):
            write_bytes(folder / f"{name}.{kind}", illustration.image(kind))


def _settings(plan: Plan, result: Result) -> dict[str, str]:
    network, recipe = plan.network, asdict(plan.recipe)
    count = sum(p.numel() for p in result.network.parameters())
    return {
        "data": f"{plan.data.name}: {len(plan.data.train):,} training and {len(plan.data.test):,} test examples",
        "network": f"{network.name} ({_listed(network.options)}), {count:,} parameters",
        "recipe": _listed(recipe),
        "epochs": str(EPOCHS),
        "seeds": ", ".join(map(str, SEEDS)),
    }


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())
