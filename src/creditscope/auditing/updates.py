"""Updates, parameter by parameter: against backpropagation, what trains what, and what they exploit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.auditing.bench import Bench
from creditscope.auditing.measure import NAN
from creditscope.auditing.sheet import Sheet
from creditscope.auditing.subject import Claim, preserved
from creditscope.calling import gradients_of, pick_state, undisturbed
from creditscope.errors import UsageError
from creditscope.evaluation import evaluating
from creditscope.metrics.alignment import cosine, norm_ratio
from creditscope.metrics.drift import relative_drift
from creditscope.rules._base import Learner
from creditscope.tape import Cut, per_example

STEPS = (1, 5, 20)
RATE = 1e-3
NO_UPDATE = "the rule leaves this parameter as it is"


def descent(bench: Bench) -> dict[str, Tensor]:
    """Return backpropagation's descent direction, −∂(mean loss)/∂W, for each parameter, in float64."""
    network = bench.doubled.network
    parameters = dict(network.named_parameters())
    x, y = bench._doubled_data()
    with preserved(network), evaluating(network), gradients_of([*parameters.values()], True), torch.enable_grad():
        losses = per_example(bench.doubled.loss, _output(bench.doubled, x), y)
        found = torch.autograd.grad(losses.mean(), [*parameters.values()], allow_unused=True)
    return {name: -g for name, g in zip(parameters, found, strict=True) if g is not None}


def _output(cut: Cut, x: Any) -> Tensor:
    return pick_state(cut.forward(x), None, "the network's output")


def rule_updates(learner: Learner, bench: Bench) -> dict[str, Tensor]:
    """Return a learner's own descent direction on the evaluation set, in eval mode."""
    network = learner.network
    with preserved(network, learner._path), evaluating(network), learner._untouched():
        for p in learner.parameters():
            p.grad = None
        learner.rule.step(learner.site, learner._path, bench.x, bench.y, 1.0)
        return {name: -p.grad.detach() for name, p in network.named_parameters() if p.grad is not None}


def measure_updates(bench: Bench, updates: Mapping[str, Tensor], sheet: Sheet) -> None:
    """Cosine and norm ratio with backpropagation's descent direction, so that BP reads 1 and 1."""
    reference = descent(bench)
    cosines, ratios = [], []
    for name, _ in bench.cut.network.named_parameters():
        u, g = updates.get(name), reference.get(name)
        cosines.append(NAN if u is None or g is None else _cosine(u.double(), g))
        ratios.append(NAN if u is None or g is None else _ratio(u.double(), g))
    n = len(bench.finite)
    label = "of the update with backpropagation's descent direction of the mean loss"
    sheet.put(
        "update_cosine",
        cosines,
        ["parameter"],
        f"cosine {label}",
        n=n,
        how="of the mean over examples",
        missing=NO_UPDATE,
    )
    sheet.put(
        "update_norm_ratio",
        ratios,
        ["parameter"],
        f"norm ratio {label}",
        n=n,
        how="of the mean over examples",
        missing=NO_UPDATE,
    )


def _cosine(a: Tensor, g: Tensor) -> float:
    return float(cosine(a.reshape(1, -1), g.reshape(1, -1)))


def _ratio(a: Tensor, g: Tensor) -> float:
    return float(norm_ratio(a.reshape(1, -1), g.reshape(1, -1)))


def check_initial(network: nn.Module, initial: Mapping[str, Tensor]) -> None:
    """An initial state is a state dict of this network."""
    parameters = dict(network.named_parameters())
    if not isinstance(initial, Mapping) or not initial.keys() & parameters.keys():
        raise UsageError(
            "initial= holds no parameter of the network: pass the network's state_dict() at initialisation"
        )
    for name in initial.keys() & parameters.keys():
        if initial[name].shape != parameters[name].shape:
            raise UsageError(
                f"initial['{name}'] has the shape {tuple(initial[name].shape)}, the parameter "
                f"{tuple(parameters[name].shape)}"
            )


def measure_drift(bench: Bench, initial: Mapping[str, Tensor] | None, sheet: Sheet) -> None:
    """How far each parameter is from its initialisation."""
    values = []
    for name, parameter in bench.cut.network.named_parameters():
        start = (initial or {}).get(name)
        values.append(
            NAN
            if start is None
            else float(relative_drift(parameter.detach().double(), start.to(parameter.device).double()))
        )
    why = "" if initial is not None else "no initial state was given (initial=, or a run that kept epoch 0)"
    sheet.put("drift", values, ["parameter"], "‖W − W₀‖ / ‖W₀‖", how="Frobenius norms", missing=why)


# --- coverage ---------------------------------------------------------------------------------------------------------


def measure_coverage(bench: Bench, learner: Learner, sheet: Sheet) -> list[str]:
    """What trains each parameter; return what is not trained as the rule claims."""
    with preserved(bench.cut.network), evaluating(bench.cut.network):
        found = learner.coverage(bench.x, bench.y)
    sheet.put("coverage", list(found.values()), ["parameter"], "what trains the parameter", how="measured on a step")
    frozen = learner.rule.frozen(learner.site)
    section = {name: s for s, names in learner.sections.items() for name in names}
    driven = _driven_exactly(bench, learner)
    wrong = []
    for name, how in found.items():
        parameter = bench.cut.network.get_parameter(name)
        if how == "nothing" and name not in frozen and parameter.requires_grad:
            wrong.append(f"{name} never moves")
        if how == "plain backprop" and section[name] not in driven:
            wrong.append(f"{name} is on plain backprop")
    return wrong


