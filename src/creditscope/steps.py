"""One training step: the rule's gradients, clipping, the optimiser, and the statistics, without waiting for a device.

On a GPU a step can be captured in a CUDA graph and replayed, with the same bits: both ways use the same optimiser,
whose learning rate and step counts are tensors there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from creditscope.recipes import Recipe
from creditscope.rules._base import Learner

SIDE_STEPS = 3  # steps on a side stream before a capture, as torch.cuda.graphs asks
POLL_EVERY = 32  # steps between looks at the flag that a GPU sets when the loss is no longer finite


# --- the optimiser ----------------------------------------------------------------------------------------------------


def make_optimiser(learner: Learner, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the recipe's optimiser over the learner's groups, in its fused implementation."""
    groups = learner.param_groups(lr=recipe.lr, weight_decay=recipe.weight_decay)
    on_gpu = next(iter(learner.parameters())).is_cuda
    if recipe.optimiser == "sgd":
        optimiser = torch.optim.SGD(groups, momentum=0.9, fused=True)
    else:
        kind = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
        optimiser = kind(groups, fused=True, capturable=on_gpu)
    tensor_rates(optimiser)
    return optimiser


def tensor_rates(optimiser: torch.optim.Optimizer) -> None:
    """On a GPU, make each learning rate a tensor there, which a captured step reads anew."""
    for group in optimiser.param_groups:
        device = group["params"][0].device
        if device.type == "cuda":
            group["lr"] = torch.tensor(float(group["lr"]), device=device)


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
            self.optimiser._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
            # (else torch warns that the optimiser comes first, as it did before the state was saved)


# --- clipping ---------------------------------------------------------------------------------------------------------


def clip_groups(learner: Learner, recipe: Recipe) -> list[list[nn.Parameter]]:
    """Return the groups of the network's parameters that are clipped each for itself; estimators clip on their own."""
    if recipe.clip is None:
        return []
    if recipe.clip_by == "all":
        return [list(learner.network.parameters())]
    named = dict(learner.network.named_parameters())
    return [[named[name] for name in names] for names in learner.sections.values() if names]


def clip(groups: Sequence[list[nn.Parameter]], at: float) -> None:
    """Scale each group's gradient down to a norm of at most ``at``."""
    for group in groups:
        torch.nn.utils.clip_grad_norm_(group, at, foreach=True)


# --- statistics -------------------------------------------------------------------------------------------------------


class Tally:
    """Means over the examples of an epoch, summed on the device, and whether every loss so far was finite."""

    def __init__(self, device: torch.device):
        self._device = device
        self.sums: dict[str, Tensor] = {}
        """By name: the sum over examples, and the number of examples that it is over."""
        for name in ("train_loss", "train_acc"):  # NaN where there is none, rather than not there
            self._sum(name)
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def add(self, loss: Tensor, outputs: Tensor, y: Any, metrics: dict[str, Tensor]) -> None:
        """Add one batch, in place: a captured step goes on adding to the same tensors."""
        batch = outputs.shape[0]
        self._add("train_loss", loss.double() * batch, batch)
        if is_classification(outputs, y):
            self._add("train_acc", (outputs.argmax(1) == y).sum(), batch)
        for name, value in metrics.items():
            self._add(name, value.double() * batch, batch)
        self.finite.logical_and_(torch.isfinite(loss))

    def _add(self, name: str, total: Tensor, batch: int) -> None:
        both = self._sum(name)
        both[0].add_(total)
        both[1].add_(batch)

    def _sum(self, name: str) -> Tensor:
        if name not in self.sums:
            self.sums[name] = torch.zeros(2, dtype=torch.float64, device=self._device)
        return self.sums[name]

    def reset(self) -> None:
        """Empty the sums."""
        for both in self.sums.values():
            both.zero_()

    def means(self) -> dict[str, float]:
        """Return the means so far, NaN where nothing was to be averaged; waits for the device."""
        totals, examples = torch.stack([*self.sums.values()]).unbind(1)
        return dict(zip(self.sums, (totals / examples).tolist(), strict=True))

    def load(self, sums: dict[str, Tensor]) -> None:
        """Go back to the sums of a saved state."""
        self.reset()
        for name, both in sums.items():
            self._sum(name).copy_(both)
        self.finite.fill_(True)


def is_classification(outputs: Tensor, y: Any) -> bool:
    """Tell whether accuracy means something: one row of scores and one class index an example."""
    return outputs.ndim == 2 and isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()


class Watch:
    """Looks at a flag on the device without waiting for it: now and then, and a little late."""

    def __init__(self, flag: Tensor):
        self._flag, self._steps = flag, 0
        self._host = torch.ones((), dtype=torch.bool, pin_memory=True) if flag.is_cuda else flag
        self._copied = torch.cuda.Event() if flag.is_cuda else None
        self._pending = False

    def __call__(self) -> bool:
        """Return the flag as it was seen last."""
        if self._copied is None:
            return bool(self._flag)
        self._steps += 1
        if self._pending and self._copied.query():
            self._pending = False
            if not bool(self._host):
                return False
        if not self._pending and self._steps % POLL_EVERY == 0:
            self._host.copy_(self._flag, non_blocking=True)
            self._copied.record()
            self._pending = True
        return True


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether every entry is finite; waits for the device once."""
    return bool(torch.stack([t.detach().isfinite().all() for t in tensors]).all())


# --- the step ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A tensor of a step: the part of the network that made it (stem, a block's name, head), and what it is."""

    layer: str
    tensor: str


