"""An audit for people: a table for a terminal, a checklist to paste, a page. Nothing here measures or judges."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from creditscope.auditing.verdict import Verdict, split_credits

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from creditscope.auditing.result import Audit
    from creditscope.report import Illustration

ETA = 0.003
MISSING = "–"
NAME = 22
WIDTH = 90
"""Of a table at least, so that the sentences below it have room; at most 100 where all is measured."""
COLOURS = {"passed": "green", "flagged": "yellow", "cannot judge": "red"}


# --- figures as text --------------------------------------------------------------------------------------------------


def number(value: float, digits: int = 3) -> str:
    """Return a number in as few characters as its digits need: 0.071, 8.29, 4e+08; a dash where it is not known.

    >>> number(0.07123), number(4.39e8), number(float("nan"))
    ('0.071', '4.4e8', '–')
    """
    if value != value:
        return MISSING
    if abs(value) == math.inf or value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.{digits}g}" if abs(value) >= 1 else f"{value:.3f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _cosine(data: xr.Dataset, l: int) -> str:
    low, high = data["cosine_interval"].values[l] if "cosine_interval" in data else (math.nan, math.nan)
    interval = f" [{low:.2f}, {high:.2f}]" if low == low else ""
    mark = "=" if "exact" in data and bool(data["exact"].values[l]) else ""
    return _share(_value(data, "cosine", l)) + mark + interval


def _rho(data: xr.Dataset, l: int) -> str:
    if "rho" not in data:
        return MISSING
    resolved = str(data["rho_regime"].values[l]) == "resolved"
    return _share(_value(data, "rho", l)) if resolved else "unresolved"


def _value(data: xr.Dataset, name: str, l: int) -> float:
    if name not in data:
        return math.nan
    values = data[name].sel(eta=ETA) if "eta" in data[name].dims else data[name]
    return float(values.values[l])


def _share(value: float) -> str:
    """Return a cosine, a correlation or an efficiency: three decimals, however small it is."""
    return MISSING if value != value else f"{value:.3f}"


def _plain(name: str, form: Callable[[float], str] = number) -> Callable[[xr.Dataset, int], str]:
    return lambda data, l: form(_value(data, name, l))


COLUMNS: Mapping[str, Callable[[xr.Dataset, int], str]] = {
    "state": lambda data, l: f"{l}" + ("" if l in _driven(data) else "·"),
    "cosine [95 %]": _cosine,
    "ρ": _rho,
    "limit": _plain("rho_limit", _share),
    "‖a‖/‖g‖": _plain("norm_ratio"),
    "nudge": _plain("nudging"),
    "effic.": _plain("nudging_efficiency", _share),
    "null z": _plain("null_z"),
    "‖h‖": _plain("state_norm"),
    "‖g‖": _plain("reference_norm"),
    "err32": _plain("precision_error"),
}
"""The columns of a table by state, and what is in their cells."""

_MEANINGS: Mapping[str, str] = {
    "state": "· drives no trained block",
    "cosine [95 %]": "with the exact gradient, = exact by construction",
    "ρ": "correlation of predicted and true loss changes",
    "limit": "what ρ tends to",
    "nudge": "change of the loss at η = .003",
    "effic.": "that over the exact gradient's",
    "null z": "against the same signal unlearned",
    "‖h‖": "of the state",
    "‖g‖": "of the exact gradient, per example",
    "err32": "the network's own precision against float64",
}


def legend(names: Iterable[str] = tuple(_MEANINGS)) -> str:
    """Return what the columns of a table are."""
    return "; ".join(f"{name}: {_MEANINGS[name]}" for name in names if name in _MEANINGS) + "."


def _driven(data: xr.Dataset) -> list[int]:
    return [int(l) for l in np.atleast_1d(data.attrs.get("driven", []))]


def rows(data: xr.Dataset) -> list[list[str]]:
    """Return the cells of one credit's Dataset, a row a state."""
    return [[cell(data, l) for cell in COLUMNS.values()] for l in range(data.sizes["layer"])]


