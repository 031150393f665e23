"""What the tests of all rules share: a rule on a network of the zoo, and its step against the obvious one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from creditscope.rules import Learner, Rule
from tests.test_tape import CALM as CALM
from tests.zoo import BY_NAME, CASES, Case

SEVERAL = [BY_NAME[name] for name in ("chain", "inner-skip", "outside", "mask-keyword", "conv-outside")]
"""One network of each kind, where all of the zoo would only take time."""

DETERMINISTIC = [case for case in CASES if not case.random]


def attached(rule: Rule, case: Case, **options: Any) -> tuple[Learner, nn.Module, Any, Tensor]:
    """Return a learner in float64 with its network, and a batch."""
    net = case.network().train()
    x, y = case.batch()
    options = {"training_steps": 10, **case.cut, **options}
    return rule.attach(net, example=x, **options), net, x, y


def matrices(learner: Learner) -> list[Tensor]:
    """Return the feedback matrices in order."""
    assert learner.pathway is not None
    return [*learner.pathway.buffers()]


def keeps_shape(case: Case) -> bool:
    """Tell whether all states of a network have one shape."""
    return len(set(attached_shapes(case))) == 1


def attached_shapes(case: Case) -> list[torch.Size]:
    from creditscope.tape import Cut

    return [*Cut.of(case.network(), **case.cut).settle(case.batch()[0]).shapes]
