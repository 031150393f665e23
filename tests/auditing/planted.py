"""Networks and credits of which the truth is known, each with the verdict that it must get: no flag more, no flag less.

Every case is one thing gone wrong (or nothing) in an otherwise healthy network: small, trained for a moment on
clusters, and audited on 128 examples that it has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import creditscope as cs
from creditscope.auditing.result import Audit
from creditscope.rng import stream
from creditscope.tape import Cut

INPUTS, WIDTH, CLASSES, EXAMPLES = 16, 32, 4, 128


def task(seed: int, n: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """Clusters that overlap a little."""
    g = stream(seed, "planted task")
    centres = torch.randn(CLASSES, INPUTS, generator=g)
    y = torch.randint(CLASSES, (n,), generator=stream(seed, "planted labels", n))
    return centres[y] + 0.7 * torch.randn(n, INPUTS, generator=stream(seed, "planted noise", n)), y


def trained(net: nn.Module, seed: int, steps: int = 40) -> nn.Module:
    x, y = task(seed, 512)
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    net.zero_grad()
    return net


def residual(seed: int, **options: Any) -> nn.Module:
    """A ResMLP with its skip outside the blocks, trained for a moment."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = cs.nets.ResMLP(inputs=INPUTS, width=WIDTH, depth=4, classes=CLASSES, branch_std=0.1, **options)
    return trained(net, seed)


class Layer(nn.Module):
    """One orthogonal map and a tanh: neighbouring references have nothing in common."""

    def __init__(self, gain: float):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(self.map.weight, gain)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h))


class Chain(nn.Module):
    """Layers behind each other, without a skip."""

    def __init__(self, depth: int = 4, gain: float = 1.2):
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Layer(gain) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    @property
    def credit_blocks(self) -> list[str]:
        return [f"blocks.{l}" for l in range(len(self.blocks))]


def chain(seed: int, depth: int = 4, gain: float = 1.2) -> Chain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Chain(depth, gain)


def true_credits(net: nn.Module) -> Callable[[Any, Any], list[Tensor]]:
    """Return the exact credits as a user's callable would give them."""
    cut = Cut.of(net)
    return lambda x, y: cut.exact(x, y).gradients


def changed(net: nn.Module, change: Callable[[list[Tensor], torch.Generator], list[Tensor]], seed: int) -> Any:
    """Return a callable that gives the exact credits, changed."""
    exact = true_credits(net)
    return lambda x, y: change(exact(x, y), stream(seed, "planted change"))


