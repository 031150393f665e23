"""Linear and convolutional maps whose backward pass uses another matrix than the forward pass.

A ``TorchFunctionMode`` meets every such map of an unmodified network while it runs and puts an autograd function in
its place: forward as before, ∂/∂weight as before, ∂/∂input through a given matrix B instead of the weight W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, resolve_name

from creditscope.errors import UsageError
from creditscope.tape import Cut
from creditscope.topology import Inputs, gradients_of, map_inputs, undisturbed


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b with δx = δy B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, feedback: Tensor) -> Tensor:
        ctx.save_for_backward(x, feedback)
        ctx.weight_dtype = weight.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, feedback = ctx.saved_tensors
        flat = delta.reshape(-1, delta.shape[-1])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = (delta @ feedback.to(delta.dtype)).to(x.dtype) if needs_x else None
        dw = (flat.mT @ x.reshape(-1, x.shape[-1]).to(delta.dtype)).to(ctx.weight_dtype) if needs_weight else None
        db = flat.sum(0).to(ctx.weight_dtype) if needs_bias else None
        return dx, dw, db, None


class _Convolution(torch.autograd.Function):
    """y = W ∗ x + b with δx through B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, feedback: Tensor, *how: Any) -> Tensor:
        ctx.how, ctx.weight_dtype = how, weight.dtype
        ctx.save_for_backward(x, weight, feedback)
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, feedback = (t.to(delta.dtype) for t in ctx.saved_tensors)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        if needs_x:
            dx = torch.ops.aten.convolution_backward(delta, x, feedback, None, *ctx.how, [True, False, False])[0]
            dx = dx.to(ctx.saved_tensors[0].dtype)
        if needs_weight:
            dw = torch.ops.aten.convolution_backward(delta, x, weight, None, *ctx.how, [False, True, False])[1]
            dw = dw.to(ctx.weight_dtype)
        if needs_bias:
            db = delta.sum((0, *range(2, delta.ndim))).to(ctx.weight_dtype)
        return dx, dw, db, None, *[None] * len(ctx.how)