def _driven_exactly(bench: Bench, learner: Learner) -> set[str]:
    """Return the sections whose driving credit is exact by construction, where backpropagation is no surprise."""
    exact = learner.exact_states
    by_block = {name for name, l in zip(bench.cut.blocks, learner.driving_states, strict=True) if l in exact}
    return by_block | ({"stem"} if 0 in exact or _trains_stem_by_backprop(learner) else set())


def _trains_stem_by_backprop(learner: Learner) -> bool:
    return getattr(learner.rule, "stem", "") == "bp" or learner.rule.bypasses_blocks


def cover_updates(bench: Bench, updates: Mapping[str, Tensor], sheet: Sheet) -> list[str]:
    """The same from foreign updates: nothing, plain backprop, true loss, or the rule."""
    reference = descent(bench)
    topology = bench.cut.topology
    section = {name: s for s, names in (topology.sections if topology else {}).items() for name in names}
    found: dict[str, str] = {}
    for name, _ in bench.cut.network.named_parameters():
        u, g = updates.get(name), reference.get(name)
        if u is None or not bool(u.any()):
            found[name] = "nothing"
        elif g is not None and _is_along(u.double(), g):
            found[name] = "true loss" if section.get(name) == "head" else "plain backprop"
        else:
            found[name] = "rule"
    sheet.put(
        "coverage", list(found.values()), ["parameter"], "what trains the parameter", how="measured on the updates"
    )
    wrong = [f"{name} never moves" for name, how in found.items() if how == "nothing"]
    if any(how == "rule" for how in found.values()):
        wrong += [f"{name} is on plain backprop" for name, how in found.items() if how == "plain backprop"]
    return wrong


def _is_along(u: Tensor, g: Tensor) -> bool:
    """Tell whether an update is a gradient's, of whatever rate; one number alone has no direction, only a size."""
    return _cosine(u, g) > 1 - 1e-6 and (u.numel() > 1 or abs(_ratio(u, g) - 1) < 1e-4)


# --- exploitability ---------------------------------------------------------------------------------------------------


def measure_exploitability(bench: Bench, claim: Claim, sheet: Sheet) -> None:
    """The true change of the mean loss after k local updates with this credit, beside the reference's and the null's.

    On a copy, with plain Adam at 1e-3 on the evaluation set: block l by the credit at its driving state, the head by
    the true loss. A learner gives its credit anew at each update; a bare callable was called once, so k = 1 alone.
    """
    changes = {"credit": _updates_with(bench, claim, "credit"), "reference": _updates_with(bench, claim, "reference")}
    changes["null"] = _updates_with(bench, claim, "null")
    label = "change of the mean loss after k local updates"
    why = (
        ""
        if claim.learner is not None
        else "a bare callable is called once: its credit after the first update is not known"
    )
    for name, values in changes.items():
        sheet.put(
            "exploitability" if name == "credit" else f"exploitability_{name}",
            values,
            ["k"],
            f"{label} with {'this credit' if name == 'credit' else f'the {name}'}",
            unit="nat",
            n=len(bench.finite),
            how="mean over examples",
            missing=why if name != "reference" else "",
            rate=RATE,
        )


def _updates_with(bench: Bench, claim: Claim, kind: str) -> list[float]:
    network = copy.deepcopy(bench.cut.network)
    modules = dict(network.named_modules(remove_duplicate=False))
    cut = copy.copy(bench.cut)
    cut.network, cut.blocks = network, {name: modules[name] for name in bench.cut.blocks}
    optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
    credit = _credit_source(bench, claim, kind, cut)
    results: list[float] = []
    with evaluating(network), undisturbed(network):
        before = _mean_loss(cut, bench)
        for step in range(1, max(STEPS) + 1):
            credits = credit(step)
            if credits is None:
                break
            optimiser.zero_grad(set_to_none=True)
            with cut.tape(bench.x, bench.y) as tape:
                driven = [credits[0], *(credits[k] for k in claim.driving)]
                tape.backward(driven, 1.0)
            optimiser.step()
            if step in STEPS:
                results.append(_mean_loss(cut, bench) - before)
    return results + [NAN] * (len(STEPS) - len(results))


def _mean_loss(cut: Cut, bench: Bench) -> float:
    with torch.no_grad():
        return float(per_example(cut.loss, _output(cut, bench.x), bench.y).double().mean())


def _credit_source(bench: Bench, claim: Claim, kind: str, cut: Any) -> Callable[[int], list[Tensor | None] | None]:
    """Return the function step → credits on the copied network, None where they are not known."""
    if kind == "reference":
        return lambda step: [*cut.exact(bench.x, bench.y).gradients]
    shuffle = torch.randperm(len(bench.finite), generator=bench.generator("exploit")).to(bench.finite.device)
    mixed = lambda credits: [None if a is None else a[shuffle] for a in credits] if kind == "null" else credits  # noqa: E731
    learner = claim.learner
    if learner is None:
        return lambda step: mixed(claim.credits) if step == 1 else None
    site = copy.copy(learner.site)
    site.cut = cut
    return lambda step: mixed([*learner.rule.credits(site, learner._path, bench.x, bench.y)])
