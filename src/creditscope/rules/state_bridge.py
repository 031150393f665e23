"""State Bridge: predict the last state, and send the loss of that prediction back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from creditscope.calling import plain_precision
from creditscope.estimators import StateNet
from creditscope.rules._base import Feedback, Rule, Site, require
from creditscope.rules._learned import (
    Estimate,
    LearnedRule,
    by_layer,
    condition_of,
    condition_size,
    shaped,
    sizes_of,
    stacked,
    terminal_gradient,
)
from creditscope.tape import Tape


def state_loss(predicted: Tensor, last: Tensor) -> Tensor:
    """mean over layers and examples of ‖G_l − h_L‖²/max(‖h_L‖, 1)²: G (…, L, B, d), h_L (…, B, d) -> (…)."""
    scale = torch.linalg.vector_norm(last, dim=-1, keepdim=True).clamp(min=1.0)
    return ((predicted - last.unsqueeze(-3)) / scale.unsqueeze(-3)).square().sum(-1).mean((-1, -2))


def state_error(predicted: Tensor, last: Tensor) -> Tensor:
    """mean over examples of ‖G_l − h_L‖²: G (…, L, B, d), h_L (…, B, d) -> (…, L)."""
    return (predicted - last.unsqueeze(-3)).square().sum(-1).mean(-1)


@dataclass(frozen=True)
class StateBridge(LearnedRule):
    """State Bridge: a_l = ∇_{h_l} ℓ(head(G(h_l, l/L, e)), y), where G learns to predict h_L; a_L = g_L, exact.

    G minimises the mean over l < L and the batch of ‖G(h_l, l/L, e) − h_L‖²/max(‖h_L‖, 1)². With the true tail in
    place of G the credit is backpropagation's. One forward pass of G, on all states at once, serves credit and loss.

    Hao, Wan & Zhai, arXiv 2606.21126 (2026), where it is a probe in the spirit of target propagation (Lee et al.,
    ECML 2015), for a prediction that goes forward and not back. Deviations: G is a plain network with GELU (the study
    states neither activation nor residual form). In training mode a head with dropout draws masks of its own for the
    predictions.
    """

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Draw G."""
        Rule.build(self, site, generator, feedback)
        errors = condition_size(site, "error")
        return StateNet(sizes_of(site), errors, generator=generator, architecture=self.architecture).to(**site.factory)

    def credit(self, site: Site, pathway: nn.Module, tape: Tape) -> Sequence[Tensor]:
        """a_l = ∇_{h_l} ℓ(head(G(h_l, l/L, e)), y), a_L = g_L."""
        return self._predict(pathway, tape)[0]

    def estimate(self, site: Site, pathway: nn.Module, tape: Tape) -> Estimate:
        """Return credits and loss from one forward pass of G."""
        credits, predicted = self._predict(pathway, tape, learning=True)
        last = tape.states[-1].flatten(1).to(predicted.dtype)
        return Estimate(credits, state_loss(predicted, last), {"state_error": state_error(predicted, last).mean()})

    def _predict(self, net: nn.Module, tape: Tape, learning: bool = False) -> tuple[list[Tensor], Tensor]:
        """Return the credits and the predictions, (L, B, d)."""
        states, last = tape.states, tape.states[-1]
        with torch.enable_grad(), plain_precision(tape.output):
            exact = terminal_gradient(tape)  # first: where no gradient can come through the head, it says why
            error = condition_of(tape, "error", net)
            batches = stacked(states, range(len(states) - 1), net)
            given = [batch.h.requires_grad_() for batch in batches]
            predicted = torch.stack(by_layer(batches, [net(b.h, b.t, error) for b in batches]))
            require(
                predicted.shape[-1] == last[0].numel(),
                f"h_L has {last[0].numel()} units now; the estimator was made for {predicted.shape[-1]}",
            )
            losses = tape.head_losses(predicted.reshape(-1, *last.shape[1:]))
            gradients = torch.autograd.grad(losses.sum(), given, retain_graph=learning)
        return [*shaped(by_layer(batches, gradients), states), exact], predicted

    def exact_states(self, site: Site) -> set[int]:
        """a_L."""
        return {site.cut.depth}

    def capture_obstacle(self, site: Site) -> str | None:
        """Only a head that is a chain of modules can be run by itself."""
        obstacle = "a head that is no chain of modules, for which the network is replayed"
        return obstacle if site.topology.rest is None else None
