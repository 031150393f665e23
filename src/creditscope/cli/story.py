"""What the demo does: train three rules and their baselines, audit them, draw, and write the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from creditscope import figures
from creditscope.auditing.result import Audit
from creditscope.auditing.show import MISSING, sentences
from creditscope.auditing.trained import Scope
from creditscope.auditing.verdict import ORDER
from creditscope.cli.audited import audit_run, subjects
from creditscope.cli.progress import auditing, several
from creditscope.cli.train import Plan, Train
from creditscope.report import Illustration, Judged, Page, Table, accuracies
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
    "frozen-dfa": ("last-k", "rule.rule=dfa", "rule.k=0"),
    "shallow": ("shallow",),
}
"""The rule of each method, and what is set of it: each rule stands beside itself with no block learning."""
SEEDS = (42, 123, 456)
EPOCHS = 30
SETTINGS = ("net.width=128", "net.depth=4", "recipe.batch=64")

LEAD = (
    "Three rules train the same networks on the same data, from the same initialisations. Beside each stands the same "
    "rule with the blocks left as they were initialised, backpropagation with the same, and the network without its "
    "blocks: only a rule that exceeds all of them has made use of the depth. The accuracy alone does not say so, nor "
    "whether the signal that reached the blocks was any good; the audit of each run says both, and whether it can be "
    "believed."
)


@dataclass(frozen=True)
class Story:
    """What there is to tell."""

    table: Table
    report: Path
    diverged: list[str]
    """The folders of runs that diverged."""
    verdicts: dict[str, str]
    """The status of each run's audit, by its folder."""


def tell(out: Path, command: str) -> Story:
    """Train what is not trained yet, and write figures and report into ``out``; ``command`` is what did that."""
    trainings = [_training(out, method, seed) for method in METHODS for seed in SEEDS]
    plans, results = _train(trainings)
    audits = _audit([plan.out for plan in plans])
    data = _gathered(results)
    table, illustrations = _judged(accuracies(data, RULES), out, audits), _illustrations(data, out, audits)
    page = Page(
        title="Three rules and their baselines on the digits",
        lead=LEAD,
        table=table,
        illustrations=(*illustrations.values(),),
        settings=_settings(plans[0], results[0]),
        environment=RunDirectory.open(plans[0].out).environment or {},
        repeat=command,
        commands=tuple(" ".join(["creditscope train", *train.arguments()]) for train in trainings),
        verdicts=tuple(_verdict(rule, audits[out / f"{rule}-{SEEDS[0]}"]) for rule in RULES),
    )
    _draw(out / "figures", illustrations)
    write_bytes(out / "report.html", page.html().encode())
    diverged = [str(r.directory) for r in results if r.status == "diverged"]
    statuses = {str(folder): audit.verdict.status for folder, audit in audits.items()}
    return Story(table, out / "report.html", diverged, statuses)


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


def _audit(folders: list[Path]) -> dict[Path, Audit]:
    """Audit every run, with the accuracies and baselines that are there among them."""
    todo, _ = subjects(folders)
    shown = auditing(len(todo))
    return {subject.run.path: shown(subject.run.path.name, audit_run(subject, Scope())) for subject in todo}


JUDGED = (
    "margin: over the best of the baselines, with its 95 % interval over seeds (Student's t). passed: nothing stands "
    "against it. flagged: its numbers stand, and say what the flag says. cannot judge: its numbers do not stand."
)


def _judged(table: Table, out: Path, audits: dict[Path, Audit]) -> Table:
    """Add margins and verdicts over seeds to the accuracies."""
    rows = []
    for row, rule in zip(table.rows, RULES, strict=True):
        own = [audits[out / f"{rule}-{seed}"] for seed in SEEDS if out / f"{rule}-{seed}" in audits]
        statuses = Counter(audit.verdict.status for audit in own)
        flags = Counter(flag for audit in own for flag in audit.verdict.flags)
        worst = max(statuses, key=ORDER.index)
        named = ", ".join(_of_seeds(*item) for item in flags.items())
        rows.append((*row, _margin(own[0]), _of_seeds(worst, statuses[worst]), named or MISSING))
    heading = (*table.heading, "margin", "verdict", "flags")
    return Table(heading, tuple(rows), f"{table.note} {JUDGED}")


def _margin(audit: Audit) -> str:
    attrs = audit.data.attrs
    if "margin" not in attrs:
        return MISSING
    interval = f" [{attrs['margin_low']:+.3f}, {attrs['margin_high']:+.3f}]" if "margin_low" in attrs else ""
    return f"{attrs['margin']:+.3f}{interval}"


def _of_seeds(what: str, count: int) -> str:
    return what if count == len(SEEDS) else f"{what} ({count} of {len(SEEDS)})"


def _verdict(rule: str, audit: Audit) -> Judged:
    said = tuple(kind + line for kind, lines in sentences(audit.verdict) for line in lines)
    return Judged(f"{RULES[rule]}, seed {SEEDS[0]}", audit.verdict.status, said, f"{rule}-{SEEDS[0]}/audit.html")


ALIGNMENT = ("cosine", "cosine_interval", "cosine_clamped", "null_mean", "null_sd", "exact")


def _side_by_side(out: Path, audits: dict[Path, Audit]) -> xr.Dataset:
    """Return the alignment of the rules, each on its own network of the first seed, as one audit of several credits."""
    own = [audits[out / f"{rule}-{SEEDS[0]}"].data for rule in RULES]
    together = xr.concat([data[[*ALIGNMENT]] for data in own], "credit", combine_attrs="override")
    attrs = {key: value for data in own for key, value in data.attrs.items() if "@" in key}
    return together.assign_coords(credit=[*RULES]).assign_attrs(attrs | {"n": own[0].attrs["n"]})


def _gathered(results: list[Result]) -> xr.Dataset:
    """Return the histories as one Dataset (rule, seed, epoch, layer); epochs that a run did not reach are NaN."""
    names = ["test_acc", "state_norm", "reference_norm"]
    histories = iter([result.history[names].reindex(epoch=range(EPOCHS + 1)) for result in results])
    plainly: Any = {"data_vars": "all", "coords": "minimal", "compat": "override", "join": "exact"}
    rules = [xr.concat([next(histories) for _ in SEEDS], "seed", **plainly) for _ in METHODS]
    return xr.concat(rules, "rule", **plainly).assign_coords(seed=[*SEEDS], rule=[*METHODS])


def _illustrations(data: xr.Dataset, out: Path, audits: dict[Path, Audit]) -> dict[str, Illustration]:
    return {
        "alignment": Illustration(
            figures.alignment(_side_by_side(out, audits)),
            "Alignment by state",
            f"The mean cosine of each rule's credit with the exact gradient, seed {SEEDS[0]}, each on its own network. "
            "The band is what the same rule reads with feedback matrices that the network has not met (of "
            "backpropagation, with one random change of the features).",
        ),
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
