"""What a report has to say of the network and the rule beside their figures: read off them, never typed."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from creditscope.auditing.subject import Claim
from creditscope.rules._base import Rule
from creditscope.tape import Cut


def about_network(cut: Cut) -> dict[str, Any]:
    """Return the network's class, its size, and the normalisation that h_L passes before the loss."""
    network = cut.network
    return {
        "network": type(network).__name__,
        "parameters": sum(p.numel() for p in network.parameters()),
        "terminal_norm": _terminal_norm(cut),
    }


def _terminal_norm(cut: Cut) -> str:
    """Return the class of the first normalisation with parameters that belongs to the head; "" where there is none."""
    topology = cut.topology
    head = {name.rpartition(".")[0] for name in (topology.sections["head"] if topology else ())}
    modules: list[tuple[str, nn.Module]] = [*cut.network.named_modules()]
    return next((type(m).__name__ for name, m in modules if name in head and "Norm" in type(m).__name__), "")


def about_rule(claim: Claim) -> dict[str, Any]:
    """Return a learner's rule with its options, its formula, and where its feedback comes from."""
    if claim.learner is None:
        return {"formula": "given by a function", "feedback": "not known: the credit was given by a function"}
    rule = claim.learner.rule
    feedback = "fixed random matrices, kept in the learner's state" if rule.has_feedback else "none"
    return {"rule": repr(rule), "formula": formula_of(rule), "feedback": feedback}


def formula_of(rule: Rule) -> str:
    """Return the update of a rule: the first paragraph of its docstring, on one line."""
    return " ".join((inspect.getdoc(type(rule)) or "").partition("\n\n")[0].split()).replace("``", "")
