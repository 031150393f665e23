"""Slow and obvious: what a step, a credit and a tail are, by plain autograd on the zoo's segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.tape import cross_entropy

Credits = Callable[[list[Tensor], Tensor, Tensor], list[Tensor]]
"""(states, errors, g_L) -> a_0..a_L."""


def loss_of(net: nn.Module) -> Callable[[Tensor, Any], Tensor]:
    return getattr(net, "loss", cross_entropy)


def plain_output(net: nn.Module, x: Any) -> Tensor:
    """Call the network as its user would."""
    out = net(*x) if isinstance(x, tuple) else net(**x) if isinstance(x, dict) else net(x)
    return out[0] if isinstance(out, tuple) else out


def unrolled(net: Any, x: Any) -> tuple[list[Tensor], Tensor]:
    """Return the states, attached to one graph, and the output."""
    h = net.stem(x)
    h = h if h.requires_grad else h.detach().requires_grad_()
    states = [h]
    for l in range(net.depth):
        states.append(net.segment(l, states[-1], x)[0])
    return states, net.rest(states[-1], x)


def exact(net: Any, x: Any, y: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states and g_l = ∂(Σᵢ ℓᵢ)/∂h_l."""
    states, output = unrolled(net, x)
    gradients = torch.autograd.grad(loss_of(net)(output, y).sum(), states, allow_unused=True)
    return [h.detach() for h in states], [
        torch.zeros_like(h) if g is None else g for h, g in zip(states, gradients, strict=True)
    ]


def tail(net: Any, x: Any, y: Any, l: int, h: Tensor) -> Tensor:
    """Return ℓᵢ from state l."""
    for k in range(l, net.depth):
        h = net.segment(k, h, x)[0]
    return loss_of(net)(net.rest(h, x), y)


def rms_normalised(a: Tensor, how: str, floor: float) -> Tensor:
    """a / (RMS + floor), one example after another or over the batch."""
    if how == "none":
        return a
    if how == "batch":
        return a / (a.flatten().square().mean().sqrt() + floor)
    return torch.stack([one / (one.flatten().square().mean().sqrt() + floor) for one in a])


def local_step(
    net: Any,
    x: Any,
    y: Any,
    credits: Credits,
    *,
    drive: str = "output",
    how: str = "none",
    floor: float = 1e-6,
    penalty: float = 0.0,
    reduction: str = "sum",
    scale: float = 1.0,
) -> dict[str, Tensor | None]:
    """Return the gradient of scale/B · (Σᵢ ℓᵢ(head) + Σ_l ⟨h_l, â_l⟩ + λ Σ ‖f_l‖²), states cut off."""
    ends = [net.stem(x)]
    branches = []
    for l in range(net.depth):
        end, branch = net.segment(l, ends[-1].detach(), x)
        ends.append(end)
        branches.append(branch)
    last = ends[-1].detach().requires_grad_()
    output = net.rest(last, x)
    loss = loss_of(net)
    leaf = output.detach().requires_grad_()
    (errors,) = torch.autograd.grad(loss(leaf, y).sum(), leaf)
    total = loss(output, y).sum()
    (terminal,) = torch.autograd.grad(total, last, retain_graph=True)
    a = credits([h.detach() for h in ends], errors, terminal)
    driving = [a[0], *(a[1:] if drive == "output" else a[:-1])]
    for end, credit in zip(ends, driving, strict=True):
        total = total + (end * rms_normalised(credit, how, floor).detach()).sum()
    if penalty:
        for f in branches:
            squares = f.square().sum() if reduction == "sum" else f.square().sum() / f[0].numel()
            total = total + penalty * squares
    return gradients(net, total * scale / len(output))


def gradients(net: nn.Module, objective: Tensor) -> dict[str, Tensor | None]:
    """Differentiate with respect to every trainable parameter, and leave ``.grad`` as it was."""
    before = {p: p.grad for p in net.parameters()}
    for p in before:
        p.grad = None
    objective.backward()  # not autograd.grad, which reentrant checkpointing does not allow
    found = left(net)
    for p, gradient in before.items():
        p.grad = gradient
    return found


def backprop(net: Any, x: Any, y: Any, scale: float = 1.0) -> dict[str, Tensor | None]:
    """Return the gradient of the mean loss, by the network's own forward."""
    return gradients(net, loss_of(net)(plain_output(net, x), y).mean() * scale)


