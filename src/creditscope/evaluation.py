"""What is measured at the end of an epoch: loss and accuracy on a split, and the norms of states and exact credits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from creditscope.calling import pick_state, undisturbed
from creditscope.rules._base import Learner
from creditscope.steps import is_classification
from creditscope.tape import per_example

NAN = float("nan")


class Scores(NamedTuple):
    """Mean loss and accuracy over a split; the accuracy is NaN where the task is no classification."""

    loss: float
    accuracy: float


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put every module into eval mode, and each back into its own mode afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(learner: Learner, batches: Iterable[tuple[Tensor, Tensor]], *, autocast: bool = False) -> Scores:
    """Return the scores over all batches, in eval mode; a device is waited for once, at the end."""
    losses, correct, examples = [], [], 0
    with evaluating(learner.network), torch.no_grad():
        for x, y in batches:
            with torch.autocast(y.device.type, torch.bfloat16, enabled=autocast):
                output = pick_state(learner(x), None, "the network's output")
                losses.append(per_example(learner.cut.loss, output, y).double().sum())
            right = (
                (output.argmax(1) == y).sum().double() if is_classification(output, y) else losses[-1].new_tensor(NAN)
            )
            correct.append(right)
            examples += output.shape[0]
    if not examples:
        return Scores(NAN, NAN)
    loss, hits = torch.stack([torch.stack(losses).sum(), torch.stack(correct).sum()]).tolist()
    return Scores(loss / examples, hits / examples)


def norms(learner: Learner, x: Any, y: Any) -> tuple[list[float], list[float]]:
    """Return ‖h_l‖ and ‖g_l‖ for l = 0..L: lower medians over the examples of norms per example.

    g_l is the exact credit of the summed loss, so neither depends on the number of examples. Measured in eval mode
    and in the network's own precision; nothing is touched.
    """
    with evaluating(learner.network), undisturbed(learner.network):
        exact = learner.cut.exact(x, y)
    both = torch.stack([torch.stack([median_norm(t) for t in part]) for part in (exact.states, exact.gradients)])
    states, references = both.tolist()
    return states, references


def median_norm(t: Tensor) -> Tensor:
    """Return the lower median over examples of the Euclidean norm over everything else."""
    return torch.linalg.vector_norm(t.flatten(1).double(), dim=1).median()
