"""Backpropagation, in the same code path as every other rule."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, pick_state, plain_precision
from creditscope.rules._base import Outcome, Rule, Site, exposed_branches, refuse_hidden, require
from creditscope.tape import per_example


def whole_step(
    site: Site,
    x: Inputs,
    y: Any,
    scale: float | Tensor,
    *,
    penalty: float,
    reduction: str,
    mode: AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Run the network uncut and add the gradient of scale × (mean loss + λ·mean Σ_l ‖f_l‖²) to ``.grad``."""
    cut = site.cut
    with torch.enable_grad(), ExitStack() as run:
        with mode or nullcontext():
            if penalty == 0:
                output = pick_state(run.enter_context(cut.running(x)), None, "the network's output")
                losses, value, metrics = per_example(cut.loss, output, y), None, {}
            else:
                record, output = run.enter_context(cut.whole(x))
                losses = per_example(cut.loss, output, y)
                terms = [point.tensor.square() for point in exposed_branches(cut, record)]
                means = [f.sum() / (f.shape[0] * (1 if reduction == "sum" else f[0].numel())) for f in terms]
                value = penalty * torch.stack(means).sum()
                metrics = {"penalty": value.detach()}
            total = losses.mean() if value is None else losses.mean() + value
            scaled = total * scale  # a product on the device: a float made into a tensor there would be waited for
        trained = any(p.requires_grad for p in cut.network.parameters())
        require(scaled.requires_grad or not trained, "the loss does not depend on any trainable parameter by autograd")
        if scaled.requires_grad:
            with plain_precision(output):
                scaled.backward()
    return Outcome(losses.detach().mean(), output.detach(), metrics)


@dataclass(frozen=True)
class BP(Rule):
    """Backpropagation: a_l = g_l = ∂(Σᵢ ℓᵢ)/∂h_l, exact for every state.

    The positive control: through the learner it gives the gradient of ``loss.mean().backward()``, in one uncut pass.

    Rumelhart, Hinton & Williams, Nature 323 (1986). Deviations: none.
    """

    penalty: float = field(default=0.0, kw_only=True)
    """λ of the penalty λ·‖f_l(h_l)‖² on each branch, mean over the batch; its gradient travels end to end."""
    penalty_reduction: Literal["sum", "mean"] = field(default="sum", kw_only=True)
    """‖f‖² summed over the features, or averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.penalty >= 0, f"rule.penalty must not be negative, not {self.penalty}")

    def refuse(self, site: Site) -> None:
        """A penalty needs branches."""
        super().refuse(site)
        if self.penalty:
            refuse_hidden(site.cut)

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return the reference itself."""
        return site.cut.exact(x, y).gradients

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Run one uncut forward and backward pass."""
        return whole_step(site, x, y, scale, penalty=self.penalty, reduction=self.penalty_reduction)

    def exact_states(self, site: Site) -> set[int]:
        """All of them."""
        return set(range(site.cut.depth + 1))
