"""One training step: the rule's gradients, clipping, the optimiser, and the statistics, without waiting for a device.

On a GPU a step can be captured in a CUDA graph and replayed, with the same bits: both ways use the same optimiser,
whose learning rate and step counts are tensors there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.recipes import Recipe
from creditscope.rules._base import Learner

SIDE_STEPS = 3  # steps on a side stream before a capture, as torch.cuda.graphs asks


def make_optimiser(learner: Learner, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the recipe's optimiser over the learner's groups, in its fused implementation."""
    groups = learner.param_groups(lr=recipe.lr, weight_decay=recipe.weight_decay)
    device = next(iter(learner.parameters())).device
    on_gpu = device.type == "cuda"
    if on_gpu:
        for group in groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=groups[0]["lr"], momentum=0.9, fused=True)
    kind = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
    return kind(groups, lr=groups[0]["lr"], fused=True, capturable=on_gpu)


class Schedule:
    """The learning rate by epoch, for the groups that have a schedule."""

    def __init__(self, optimiser: torch.optim.Optimizer, recipe: Recipe, epochs: int):
        self.optimiser = optimiser
        groups = enumerate(optimiser.param_groups)
        self._fixed = {i: float(group["lr"]) for i, group in groups if not group.get("scheduled", True)}
        cosine = recipe.schedule == "cosine"
        self._torch = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=epochs) if cosine else None

    @property
    def lr(self) -> float:
        """The present learning rate of the network."""
        return float(self.optimiser.param_groups[0]["lr"])

    def step(self) -> None:
        """Go on to the next epoch."""
        if self._torch is None:
            return
        self._torch.step()
        for i, lr in self._fixed.items():
            group = self.optimiser.param_groups[i]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands."""
        return {"epoch": self._torch.last_epoch} if self._torch else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the schedule back; the rates themselves are the optimiser's."""
        if self._torch is not None:
            self._torch.last_epoch = int(state["epoch"])
            self._torch._step_count = int(state["epoch"]) + 1
            self.optimiser._opt_called = True  # so that torch does not warn of an order that was kept before


def clip_groups(learner: Learner, recipe: Recipe) -> list[list[nn.Parameter]]:
    """Return the groups of parameters that are clipped each for itself."""
    if recipe.clip is None:
        return []
    network = list(learner.network.parameters())
    if recipe.clip_by == "all":
        return [network]
    named = dict(learner.network.named_parameters())
    return [[named[name] for name in names] for names in learner.sections.values() if names]


def clip(groups: Sequence[list[nn.Parameter]], at: float) -> None:
    """Scale each group's gradient down to a norm of at most ``at``."""
    for group in groups:
        torch.nn.utils.clip_grad_norm_(group, at, foreach=True)


@dataclass
class Tally:
    """Sums over the examples of an epoch, on the device."""

    loss: Tensor
    correct: Tensor
    examples: int
    metrics: dict[str, Tensor]
    finite: Tensor
    """Whether every loss so far was finite."""

    @classmethod
    def zero(cls, device: torch.device) -> Tally:
        """Return empty sums."""
        double = torch.zeros((), dtype=torch.float64, device=device)
        return cls(double, torch.zeros((), dtype=torch.int64, device=device), 0, {}, torch.ones((), dtype=torch.bool, device=device))

    def reset(self) -> None:
        """Empty the sums in place: a captured step goes on adding to the same tensors."""
        for total in (self.loss, self.correct, *self.metrics.values()):
            total.zero_()
        self.examples = 0

    def means(self) -> dict[str, float]:
        """Return the means over the examples so far; waits for the device."""
        names = ["train_loss", *self.metrics]
        sums = torch.stack([self.loss, *self.metrics.values(), self.correct.double()]).tolist()
        return {name: total / self.examples for name, total in zip([*names, "train_acc"], sums, strict=True)}

    def add(self, loss: Tensor, outputs: Tensor, y: Any, metrics: dict[str, Tensor]) -> None:
        """Add one batch, in place."""
        batch = outputs.shape[0]
        self.loss.add_(loss, alpha=batch)
        if is_classification(outputs, y):
            self.correct.add_((outputs.argmax(1) == y).sum())
        for name, value in metrics.items():
            if name not in self.metrics:
                self.metrics[name] = torch.zeros_like(self.loss)
            self.metrics[name].add_(value, alpha=batch)
        self.finite.logical_and_(torch.isfinite(loss))


def is_classification(outputs: Tensor, y: Any) -> bool:
    """Tell whether accuracy means something: one row of scores and one class index an example."""
    return outputs.ndim == 2 and isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()


class Stepper:
    """Takes training steps, eagerly or by replaying a graph."""

    def __init__(self, learner: Learner, optimiser: torch.optim.Optimizer, recipe: Recipe, tally: Tally, *, graph: bool):
        self.learner, self.optimiser, self.recipe, self.tally = learner, optimiser, recipe, tally
        self._clipped = clip_groups(learner, recipe)
        self._autocast = recipe.precision == "bfloat16"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Any = None
        self._static: tuple[Tensor, Tensor] | None = None
        self._wanted = graph
        self._warm = 0
        self._warm_key: Any = None
        self.obstacle: str | None = None
        """Why a graph that was wanted is not used."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one step on a batch."""
        if self._wanted and self.obstacle is None and x.shape[0] == self.recipe.batch:
            self._step_by_graph(x, y)
        else:
            self._work(x, y)
        self.tally.examples += x.shape[0]

    def _work(self, x: Tensor, y: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._autocast):
            loss = self.learner.backward(x, y)
        if self.recipe.clip is not None:
            clip(self._clipped, self.recipe.clip)
        self.optimiser.step()
        self.tally.add(loss, self.learner.outputs, y, self.learner.metrics())

    def _step_by_graph(self, x: Tensor, y: Tensor) -> None:
        key = (self.learner.phase, x.shape[0])
        if self._graph is not None and self._captured == key:
            assert self._static is not None
            self._static[0].copy_(x)
            self._static[1].copy_(y)
            self.learner.count_replay()
            self._graph.replay()
            return
        if self._warm_key != key:
            self._warm, self._warm_key = 0, key
        if self._warm < SIDE_STEPS:
            self._warm += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._work(x, y)
            torch.cuda.current_stream().wait_stream(side)
            return
        self._static = (x.clone(), y.clone())
        self.obstacle = self._capture(*self._static)
        if self.obstacle is not None:
            self._work(x, y)
            return
        self._captured = key
        self._step_by_graph(x, y)

    def _capture(self, x: Tensor, y: Tensor) -> str | None:
        """Capture one step (which does not run it); return what stands in the way, if anything does."""
        graph = torch.cuda.CUDAGraph()
        self.optimiser.zero_grad(set_to_none=True)
        try:
            with self.learner.uncounted(), torch.cuda.graph(graph):
                self._work(x, y)
        except RuntimeError as error:
            torch.cuda.synchronize()
            return f"the step cannot be captured ({str(error).splitlines()[0]})"
        self._graph = graph
        return None