def has_credit(data: xr.Dataset) -> bool:
    """Tell whether there is a credit, and not updates alone."""
    return "cosine" in data


# --- the table --------------------------------------------------------------------------------------------------------


def as_table(audit: Audit) -> Table:
    """Return the key figures, a row a state and a block of rows a credit, and the verdicts below them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    parts = dict(split_credits(audit.data))
    names = [name for name in COLUMNS if _is_measured(name, audit.data)]
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 0), min_width=WIDTH, caption=_captions(audit, names), caption_justify="left"
    )
    several = len(parts) > 1
    for name in names:
        table.add_column(name, justify="left" if name in ("state", "cosine [95 %]") else "right", no_wrap=True)
    for name, data in parts.items():
        if several:
            table.add_row("", _text(_brief(name), "bold"), *[""] * (len(names) - 2))
        for row in _shown(data, names):
            table.add_row(*row)
        table.add_section()
    return table


def _brief(name: str) -> str:
    """The whole name stands below, with the verdict; here it shall not make the column wider."""
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def _shown(data: xr.Dataset, names: Sequence[str]) -> list[list[str]]:
    return [[COLUMNS[name](data, l) for name in names] for l in range(data.sizes["layer"])]


_NEEDS = {
    "cosine [95 %]": "cosine",
    "ρ": "rho",
    "limit": "rho_limit",
    "‖a‖/‖g‖": "norm_ratio",
    "nudge": "nudging",
    "effic.": "nudging_efficiency",
    "null z": "null_z",
    "err32": "precision_error",
}


def _is_measured(column: str, data: xr.Dataset) -> bool:
    """Leave out the columns that this tier, or an audit of updates alone, does not have."""
    return column not in _NEEDS or _NEEDS[column] in data


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)


def _captions(audit: Audit, names: Sequence[str]) -> Text:
    from rich.text import Text

    whole = Text()
    for name, verdict in audit.verdicts.items():
        whole.append_text(_caption(name, verdict))
    return whole.append(legend(names), style="dim")


def _caption(name: str, verdict: Verdict) -> Text:
    found = _text(f"{name}: ", "bold not italic").append(f"{verdict.status}\n", style=f"{COLOURS[verdict.status]}")
    for kind, lines in sentences(verdict):
        for line in lines:
            found.append(f"  {kind}{line}\n", style="not italic not bold")
    return found


def sentences(verdict: Verdict) -> list[tuple[str, list[str]]]:
    """Return what a verdict says beside its status: flags, what was not measured, hints."""
    return [
        ("", [f"{key}: {verdict.reasons[key]}" for key in verdict.flags]),
        ("not measured: ", [f"{key}: {why}" for key, why in verdict.unmeasured.items()]),
        ("hint: ", list(verdict.hints)),
    ]


# --- the checklist ----------------------------------------------------------------------------------------------------


def as_markdown(audit: Audit) -> str:
    """Return what a report of feedback alignment has to state (arXiv 2606.21126), filled in, ready to paste."""
    parts = dict(split_credits(audit.data))
    lines = [f"# Audit: {', '.join(parts)} on {audit.data.attrs.get('network', 'a network')}", ""]
    lines += [f"**{audit.verdict.status}**", ""]
    for name, data in parts.items():
        lines += [*_checklist(name, data, audit.verdicts[name]), ""]
    return "\n".join(
        [*lines, "## Pitfalls", "", *(f"- [x] {line}" for line in disclosures(audit)), "", _made(audit.data)]
    )


def _checklist(name: str, data: xr.Dataset, verdict: Verdict) -> list[str]:
    lines = [f"## {name}", ""]
    lines += [f"- {key}: {_escape(value)}" for key, value in facts(data).items()]
    lines += ["", f"**Verdict: {verdict.status}**", ""]
    found = [f"- {kind}{_escape(line)}" for kind, group in sentences(verdict) for line in group]
    lines += [*(found or ["- no flags"]), ""]
    lines += ["| " + " | ".join(map(_cell, COLUMNS)) + " |", "|" + " --- |" * len(COLUMNS)]
    return [*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows_or_none(data)), "", legend()]


def rows_or_none(data: xr.Dataset) -> list[list[str]]:
    """Return the rows, of updates alone with dashes for what a credit would have."""
    if has_credit(data):
        return rows(data)
    kept = [name for name in COLUMNS if _is_measured(name, data)]
    return [
        [COLUMNS[name](data, l) if name in kept else MISSING for name in COLUMNS] for l in range(data.sizes["layer"])
    ]


def _escape(text: Any) -> str:
    """Names come from users: none shall become markup."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#" else c for c in str(text)).replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def facts(data: xr.Dataset) -> dict[str, str]:
    """Return the reporting checklist of one credit: what was measured on what, in words and numbers."""
    attrs = data.attrs
    run = json.loads(attrs.get("run", "{}"))
    terminal = attrs.get("terminal_norm") or "none found"
    found = {
        "method": "; ".join(filter(None, [attrs.get("rule", ""), attrs.get("formula", "not stated")])),
        "architecture": (
            f"{attrs.get('network', 'not stated')}, {_whole(attrs.get('parameters'))} parameters, "
            f"{len(attrs['blocks'])} blocks ({', '.join(attrs['blocks'])}), terminal normalisation: {terminal}"
        ),
        "data": run.get("data", "as given"),
        "training": run.get("training", "not stated"),
        "evaluation set": f"n = {attrs['n']}, eval mode, {attrs['tier']} tier, probe {attrs['probe']}",
        "seeds": run.get("seeds", "not stated") + f"; of the audit's own draws: {attrs['seed']}",
        "feedback": f"{attrs.get('feedback', 'not stated')}{run.get('feedback', '')}",
        "accuracy": accuracy_of(list(attrs["accuracies"]))
        if "accuracies" in attrs
        else run.get("accuracy", "not given"),
    }
    for name in ("frozen-bp", "frozen-rule", "shallow"):
        if f"baseline_{name}" in attrs:
            found[f"baseline {name}"] = accuracy_of(list(attrs[f"baseline_{name}"]))
    return found | _measured_facts(data)


