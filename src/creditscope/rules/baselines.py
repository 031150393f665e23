"""The baselines that a rule has to exceed, or its depth brought nothing."""

from __future__ import annotations

from creditscope.rules._base import Rule
from creditscope.rules.frozen import Frozen
from creditscope.rules.lastk import LastK
from creditscope.rules.shallow import Shallow


def baselines_of(rule: Rule) -> dict[str, Rule]:
    """Return the matched baselines of a rule by name.

    "frozen-bp" and "frozen-rule" leave the blocks as initialised and train the stem by backpropagation and by the rule;
    "shallow" has no blocks. A frozen baseline depends on what trains the stem (on CIFAR-10 some four points lie between
    the two), so both are given and the better one counts.
    """
    return {"frozen-bp": Frozen(stem="bp"), "frozen-rule": LastK(rule, 0), "shallow": Shallow()}


def is_baseline(rule: Rule) -> bool:
    """Tell whether a rule leaves every block as initialised, or has none: it is compared with, and not compared."""
    return isinstance(rule, Frozen | Shallow) or (isinstance(rule, LastK) and rule.k == 0)
