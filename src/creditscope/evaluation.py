"""What is measured at the end of an epoch: loss and accuracy on a split, and the norms of states and exact credits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from creditscope.rules._base import Learner
from creditscope.steps import is_classification
from creditscope.tape import per_example
from creditscope.topology import undisturbed


class Scores(NamedTuple):
    """Mean loss and accuracy over a split; the accuracy is NaN where the task is no classification."""

    loss: float
    accuracy: float


@contextmanager
def evaluating(network: nn.Module) -> Any:
    """Put every module into eval mode, and each back into its own mode afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(learner: Learner, batches: Any, *, autocast: bool = False) -> Scores:
    """Return the scores over all batches, in eval mode; a device is waited for once, at the end."""
    total: Tensor | None = None
    correct, examples, known = 0, 0, True
    with evaluating(learner.network), torch.no_grad():
        for x, y in batches:
            with torch.autocast(y.device.type, torch.bfloat16, enabled=autocast):
                output = learner(x)
                losses = per_example(learner.cut.loss, output, y).double().sum()
            total = losses if total is None else total + losses
            known = known and is_classification(output, y)
            correct = correct + (output.argmax(1) == y).sum() if known else correct
            examples += output.shape[0]
    if total is None:
        return Scores(float("nan"), float("nan"))
    return Scores(float(total) / examples, int(correct) / examples if known else float("nan"))


def norms(learner: Learner, x: Any, y: Any) -> tuple[list[float], list[float]]:
    """Return ‖h_l‖ and ‖g_l‖ for l = 0..L: lower medians over the examples of norms per example.

    g_l is the exact credit of the summed loss, so neither depends on the number of examples. Measured in eval mode
    and in the network's own precision; nothing is touched.
    """
    with evaluating(learner.network), undisturbed(learner.network):
        exact = learner.cut.exact(x, y)
    both = torch.stack([torch.stack([median_norm(t) for t in part]) for part in (exact.states, exact.gradients)]).tolist()
    return both[0], both[1]


def median_norm(t: Tensor) -> Tensor:
    """Return the lower median over examples of the Euclidean norm over everything else."""
    return torch.linalg.vector_norm(t.flatten(1).double(), dim=1).median()