def _whole(value: Any) -> str:
    return "?" if value is None else f"{int(value):,}"


def accuracy_of(values: Sequence[float]) -> str:
    """Return mean, spread, and what they are of.

    >>> accuracy_of([0.30, 0.32])
    '0.310 ± 0.014 (sample standard deviation, ddof = 1, n = 2 seeds)'
    """
    if len(values) == 1:
        return f"{values[0]:.3f} (n = 1 seed)"
    spread = f"(sample standard deviation, ddof = 1, n = {len(values)} seeds)"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f} {spread}"


def _measured_facts(data: xr.Dataset) -> dict[str, str]:
    found = {}
    if has_credit(data):
        states, share = ", ".join(f"h_{l}" for l in _driven(data)), number(float(data["best_share"]))
        found["Γ"] = (
            f"{number(float(data['cosine_mean']))}, mean of the never-clamped cosines over the states that drive "
            f"trained blocks ({states or 'none'}); share of the best: {share}; by layer below"
        )
    for label, name in (("‖h_l‖", "state_norm"), ("‖g_l‖", "reference_norm"), ("‖a_l‖", "credit_norm")):
        if name in data:
            found[label] = (
                f"[{', '.join(number(float(v)) for v in data[name].values)}], {data[name].attrs['reduction']}"
            )
    if "published_reference_norm" in data:
        published = data["published_reference_norm"]
        values = ", ".join(number(float(v)) for v in published.values)
        found["‖g_l‖ as papers print it"] = (
            f"[{values}], of the loss averaged over a batch of {published.attrs['batch']}"
        )
    if "stability" in data:
        stability = data["stability"]
        found["cross-batch stability"] = (
            f"{number(float(stability))} at state L/2, {stability.attrs['n']} batches of {stability.attrs['batch']}"
        )
    return found