class Stepper:
    """Takes training steps, eagerly or by replaying a graph."""

    def __init__(
        self, learner: Learner, optimiser: torch.optim.Optimizer, recipe: Recipe, tally: Tally, *, graph: bool = False
    ):
        self.learner, self.optimiser, self.recipe, self.tally = learner, optimiser, recipe, tally
        self._clipped = clip_groups(learner, recipe)
        self._graph = _Graph(self) if graph else None

    @property
    def obstacle(self) -> str | None:
        """Why the step could not be captured in the graph that was wanted, if it could not."""
        return self._graph.obstacle if self._graph else None

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one step on a batch; the last, smaller one of an epoch always eagerly."""
        if self._graph is not None and self._graph.obstacle is None and x.shape[0] == self.recipe.batch:
            self._graph.step(x, y)
        else:
            self.work(x, y)

    def work(self, x: Tensor, y: Tensor) -> None:
        """Take one step eagerly."""
        loss = self._gradients(x, y)
        self._update()
        self.tally.add(loss, self.learner.outputs, y, self.learner.metrics())

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16")

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        with self._autocast(x):
            return self.learner.backward(x, y)

    def _update(self) -> None:
        if self.recipe.clip is not None:
            clip(self._clipped, self.recipe.clip)
        self.optimiser.step()

    def first_broken(self, x: Tensor, y: Tensor) -> Place | None:
        """Take one step, looking at each tensor, and return the place of the first that is not finite."""
        looked_at = self._looking(x, y)
        return next((place for place, tensor in looked_at if not bool(tensor.isfinite().all())), None)

    def _looking(self, x: Tensor, y: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """Take one step, with its tensors in the order in which they are made; gradients so from the head back."""
        learner = self.learner
        owner = {name: layer for layer, names in learner.sections.items() for name in names}
        parameters = [(owner[name], name, p) for name, p in learner.network.named_parameters()]
        parameters += [("rule", name, p) for name, p in learner.pathway.named_parameters()] if learner.pathway else []
        with self._autocast(x):
            states = learner.states(x)
        for l, (layer, h) in enumerate(zip(learner.sections, states, strict=False)):  # the stem makes h_0
            yield Place(layer, f"state {l}"), h
        loss = self._gradients(x, y)
        yield Place("head", "outputs"), learner.outputs
        yield Place("head", "loss"), loss
        for layer, name, p in reversed(parameters):
            if p.grad is not None:
                yield Place(layer, f"gradient of {name}"), p.grad
        self._update()
        for layer, name, p in parameters:
            yield Place(layer, name), p.detach()


class _Graph:
    """A step captured in a CUDA graph; captured anew where the rule enters another phase."""

    def __init__(self, stepper: Stepper):
        self._stepper = stepper
        self._phase: tuple[int, ...] | None = None
        self._warm = 0
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None
        self._parameters = [p for group in stepper.optimiser.param_groups for p in group["params"]]
        self.obstacle: str | None = None

    def step(self, x: Tensor, y: Tensor) -> None:
        learner = self._stepper.learner
        if self._phase != learner.phase:
            self._phase, self._warm, self._captured = learner.phase, 0, None
        if self._warm < SIDE_STEPS:
            self._warm += 1
            self._step_aside(x, y)
            return
        if self._captured is None:
            self._capture(x, y)
        if self._captured is None:
            self._stepper.work(x, y)
            return
        graph, static_x, static_y = self._captured
        static_x.copy_(x)
        static_y.copy_(y)
        graph.replay()
        increment_version(self._parameters)  # no Python runs in a replay: say that they have changed

    def _step_aside(self, x: Tensor, y: Tensor) -> None:
        """Take a step on a side stream."""
        side, present = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(present)
        with torch.cuda.stream(side):
            self._stepper.work(x, y)
        present.wait_stream(side)

    def _capture(self, x: Tensor, y: Tensor) -> None:
        """Capture one step (which does not run it), or keep what stands in the way."""
        graph, static_x, static_y = torch.cuda.CUDAGraph(), x.clone(), y.clone()
        noise = self._stepper.learner.site.noise
        if noise is not None:
            graph.register_generator_state(noise)
        self._stepper.optimiser.zero_grad(set_to_none=True)
        try:
            with self._stepper.learner.uncounted(), torch.cuda.graph(graph):
                self._stepper.work(static_x, static_y)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.obstacle = f"the step cannot be captured: {str(error).splitlines()[0]}"
        else:
            self._captured = graph, static_x, static_y