def left(net: nn.Module) -> dict[str, Tensor | None]:
    """Return what stands in ``.grad``."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-9) -> None:
    """Compare two sets of gradients, relative to the largest entry; none at all is the same as zero."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        if got is None or want is None:
            assert not any(t is not None and t.any() for t in (got, want)), f"{name}: {got} against {want}"
            continue
        worst = float((got - want).detach().abs().max())
        assert worst <= tolerance * max(1.0, float(want.detach().abs().max())), f"{name}: off by {worst:.3g}"


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-9) -> None:
    """Compare lists of tensors, shapes included."""
    for l, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.shape == want.shape, f"{l}: {tuple(got.shape)} against {tuple(want.shape)}"
        worst = float((got - want).detach().abs().max())
        assert worst <= tolerance * max(1.0, float(want.detach().abs().max())), f"{l}: off by {worst:.3g}"


# --- feedback alignment by weight, by a trick instead of a backward pass ----------------------------------------------


def through(forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    """W-forward, B-backward: forward(x, W) where gradients reach x through ``matrix`` alone."""
    back = forward(x, matrix)
    return forward(x.detach(), weight) + (back - back.detach())


class AlignedLinear(nn.Linear):
    matrix: Tensor

    def forward(self, x):
        return through(lambda x, w: F.linear(x, w), x, self.weight, self.matrix) + (
            0 if self.bias is None else self.bias
        )


def aligned_convolution(kind: type[nn.Module]) -> type[nn.Module]:
    class Aligned(kind):  # pyright: ignore[reportGeneralTypeIssues]
        matrix: Tensor

        def forward(self, x):
            def convolve(x: Tensor, weight: Tensor) -> Tensor:
                twin = {"weight": weight} | ({} if self.bias is None else {"bias": torch.zeros_like(self.bias)})
                return torch.func.functional_call(self.plain, twin, (x,))

            bias = 0 if self.bias is None else self.bias.view(-1, *[1] * (self.weight.ndim - 2))
            return through(convolve, x, self.weight, self.matrix) + bias

    return Aligned


def align(net: nn.Module, matrices: dict[str, Tensor]) -> None:
    """Turn the linear and convolutional modules of a network into ones that send δ back through given matrices."""
    modules = dict(net.named_modules())
    for name, matrix in matrices.items():
        module = modules[name.rpartition(".")[0]]
        kind = type(module)
        if isinstance(module, nn.Linear):
            module.__class__ = AlignedLinear
        else:
            plain = kind.__new__(kind)
            plain.__dict__.update(module.__dict__)
            module.__dict__["plain"] = plain
            module.__class__ = aligned_convolution(kind)
        module.__dict__["matrix"] = matrix


# --- what must not be touched -----------------------------------------------------------------------------------------

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
]


def snapshot(net: nn.Module, *generators: torch.Generator) -> dict[str, Any]:
    """Take down everything that looking at a network must leave as it is."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state()}
    seen |= {f"generator {i}": g.get_state() for i, g in enumerate(generators)}
    for name, p in net.named_parameters():
        seen |= {f"{name}": p.detach().clone(), f"{name}.requires_grad": p.requires_grad}
        seen |= {
            f"{name}.grad": None if p.grad is None else p.grad.clone(),
            f"{name}.hooks": len(p._backward_hooks or {}),
        }
    for name, b in net.named_buffers():
        seen[f"buffer {name}"] = b.detach().clone()
    for name, module in net.named_modules():
        seen[f"{name} training"] = module.training
        seen[f"{name} forward"] = "forward" in module.__dict__
        seen |= {f"{name} {kind}": len(getattr(module, kind)) for kind in HOOKS}
    return seen


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what two snapshots differ in."""
    return [
        key
        for key in before.keys() | after.keys()
        if not (
            torch.equal(before[key], after[key])
            if isinstance(before.get(key), Tensor) and isinstance(after.get(key), Tensor)
            else before.get(key, ...) is after.get(key, ...) or before.get(key, ...) == after.get(key, ...)
        )
    ]


@contextmanager
def untouched(net: nn.Module, *generators: torch.Generator):
    """Fail where something inside touches what it should not."""
    before = snapshot(net, *generators)
    yield
    assert not (touched := changed(before, snapshot(net, *generators))), f"touched: {touched}"
