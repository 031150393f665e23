"""The learning rules, one file each. This page is their registry: importing it loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from creditscope.registry import Entry, Registry

REGISTRY = Registry(
    "rule",
    [
        Entry("bp", "creditscope.rules.bp:BP", "backpropagation: the exact gradient, in the same code path"),
        Entry(
            "fa", "creditscope.rules.fa:FA", "feedback alignment: fixed random backward matrices, by weight or by block"
        ),
        Entry(
            "dfa",
            "creditscope.rules.dfa:DFA",
            "direct feedback alignment: the output error through a fixed random matrix",
        ),
        Entry("state-bridge", "creditscope.rules.state_bridge:StateBridge", "learned: loss of a predicted last state"),
        Entry("credit-bridge", "creditscope.rules.credit_bridge:CreditBridge", "learned: the gradient of a value net"),
        Entry(
            "vector-field", "creditscope.rules.vector_field:VectorField", "learned: credit fitted to true loss changes"
        ),
        Entry("ep", "creditscope.rules.ep:EP", "equilibrium propagation: the prediction errors of nudged states"),
        Entry("frozen", "creditscope.rules.frozen:Frozen", "baseline: blocks stay as initialised, stem and head train"),
        Entry("shallow", "creditscope.rules.shallow:Shallow", "baseline: the head on the stem alone, no blocks"),
        Entry("last-k", "creditscope.rules.lastk:LastK", "wrapper: the first L - k blocks frozen, the rest by a rule"),
        Entry("blend", "creditscope.rules.blend:Blend", "wrapper: a weighted sum of two rules"),
        Entry(
            "handover",
            "creditscope.rules.handover:Handover",
            "wrapper: one rule first, another after a fraction of training",
        ),
    ],
)

if TYPE_CHECKING:
    from creditscope.rules._base import Learner, LocalRule, Rule, Site
    from creditscope.rules._feedback import Matrices, draw, given_list
    from creditscope.rules.blend import Blend
    from creditscope.rules.bp import BP
    from creditscope.rules.credit_bridge import CreditBridge
    from creditscope.rules.dfa import DFA
    from creditscope.rules.ep import EP
    from creditscope.rules.fa import FA
    from creditscope.rules.frozen import Frozen
    from creditscope.rules.handover import Handover
    from creditscope.rules.lastk import LastK
    from creditscope.rules.shallow import Shallow
    from creditscope.rules.state_bridge import StateBridge
    from creditscope.rules.vector_field import VectorField

# what a rule of one's own is written with
_PARTS = {
    "Learner": "_base",
    "LocalRule": "_base",
    "Rule": "_base",
    "Site": "_base",
    "Matrices": "_feedback",
    "draw": "_feedback",
    "given_list": "_feedback",
}
__all__ = [
    "BP",
    "DFA",
    "EP",
    "FA",
    "REGISTRY",
    "Blend",
    "CreditBridge",
    "Frozen",
    "Handover",
    "LastK",
    "Learner",
    "LocalRule",
    "Matrices",
    "Rule",
    "Shallow",
    "Site",
    "StateBridge",
    "VectorField",
    "draw",
    "given_list",
]


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return getattr(import_module(f"creditscope.rules.{_PARTS[name]}"), name)
    return REGISTRY.exported(name)