def noise_like(g: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(g.shape, generator=generator) * g.norm(dim=1, keepdim=True) / math.sqrt(g.shape[1])


class Impostor(torch.autograd.Function):
    """A linear map whose backward pass is feedback alignment's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, matrix = ctx.saved_tensors
        return gradients[0] @ matrix, gradients[0].T @ x, None


class Aligned(nn.Module):
    """A layer whose own autograd returns a rule's signal."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.weight, self.bias = layer.map.weight, layer.map.bias
        self.register_buffer("matrix", torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(Impostor.apply(h, self.weight, self.matrix) + self.bias)


# --- the cases --------------------------------------------------------------------------------------------------------


def healthy(seed: int) -> Audit:
    net = residual(seed)
    return cs.audit(cs.rules.BP().attach(net), *task(seed))


def noisy_credit(seed: int) -> Audit:
    net = residual(seed)
    fn = changed(net, lambda g, r: [a + 2 * noise_like(a, r) for a in g], seed)
    return cs.audit(net, *task(seed), credits=fn)


def exploded(seed: int) -> Audit:
    net = residual(seed)
    with torch.no_grad():
        net.blocks[1].w2.weight *= 1e8
    x, y = task(seed)
    audit = cs.audit(net, x, y, credits=true_credits(net))
    assert audit.data.state_norm.values[-1] > 1e8
    return audit


def exploded_without_norm(seed: int) -> Audit:
    net = residual(seed, terminal_norm=False)
    with torch.no_grad():
        net.blocks[1].w2.weight *= 1e6
        net.out_head.weight /= 1e6
    return cs.audit(net, *task(seed), credits=true_credits(net))


def loss_near_zero(seed: int) -> Audit:
    """What backpropagation does to an easy task: every example right, and surer and surer."""
    net = residual(seed)
    x, y = task(seed)
    with torch.no_grad():
        logits = net(x)
        right = logits.argmax(1) == y
        x, y, logits = x[right], y[right], logits[right]
        best = logits.topk(2).values
        net.out_head.weight *= 30 / (best[:, 0] - best[:, 1]).median()
        net.out_head.bias *= 30 / (best[:, 0] - best[:, 1]).median()
        assert F.cross_entropy(net(x), y, reduction="none").median() < 1e-11
    return cs.audit(net, x, y, credits=true_credits(net))


def one_layer_credit(seed: int) -> Audit:
    net = residual(seed)
    fn = changed(net, lambda g, r: [*(noise_like(a, r) for a in g[:-1]), g[-1]], seed)
    return cs.audit(net, *task(seed), credits=fn)


def random_credit(seed: int) -> Audit:
    net = residual(seed)
    fn = changed(net, lambda g, r: [noise_like(a, r) for a in g], seed)
    return cs.audit(net, *task(seed), credits=fn)


def fresh_feedback(seed: int) -> Audit:
    learner = cs.rules.DFA().attach(residual(seed), generator=stream(seed, "planted matrices"))
    return cs.audit(learner, *task(seed))


def sign_flipped(seed: int) -> Audit:
    net = residual(seed)
    return cs.audit(net, *task(seed), credits=changed(net, lambda g, r: [-a for a in g], seed))


def mean_reduced(seed: int) -> Audit:
    net = residual(seed)
    return cs.audit(net, *task(seed), credits=changed(net, lambda g, r: [a / len(a) for a in g], seed))


def wrong_layer(seed: int) -> Audit:
    net = chain(seed)
    return cs.audit(net, *task(seed), credits=changed(net, lambda g, r: [g[0], *g[:-1]], seed))


def reversed_layers(seed: int) -> Audit:
    net = chain(seed, depth=3)
    return cs.audit(net, *task(seed), credits=changed(net, lambda g, r: g[::-1], seed))


def silent_backprop(seed: int) -> Audit:
    """Updates of a local rule, but for one block that its author forgot."""
    net = residual(seed)

    def updates(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        learner = cs.rules.DFA().attach(net, generator=stream(seed, "planted matrices"))
        net.zero_grad()
        learner.backward(x, y)
        own = {name: -p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        return {
            name: -p.grad.clone() if name.startswith("blocks.2.") else own[name] for name, p in net.named_parameters()
        }

    return cs.audit(net, *task(seed), updates=updates)


def dead_block(seed: int) -> Audit:
    """The block's ReLU is off for every input, so nothing inside it ever moves."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            nn.init.constant_(self.a.bias, -1e3)

        def forward(self, h: Tensor) -> Tensor:
            return self.b(F.relu(self.a(h)))

    net = residual(seed)
    with torch.random.fork_rng(devices=[]):
        net.blocks[2] = Dead()
    return cs.audit(cs.rules.BP().attach(net), *task(seed))


def dead_layer(seed: int) -> Audit:
    """The same without a skip: nothing in front of it has a gradient."""
    net = chain(seed)
    with torch.no_grad():
        net.blocks[2].map.bias.fill_(1e3)  # where tanh is 1 to the last digit
    return cs.audit(net, *task(seed), credits=true_credits(net))


def vanishing(seed: int) -> Audit:
    """Gradients below what float32 can hold: each layer takes nine digits."""
    net = chain(seed, depth=6, gain=1e-9)
    return cs.audit(net, *task(seed), credits=true_credits(net))


def one_nan(seed: int) -> Audit:
    net = residual(seed)
    x, y = task(seed)
    x[seed % len(x), 3] = math.nan
    return cs.audit(net, x, y, credits=true_credits(net))


def too_few(seed: int) -> Audit:
    net = residual(seed)
    return cs.audit(net, *(t[:12] for t in task(seed)), credits=true_credits(net))


def depth_unused(seed: int) -> Audit:
    net = residual(seed)
    accuracies = {"accuracies": [0.50, 0.51, 0.52], "baselines": {"frozen-bp": [0.55, 0.56, 0.54], "shallow": [0.4]}}
    return cs.audit(net, *task(seed), credits=true_credits(net), **accuracies)


def depth_used(seed: int) -> Audit:
    net = residual(seed)
    accuracies = {"accuracies": [0.60, 0.61, 0.62], "baselines": {"frozen-bp": [0.55, 0.56, 0.54], "shallow": [0.4]}}
    return cs.audit(net, *task(seed), credits=true_credits(net), **accuracies)


def not_the_gradient(seed: int) -> Audit:
    net = chain(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net.blocks[3] = Aligned(net.blocks[3])
    return cs.audit(net, *task(seed), credits=true_credits(net))


@dataclass(frozen=True)
class Case:
    """What is planted, and what must be said of it."""

    make: Callable[[int], Audit]
    truth: str
    status: str
    flags: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    """A word that each hint holds, in order."""

    @property
    def name(self) -> str:
        return self.make.__name__.replace("_", " ")


NULL, REFERENCE = ("null-credit",), ("reference-validity",)
CASES = [
    Case(healthy, "backpropagation on a trained network", "passed"),
    Case(noisy_credit, "the exact credit under twice its norm of noise", "passed"),
    Case(loss_near_zero, "losses of 1e-12, every gradient tiny and right", "passed"),
    Case(depth_used, "accuracy 5 points above the frozen blocks", "passed"),
    Case(mean_reduced, "the exact credit of the mean loss", "passed", hints=("mean-reduced",)),
    Case(exploded, "states of 1e9 before a norm; the gradient still right", "flagged", ("scale-stability",)),
    Case(exploded_without_norm, "states of 1e6 without a norm", "flagged", ("scale-stability",)),
    Case(one_layer_credit, "exact at h_L, random elsewhere", "flagged", ("aggregation-collapse",)),
    Case(random_credit, "random, per example", "flagged", NULL),
    Case(fresh_feedback, "DFA with matrices that the network never met", "flagged", NULL),
    Case(sign_flipped, "the exact credit's negative", "flagged", NULL, ("sign-flipped",)),
    Case(wrong_layer, "the exact credit of the state before", "flagged", NULL, ("shifted",)),
    Case(reversed_layers, "the exact credits in the opposite order", "flagged", NULL, ("reversed",)),
    Case(silent_backprop, "one block of four on plain backpropagation", "flagged", ("coverage",)),
    Case(dead_block, "a block whose units are all off", "flagged", ("coverage",)),
    Case(depth_unused, "accuracy 4 points below the frozen blocks", "flagged", ("depth-utility",)),
    Case(dead_layer, "no gradient passes", "cannot judge", REFERENCE),
    Case(vanishing, "gradients that float32 cannot hold", "cannot judge", REFERENCE),
    Case(one_nan, "one example of 128 holds a NaN", "cannot judge", REFERENCE),
    Case(not_the_gradient, "a layer's backward returns a rule's signal", "cannot judge", REFERENCE),
    Case(too_few, "twelve examples", "cannot judge", ("too-few-examples",)),
]


def is_right(case: Case, audit: Audit) -> bool:
    verdict = audit.verdict
    hinted = len(verdict.hints) == len(case.hints) and all(
        word in hint for word, hint in zip(case.hints, verdict.hints, strict=True)
    )
    return verdict.status == case.status and verdict.flags == case.flags and hinted