def disclosures(audit: Audit) -> list[str]:
    """Return the pitfalls of the field, each with what was done here."""
    data = audit.data
    draws = f" ({data['null_z'].attrs['null']}, {data['null_z'].attrs['draws']} draws)" if "null_z" in data else ""
    clamped = _clamped(data["clamped_share"]) if "clamped_share" in data else ""
    listed = [
        "norms are per example, over all axes but the first",
        f"cosines are never clamped{clamped}",
        f"the reference is computed in float64{_certificate(data)}",
        "credits and gradients are per example, of the summed loss: no figure depends on the batch size",
        "every figure stands by layer; a mean names its layers",
        "what could not be computed is a dash with a reason, never 0 and never 1",
        "intervals over examples (bootstrap) and over seeds (Student's t) are not mixed; ± is the sample sd",
    ]
    if draws:
        listed.append(f"the credit is compared with its null{draws}")
    if "checks" in data.attrs and int(data.attrs["checks"]):
        listed.append(f"the audit checked itself on this network: {data.attrs['checks']} planted readings")
    return listed


def _clamped(share: xr.DataArray) -> str:
    most = float(share.max()) if share.notnull().any() else math.nan
    return f"; at B = {share.attrs['batch']} the usual clamp would touch {_percent(most)} of the examples at most"


def _percent(share: float) -> str:
    return "an unknown part" if share != share else f"{share:.1%}"


def _certificate(data: xr.Dataset) -> str:
    if "precision_error" not in data or not data["precision_error"].notnull().any():
        return ""
    worst = number(float(np.nanmax(data["precision_error"].values)))
    return f"; the network's own precision is off by at most {worst} of its norm"


def _made(data: xr.Dataset) -> str:
    attrs = data.attrs
    return f"Audit version {attrs['version']}, creditscope {attrs['creditscope']}, torch {attrs['torch']}."


# --- the page ---------------------------------------------------------------------------------------------------------


def write_html(audit: Audit, path: Path) -> Path:
    """Write one self-contained page; figures are drawn from the Dataset alone."""
    from creditscope.report import AuditPage, CreditPart
    from creditscope.runs.files import write_bytes

    data = audit.data
    parts = [
        CreditPart(name, verdict, sentences(verdict), facts(own), rows_or_none(own))
        for (name, own), verdict in zip(split_credits(data), audit.verdicts.values(), strict=True)
    ]
    page = AuditPage(
        verdict=audit.verdict,
        parts=parts,
        heading=[*COLUMNS],
        legend=legend(),
        illustrations=_illustrations(audit),
        disclosures=disclosures(audit),
        thresholds=audit.thresholds,
        seconds={str(k): float(v) for k, v in data["seconds"].to_series().items()} if "seconds" in data else {},
        made=_made(data),
    )
    write_bytes(path, page.html().encode())
    return path


def _illustrations(audit: Audit) -> list[Illustration]:
    from creditscope import figures
    from creditscope.report import Illustration

    data, drawn = audit.data, []
    if has_credit(data):
        caption = (
            "The mean cosine of credit and exact gradient by state, with its 95 % interval. The band is what the same "
            "signal reads without what it and the network have learned of each other."
        )
        drawn.append(Illustration(figures.alignment(data), "Alignment by state", caption))
    caption = "Left: the states. Right: the exact gradient, and the credit in its place."
    drawn.append(Illustration(figures.layer_norms(data), "Norms by state", caption))
    if "precision_error" in data and data["precision_error"].notnull().any():
        caption = "What is lost of the exact gradient in the network's own precision."
        limit = audit.thresholds["precision_error"].value
        drawn.append(Illustration(figures.precision(data, limit=limit), "Precision by state", caption))
    return drawn
