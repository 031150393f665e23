"""What rules that learn their credit share: estimators on the states, trained in the same pass that they serve in.

The estimators see detached states and learn from their own loss alone: no gradient of it reaches the network, and none
of the network's reaches them. They compute in the precision of their own parameters, whatever the autocast around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, plain_precision
from creditscope.errors import UsageError
from creditscope.estimators import Activation, Architecture
from creditscope.rules._base import EstimatorGradients, Lesson, LocalRule, Site, accumulate, require
from creditscope.tape import Tape

Condition = Literal["error", "terminal"]


@dataclass(frozen=True)
class Batch:
    """States of one size, stacked, so that an estimator sees them in one call."""

    layers: list[int]
    h: Tensor
    """(n, B, d)."""
    t: Tensor
    """(n, 1): l/L."""


@dataclass(frozen=True)
class Estimate:
    """The credits of a forward pass, and what the estimators minimise on it."""

    credits: Sequence[Tensor]
    loss: Tensor
    """Attached to the estimators' parameters."""
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class LearnedRule(LocalRule):
    """A local rule whose credit comes from estimators.

    Write :meth:`build`, :meth:`credit` and :meth:`estimate`, which gives credits and loss together so that they share
    what they can; gradients, clipping and scaling are here.
    """

    estimator_lr: float = field(default=1e-3, kw_only=True)
    """The estimators' learning rate: constant, without weight decay."""
    time_embed_dim: int = field(default=32, kw_only=True)
    """Entries of the estimators' time embedding."""
    hidden: int = field(default=256, kw_only=True)
    """Units of each of their hidden layers."""
    layers: int = field(default=3, kw_only=True)
    """Their linear maps."""
    activation: Activation = field(default="gelu", kw_only=True)
    """What follows each of their maps but the last."""
    clip: float | None = field(default=None, kw_only=True)
    """The largest norm of the estimators' gradient, of this call's unscaled mean loss; under data parallelism of each
    process for itself."""

    has_estimators: ClassVar[bool] = True
    needs_terminal_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.estimator_lr > 0, f"rule.estimator_lr must be positive, not {self.estimator_lr}")
        require(self.clip is None or self.clip > 0, f"rule.clip must be positive or None, not {self.clip}")
        try:
            _ = self.architecture
        except UsageError as error:
            raise UsageError(f"rule.{error}") from None

    @property
    def architecture(self) -> Architecture:
        """The estimators' sizes."""
        return Architecture(self.time_embed_dim, self.hidden, self.layers, self.activation)

    def estimate(self, site: Site, pathway: nn.Module, tape: Tape) -> Estimate:
        """Return the credits and the estimators' loss."""
        raise NotImplementedError

    def learn(self, site: Site, pathway: nn.Module, tape: Tape) -> Lesson:
        """Return the credits, and the clipped gradients of the estimators' loss."""
        with torch.enable_grad(), plain_precision(tape.output):
            found = self.estimate(site, pathway, tape)
            gradients = clipped(estimator_gradients(found.loss, pathway), self.clip)
        metrics = {"estimator_loss": found.loss, **found.metrics}
        return Lesson(found.credits, gradients, {name: value.detach() for name, value in metrics.items()})

    def prepare(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> dict[str, Tensor]:
        """Train the estimators on a batch and nothing else."""
        with self.tape(site, x, y) as tape:
            lesson = self.learn(site, pathway, tape)
        accumulate(lesson.estimators, scale)
        return lesson.metrics


def sizes_of(site: Site) -> list[int]:
    """Return the number of units of each state."""
    return [shape.numel() for shape in site.topology.shapes]


def stacked(states: Sequence[Tensor], layers: Sequence[int], like: nn.Module) -> list[Batch]:
    """Return the states of some layers, detached and flattened, by their size, in an estimator's precision."""
    dtype = next(like.parameters()).dtype
    times = torch.arange(len(states), device=states[0].device, dtype=torch.float64) / max(1, len(states) - 1)
    by_size: dict[int, list[int]] = {}
    for l in layers:
        by_size.setdefault(states[l][0].numel(), []).append(l)
    return [
        Batch(
            members,
            torch.stack([states[l].detach().flatten(1) for l in members]).to(dtype),
            torch.stack([times[l] for l in members]).to(dtype).unsqueeze(-1),
        )
        for members in by_size.values()
    ]


def by_layer(batches: Sequence[Batch], values: Sequence[Tensor]) -> list[Tensor]:
    """Return what was computed batch by batch, (n, ...) each, in the order of the layers."""
    found = {
        l: value
        for batch, rows in zip(batches, values, strict=True)
        for l, value in zip(batch.layers, rows, strict=True)
    }
    return [found[l] for l in sorted(found)]


def shaped(credits: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """Give flat credits the shapes of their states."""
    return [a.reshape(h.shape) for a, h in zip(credits, states, strict=False)]


def condition_size(site: Site, condition: Condition) -> int:
    """Return the number of entries of s."""
    return site.topology.output_shape.numel() if condition == "error" else sizes_of(site)[-1]


def condition_of(tape: Tape, condition: Condition, like: nn.Module) -> Tensor:
    """Return s, (B, entries): the error e, or g_L, exact through the head."""
    given = tape.errors if condition == "error" else terminal_gradient(tape)
    return given.reshape(tape.batch, -1).to(next(like.parameters()).dtype)


def terminal_gradient(tape: Tape) -> Tensor:
    """Return g_L, or say that there is none."""
    require(
        tape.output.requires_grad,
        "the output does not depend on h_L by autograd, so no credit can come back through the head",
    )
    return tape.terminal_gradient


def estimator_gradients(loss: Tensor, pathway: nn.Module) -> EstimatorGradients:
    """Return the gradient of a loss with respect to every estimator parameter that trains and that it depends on."""
    own = [p for p in pathway.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, own, allow_unused=True) if own and loss.requires_grad else []
    return [(p, g) for p, g in zip(own, found, strict=bool(found)) if g is not None]


def clipped(gradients: EstimatorGradients, at: float | None) -> EstimatorGradients:
    """Scale gradients down to a norm of at most ``at``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    if at is None or not gradients:
        return gradients
    parameters, found = zip(*gradients, strict=True)
    norm = torch.nn.utils.get_total_norm(found, foreach=True)
    shrink = (at / (norm + 1e-6)).clamp(max=1.0)
    return [(p, g * shrink.to(g.dtype)) for p, g in zip(parameters, found, strict=True)]