def _linear(feedback: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(x, weight, bias, feedback)  # pyright: ignore[reportReturnType]


def _times(feedback: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y = x W: the same map with the weight the other way round."""
    return _Linear.apply(x, weight.mT, None, feedback.mT)  # pyright: ignore[reportReturnType]


def _each(value: Any, axes: int) -> list[int]:
    return [value] * axes if isinstance(value, int) else [*value] * (axes if len(value) == 1 else 1)


def _convolution(axes: int) -> Callable[..., Tensor]:
    def convolve(
        feedback: Tensor,
        input: Tensor,  # noqa: A002 - the name that callers use
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        dilation = _each(dilation, axes)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            sides = [side for r in reversed(reach) for side in (r // 2, r - r // 2)]
            input, padding = F.pad(input, sides), 0  # noqa: A001
        how = (_each(stride, axes), _each(padding, axes), dilation, False, [0] * axes, groups)
        return _Convolution.apply(input, weight, bias, feedback, *how)  # pyright: ignore[reportReturnType]

    return convolve


def _transposed(axes: int) -> Callable[..., Tensor]:
    def convolve(
        feedback: Tensor,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        sizes = (_each(v, axes) for v in (stride, padding, dilation))
        return _Convolution.apply(  # pyright: ignore[reportReturnType]
            input, weight, bias, feedback, *sizes, True, _each(output_padding, axes), groups
        )

    return convolve


_MAPS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    torch.conv_transpose1d: _transposed(1),
    torch.conv_transpose2d: _transposed(2),
    torch.conv_transpose3d: _transposed(3),
    torch.matmul: _times,
    torch.mm: _times,
    Tensor.matmul: _times,
    Tensor.mm: _times,
    Tensor.__matmul__: _times,
}
_CONTRACTIONS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, torch.einsum}

# What a weight may enter without being a map: look-ups, sums, products by element, changes of shape.
_HARMLESS = {
    "embedding", "embedding_bag", "add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__", "mul",
    "__mul__", "__rmul__", "expand", "expand_as", "repeat", "cat", "concat", "stack", "view", "view_as", "reshape",
    "unsqueeze", "squeeze", "flatten", "__getitem__", "narrow", "index_select", "select", "chunk", "split", "unbind", "to",
    "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "dropout", "permute",
    "transpose", "t", "size", "dim", "__len__", "numel", "repeat_interleave", "layer_norm", "rms_norm", "batch_norm",
    "group_norm", "broadcast_to", "movedim", "swapaxes", "unflatten", "interpolate", "roll", "slice",
}  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


class BackwardThrough(TorchFunctionMode):
    """While active, maps with these weights send δ back through the given matrices."""

    def __init__(self, matrices: dict[Tensor, Tensor]):
        super().__init__()
        self.matrices = matrices

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        replace = _MAPS.get(func)
        if replace is not None:
            weight = kwargs["weight"] if "weight" in kwargs else args[1] if len(args) > 1 else None
            feedback = self.matrices.get(weight) if isinstance(weight, Tensor) else None
            if feedback is not None:
                return replace(feedback, *args, **kwargs)
        return func(*args, **kwargs)


class _Watch(TorchFunctionMode):
    """Notes what each weight enters."""

    def __init__(self, names: dict[Tensor, str], inputs: list[Tensor]):
        super().__init__()
        self.names, self.inputs = names, {t.grad_fn for t in inputs}
        self.maps: dict[str, None] = {}
        self.uses: dict[str, set[str]] = {name: set() for name in names.values()}
        self.derived: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        label = getattr(func, "__name__", "") or str(resolve_name(func))
        weight = kwargs["weight"] if "weight" in kwargs else args[1] if len(args) > 1 else None
        is_map = func in _MAPS and isinstance(weight, Tensor)
        for tensor in _tensors([args, kwargs]):
            name = self.names.get(tensor)
            if name is None:
                continue
            if is_map and tensor is weight and (func not in _CONTRACTIONS or weight.ndim == 2):
                self.maps[name] = None
            else:
                self.uses[name].add(label)
        if is_map and weight not in self.names and weight.requires_grad and func not in _CONTRACTIONS:
            self.derived.append(label)
        elif func in _CONTRACTIONS:
            operands = [t for t in _tensors(args) if t.requires_grad and t not in self.names]
            self.derived += [label for t in operands if self.inputs and not self._comes_from_input(t)]
        return func(*args, **kwargs)

    def _comes_from_input(self, tensor: Tensor) -> bool:
        seen, todo = set(), [tensor.grad_fn]
        while todo:
            node = todo.pop()
            if node in self.inputs:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                todo += [following for following, _ in node.next_functions]
        return False


def find_maps(cut: Cut, x: Inputs) -> tuple[list[str], dict[str, str]]:
    """Run the network once, undisturbed, and return the weights of its maps, and those that no mode can see.

    The second is {parameter name: why}: weights used inside one opaque call, weights computed from parameters, and
    modules that activation checkpointing runs again outside the mode.
    """
    network = cut.network
    parameters = dict(network.named_parameters())
    weights = {p: name for name, p in parameters.items() if p.ndim >= 2}
    own = map_inputs(x, lambda t: t.detach().clone().requires_grad_().clone() if t.is_floating_point() else t)
    inputs: list[Tensor] = []
    map_inputs(own, lambda t: inputs.append(t) or t if t.requires_grad else t)
    watch = _Watch(weights, inputs)
    rerun: list[str] = []
    with undisturbed(network), gradients_of([*parameters.values()], True), torch.enable_grad():
        with watch:
            output = cut.forward(own)
        handles = [
            module.register_forward_pre_hook(lambda m, a, name=name: rerun.append(name))
            for name, module in network.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        try:
            targets = [t for t in _tensors(output) if t.requires_grad]
            sources = [*parameters.values(), *inputs]
            _probe_backward(targets, sources)
        finally:
            for handle in handles:
                handle.remove()
    return [name for name in parameters if name in watch.maps], _opaque(watch, parameters, rerun)


def _probe_backward(targets: list[Tensor], parameters: Iterable[Tensor]) -> None:
    """Run a backward pass whose gradients are thrown away: recomputing modules show themselves."""
    before = [(p, p.grad) for p in parameters if p.is_leaf]
    for p, _ in before:
        p.grad = None
    try:
        torch.autograd.backward([t.sum() for t in targets])
    finally:
        for p, grad in before:
            p.grad = grad


def _opaque(watch: _Watch, parameters: dict[str, nn.Parameter], rerun: list[str]) -> dict[str, str]:
    opaque: dict[str, str] = {}
    for name, parameter in parameters.items():
        if parameter.ndim < 2:
            continue
        uses = {use for use in watch.uses[name] if use not in _HARMLESS and not use.startswith("__get__")}
        owner = name.rpartition(".")[0]
        if any(owner == module or owner.startswith(f"{module}.") for module in rerun):
            opaque[name] = "runs under activation checkpointing"
        elif uses:
            opaque[name] = f"is used inside {min(uses)}"
        elif name not in watch.maps and not watch.uses[name]:
            opaque[name] = "is not seen in the forward pass"
    if watch.derived and not opaque:
        seen = {name for name, uses in watch.uses.items() if uses and name not in watch.maps}
        opaque[min(seen) if seen else "a weight"] = f"is computed from parameters before it enters {watch.derived[0]}"
    return opaque


def refuse_opaque(opaque: dict[str, str]) -> None:
    """Refuse by name what cannot be given a backward matrix."""
    if opaque:
        name, why = next(iter(opaque.items()))
        more = f" (and {len(opaque) - 1} more)" if len(opaque) > 1 else ""
        raise UsageError(
            f"weight-level FA cannot reach '{name}'{more}: it {why}; write it with nn.Linear or nn.Conv, or use "
            "FA(level='block') or DFA"
        )


