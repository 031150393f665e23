"""Linear and convolutional maps whose backward pass uses another matrix than the forward pass.

A ``TorchFunctionMode`` meets every such map of an unmodified network while it runs and puts an autograd function in
its place: forward as before, ∂/∂weight as before, ∂/∂input through a given matrix B instead of the weight W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, resolve_name

from creditscope.calling import Inputs, copied_input, gradients_of, map_inputs, tensors_of, undisturbed
from creditscope.errors import UsageError
from creditscope.recorder import holds_checkpoint
from creditscope.tape import Cut


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b with δx = δy B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, feedback: Tensor) -> Tensor:
        ctx.save_for_backward(x, feedback)
        ctx.weight_dtype = weight.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (delta,) = deltas
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
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (delta,) = deltas
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


def _linear(
    feedback: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return _Linear.apply(input, weight, bias, feedback)  # pyright: ignore[reportReturnType]


def _times(feedback: Tensor, *operands: Tensor, **named: Tensor) -> Tensor:
    """y = x W: the same map with the weight the other way round."""
    x, weight = (*operands, *named.values())
    return _Linear.apply(x, weight.mT, None, feedback.mT)  # pyright: ignore[reportReturnType]


def _each(value: Any, axes: int) -> list[int]:
    return [value] * axes if isinstance(value, int) else [*value] * (axes if len(value) == 1 else 1)


def _convolution(axes: int) -> Callable[..., Tensor]:
    def convolve(
        feedback: Tensor,
        input: Tensor,
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
            input, padding = F.pad(input, sides), 0
        how = (_each(stride, axes), _each(padding, axes), dilation, False, [0] * axes, groups)
        return _Convolution.apply(input, weight, bias, feedback, *how)  # pyright: ignore[reportReturnType]

    return convolve


def _transposed(axes: int) -> Callable[..., Tensor]:
    def convolve(
        feedback: Tensor,
        input: Tensor,
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
_PRODUCTS = {func for func, replace in _MAPS.items() if replace is _times}

# What a weight may meet an activation in without being a map of it: look-ups, changes of shape, and whatever works unit
# by unit, whose backward pass carries no other unit's δ.
_HARMLESS = {
    "embedding", "embedding_bag", "add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__",
    "sub_", "__isub__", "mul", "__mul__", "__rmul__", "__imul__", "mul_", "div", "__truediv__", "__rtruediv__", "div_",
    "addcmul", "lerp", "where", "masked_fill", "masked_fill_", "maximum", "minimum", "pow", "__pow__", "prelu", "cat",
    "concat", "stack", "expand_as", "view_as", "type_as", "copy_", "__setitem__", "__getitem__", "index_select",
    "gather", "scatter", "layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm",
}  # fmt: skip

# Where a vector of parameters (a query, say) is a map to one number; elsewhere vectors are biases, scales and gates.
_CONTRACTIONS = {
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "einsum", "tensordot", "addmm",
    "addmv", "addbmm", "baddbmm", "linear", "bilinear",
}  # fmt: skip


def _weight_of(func: Any, args: tuple, kwargs: dict) -> Tensor | None:
    """Return what stands in the place of the weight in a call of a map."""
    names = ("other", "mat2") if func in _PRODUCTS else ("weight",)
    weight = args[1] if len(args) > 1 else next((kwargs[name] for name in names if name in kwargs), None)
    return weight if func in _MAPS and isinstance(weight, Tensor) else None


class BackwardThrough(TorchFunctionMode):
    """While active, maps with these weights send δ back through the given matrices."""

    def __init__(self, matrices: Mapping[Any, Tensor]):
        super().__init__()
        self.matrices = matrices

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        weight = _weight_of(func, args, kwargs)
        feedback = self.matrices.get(weight) if weight is not None else None
        return func(*args, **kwargs) if feedback is None else _MAPS[func](feedback, *args, **kwargs)


class _Watch(TorchFunctionMode):
    """Notes the weights that are maps, and those that meet an activation in any other way that would carry δ.

    Every tensor of the forward pass is one of three: made of parameters (or a parameter itself), made of buffers and
    constants alone, or else an activation: made of the inputs, by a map, or out of sight.
    """

    def __init__(self, parameters: dict[Tensor, str], buffers: Iterable[Tensor]):
        super().__init__()
        self.parameters = parameters
        self.made_of: dict[Tensor, str] = {**parameters}
        self.constants: dict[Tensor, None] = dict.fromkeys(buffers)
        self.maps: dict[str, None] = {}
        self.seen: set[str] = set()
        self.unrecorded: set[str] = set()
        self.opaque: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors_of((args, kwargs))]
        parts = [t for t in given if t in self.made_of]
        live = any(t not in self.made_of and t not in self.constants for t in given)
        self.seen.update(self.made_of[t] for t in parts)
        weight = _weight_of(func, args, kwargs)
        is_map = weight is not None and weight in self.parameters and (func not in _PRODUCTS or weight.ndim == 2)
        if weight is not None and is_map:
            self._note_map(self.parameters[weight])
        else:
            self._note_meeting(func, weight, parts, live)
        before = [(t, t._version) for t in given if t not in self.parameters] if live else []
        result = func(*args, **kwargs)
        for t in (t for t, version in before if t._version != version):  # written into: an activation from now on
            self.constants.pop(t, None)
            self.made_of.pop(t, None)
        for t in () if live or is_map else tensors_of(result):
            if parts:
                self.made_of.setdefault(t, self.made_of[parts[0]])
            else:
                self.constants[t] = None
        return result

    def _note_map(self, name: str) -> None:
        self.maps[name] = None
        if not torch.is_grad_enabled():
            self.unrecorded.add(name)

    def _note_meeting(self, func: Any, weight: Tensor | None, parts: list[Tensor], live: bool) -> None:
        label = getattr(func, "__name__", "") or str(resolve_name(func))
        if weight is not None and func not in _PRODUCTS:  # its bias is no map, and its input may be a parameter
            parts = [t for t in parts if t is weight]
            if weight.requires_grad and not parts:
                self.opaque["a weight"] = f"is computed from activations before it enters {label}"
        for t in parts if live else ():
            if label in _CONTRACTIONS if t.ndim < 2 else label not in _HARMLESS:
                own = t in self.parameters
                why = f"is used inside {label}" if own else f"is computed with before it enters {label}"
                self.opaque.setdefault(self.made_of[t], why)


def find_maps(cut: Cut, x: Inputs) -> tuple[list[str], dict[str, str]]:
    """Run the network once, undisturbed, and return the weights of its maps, and those that no mode can see.

    The second is {parameter name: why}: weights used inside one opaque call, weights computed from parameters, and
    modules that activation checkpointing runs again outside the mode.
    """
    network = cut.network
    parameters = dict(network.named_parameters())
    own = map_inputs(x, copied_input)
    rerun: list[str] = []
    with undisturbed(network), gradients_of([*parameters.values()], True), torch.enable_grad():
        with _Watch({p: name for name, p in parameters.items()}, network.buffers()) as watch:
            output = cut.forward(own)
        with ExitStack() as stack:
            for name, module in network.named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    note = lambda m, a, name=name: rerun.append(name)  # noqa: E731
                    stack.callback(module.register_forward_pre_hook(note).remove)
            targets = [t.sum() for t in tensors_of(output) if t.requires_grad]
            if any(holds_checkpoint(t.grad_fn) for t in targets):  # allows no gradient that is not accumulated
                rerun += [name.rpartition(".")[0] for name in watch.unrecorded]
            elif targets:  # a pass whose gradients are thrown away: modules that are computed again show themselves
                torch.autograd.grad(targets, [p for p in parameters.values() if p.requires_grad], allow_unused=True)
    return [name for name in parameters if name in watch.maps], _opaque(watch, parameters, rerun)


def _opaque(watch: _Watch, parameters: dict[str, nn.Parameter], rerun: list[str]) -> dict[str, str]:
    opaque: dict[str, str] = {}
    for name, parameter in parameters.items():
        owner = name.rpartition(".")[0]
        again = any(owner == module or owner.startswith(f"{module}.") for module in rerun)
        if parameter.ndim >= 2 and again:
            opaque[name] = "runs under activation checkpointing"
        elif name in watch.opaque:
            opaque[name] = watch.opaque[name]
        elif parameter.ndim >= 2 and name not in watch.seen:
            opaque[name] = "is not seen in the forward pass"
    return opaque or {name: why for name, why in watch.opaque.items() if name not in parameters}


def refuse_opaque(opaque: dict[str, str]) -> None:
    """Refuse by name what cannot be given a backward matrix."""
    if opaque:
        name, why = next(iter(opaque.items()))
        more = f" (and {len(opaque) - 1} more)" if len(opaque) > 1 else ""
        raise UsageError(
            f"weight-level FA cannot reach '{name}'{more}: it {why}; write it with nn.Linear or nn.Conv, or use "
            "FA(level='block') or DFA"
        )
