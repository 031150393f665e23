"""What the tests of learned rules share: one example after another, by plain autograd on the zoo's segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.rules import Learner
from creditscope.rules._learned import LearnedRule
from tests.oracles import assert_close, loss_of, unrolled
from tests.zoo import BY_NAME

SMALL: dict[str, Any] = {"hidden": 5, "time_embed_dim": 4}
SHAPES = [BY_NAME[name] for name in ("outside", "chain", "convolutional", "mask-keyword", "two-heads", "scalar-output")]
"""Skips outside and inside, states that differ in size, tokens, a head that is no chain, one output."""


@dataclass
class Example:
    """One example on its way through the network."""

    i: int
    states: list[Tensor]
    """h_0..h_L, flat."""
    error: Tensor
    """∂ℓ/∂output, flat."""
    terminal: Tensor
    """∂ℓ/∂h_L, flat."""
    loss: Tensor

    @property
    def depth(self) -> int:
        return len(self.states) - 1


def one(x: Any, i: int) -> Any:
    """Return example i, as a batch of itself."""
    if isinstance(x, dict):
        return {key: one(value, i) for key, value in x.items()}
    return x[i : i + 1]


def after(net: Any, x: Any, y: Tensor, i: int, l: int, h: Tensor) -> Tensor:
    """Return the loss of example i where its state l is h, flat."""
    states, _ = unrolled(net, one(x, i))
    h = h.view_as(states[l])
    for k in range(l, net.depth):
        h = net.segment(k, h, one(x, i))[0]
    return loss_of(net)(net.rest(h, one(x, i)), one(y, i)).sum()


def examples(net: Any, x: Any, y: Tensor) -> list[Example]:
    """Run the network on one example after another."""
    found = []
    for i in range(len(y)):
        states, output = unrolled(net, one(x, i))
        output = output.detach().requires_grad_()
        loss = loss_of(net)(output, one(y, i)).sum()
        (error,) = torch.autograd.grad(loss, output)
        last = states[-1].detach().flatten().requires_grad_()
        (terminal,) = torch.autograd.grad(after(net, x, y, i, net.depth, last), last)
        flat = [h.detach().flatten() for h in states]
        found.append(Example(i, flat, error.flatten(), terminal, loss.detach()))
    return found


def estimator_grads(learner: Learner) -> list[Tensor]:
    assert learner.pathway is not None
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in learner.pathway.parameters()]


def assert_learns(learner: Learner, x: Any, y: Tensor, total: Tensor, at: float | None, scale: float = 0.5) -> None:
    """Hold the estimators' gradient against that of an oracle's loss, clipped and scaled."""
    assert learner.pathway is not None
    own = [*learner.pathway.parameters()]
    expected = torch.autograd.grad(total, own, allow_unused=True)
    expected = [torch.zeros_like(p) if g is None else g for p, g in zip(own, expected, strict=True)]
    norm = torch.cat([g.flatten() for g in expected]).norm()
    shrink = 1.0 if at is None else min(1.0, float(at / (norm + 1e-6)))
    learner.backward(x, y, scale=scale)
    assert_close(estimator_grads(learner), [scale * shrink * g for g in expected], 1e-8)
    assert_close([learner.metrics()["estimator_loss"]], [total.detach()], 1e-8)


def in_shape(rows: list[list[Tensor]], states: list[Tensor]) -> list[Tensor]:
    """Return credits, given example by example and layer by layer, as a list over layers."""
    return [torch.stack([row[l] for row in rows]).reshape(h.shape) for l, h in enumerate(states)]


class Probe(nn.Module):
    """An estimator that is a function; its one parameter does nothing."""

    def __init__(self, function: Any):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.function = function

    def forward(self, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (
            torch.stack([self.function(rows, at) for rows, at in zip(h, t.flatten(), strict=True)]) + 0 * self.nothing
        )


def loss_by_parameters(
    rule: LearnedRule, learner: Learner, x: Any, y: Tensor, amount: float, way: list[Tensor]
) -> float:
    """Return the estimators' loss with their parameters moved, on the same draws."""
    assert learner.pathway is not None
    own = [*learner.pathway.parameters()]
    with torch.no_grad():
        for p, v in zip(own, way, strict=True):
            p.add_(amount * v)
    stream = learner.site.noise
    before = stream.get_state() if stream is not None else None
    with rule.tape(learner.site, x, y) as tape:
        found = float(rule.learn(learner.site, learner.pathway, tape).metrics["estimator_loss"])
    if stream is not None and before is not None:
        stream.set_state(before)
    with torch.no_grad():
        for p, v in zip(own, way, strict=True):
            p.sub_(amount * v)
    return found


def assert_finite_differences(rule: LearnedRule, learner: Learner, x: Any, y: Tensor) -> None:
    """Hold the estimators' gradient against central differences along a random direction."""
    assert learner.pathway is not None
    g = torch.Generator().manual_seed(5)
    way = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in learner.pathway.parameters()]
    changes = [loss_by_parameters(rule, learner, x, y, amount, way) for amount in (1e-5, -1e-5)]
    learner.zero_grad()
    learner.backward(x, y)
    predicted = sum(float((v * g).sum()) for v, g in zip(way, estimator_grads(learner), strict=True))
    assert abs((changes[0] - changes[1]) / 2e-5 - predicted) < 1e-5 * max(1.0, abs(predicted))
