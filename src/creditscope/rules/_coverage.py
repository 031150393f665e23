"""What trains each parameter, by what a step does to it and not by what the rule claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, undisturbed
from creditscope.rules._feedback import draw
from creditscope.rules._maps import BackwardThrough, find_maps
from creditscope.rules.bp import whole_step

if TYPE_CHECKING:
    from creditscope.rules._base import Learner

Gradients = dict[str, Tensor | None]


def measure_coverage(learner: Learner, x: Inputs, y: Any) -> dict[str, str]:
    """Return for each parameter of the network what trains it, from four gradients on the same batch and draws.

    - "nothing": the step leaves no gradient, or exactly zero;
    - "true loss": the gradient is backpropagation's, to rounding, and the parameter lies behind h_L;
    - "plain backprop": the gradient is backpropagation's, to rounding, in front of h_L;
    - "local backprop": the gradient is what autograd makes, inside the segment, of the credit at its end, *and* it
      changes when the segment's own maps send that credit back through random matrices: other weights' transposes
      carry it (weight transport within the block);
    - "rule": it is the rule's, and no other weight's transpose carries it.
    """
    site, rule, path = learner.site, learner.rule, learner._path
    network = site.cut.network
    with undisturbed(network):
        injection = rule.drives(site, path, x, y)
    maps, opaque = find_maps(site.cut, x)
    generator = torch.Generator().manual_seed(0)
    weights = [network.get_parameter(name) for name in maps if name not in opaque]
    factory = site.factory
    random = {
        w: draw((*w.shape,), w.shape[0], scale=1.0, distribution="normal", generator=generator, factory=factory)
        for w in weights
    }

    def local(mode: AbstractContextManager[Any]) -> Callable[[], None]:
        def run() -> None:
            with mode, site.cut.tape(x, y) as tape:
                tape.backward(injection.credits, 1.0, branch=injection.branch)

        return run

    measure = lambda run: _gradients(learner, run)  # noqa: E731
    given = measure(lambda: rule.step(site, path, x, y, 1.0))
    penalty = {"penalty": getattr(rule, "penalty", 0.0), "reduction": getattr(rule, "penalty_reduction", "sum")}
    reference = measure(lambda: whole_step(site, x, y, 1.0, **penalty))
    inside = measure(local(nullcontext()))
    scrambled = measure(local(BackwardThrough(random)))
    sections = site.topology.sections
    section_of = {name: section for section, names in sections.items() for name in names}
    blind = {section_of[name] for name in opaque if name in section_of}

    def trained_by(name: str) -> str:
        gradient = given[name]
        if gradient is None or not bool(gradient.any()):
            return "nothing"
        if _equal(gradient, reference[name]):
            return "true loss" if section_of[name] == "head" else "plain backprop"
        if not _equal(gradient, inside[name]):
            return "rule"
        carried = section_of[name] in blind or not _equal(gradient, scrambled[name])
        return "local backprop" if carried else "rule"

    return {name: trained_by(name) for name, _ in network.named_parameters()}


@contextmanager
def unhooked(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leave out what a user has tied to the accumulation of gradients, such as an optimiser inside the backward."""
    tied = [hooks for p in parameters if (hooks := p._post_accumulate_grad_hooks)]
    kept = [{**hooks} for hooks in tied]
    for hooks in tied:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(tied, kept, strict=True):
            hooks.update(before)


def _gradients(learner: Learner, run: Callable[[], Any]) -> Gradients:
    """Return the gradients that a pass leaves, and put ``.grad``, buffers and random states back."""
    parameters = [*learner.parameters()]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        with undisturbed(learner.network), unhooked(parameters):
            run()
        return {name: p.grad for name, p in learner.network.named_parameters()}
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _equal(a: Tensor, b: Tensor | None) -> bool:
    """Tell whether two gradients agree to rounding: ‖a − b‖ ≤ 1000 ε ‖b‖."""
    if b is None:
        return False
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= 1e3 * torch.finfo(torch.float32).eps * b.norm())
