"""Calling a module that is not ours: its inputs and outputs in whatever containers, and what must stay as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import UsageError

StateFn = Callable[[Any], Tensor]
Inputs = Any  # a tensor, a tuple of positional arguments, or a dict of keyword arguments
RandomState = tuple[Tensor, Tensor | None]


def call(network: nn.Module, x: Inputs) -> Any:
    """Call a network with a tensor, a tuple (positional) or a dict (keyword arguments)."""
    if isinstance(x, dict):
        return network(**x)
    if isinstance(x, tuple):
        return network(*x)
    return network(x)


def parts_of(value: Any) -> list[Any]:
    """Return what a tuple, list, dict or dataclass holds, in order; nothing for anything else."""
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, tuple | list):
        return [*value]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, item.name) for item in fields(value)]
    return []


def map_inputs(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of what a module takes or returns, keeping its containers' types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_inputs(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(map_inputs(part, change) for part in value)
    if isinstance(value, dict):
        changed = {key: map_inputs(part, change) for key, part in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for item in fields(value):
            object.__setattr__(twin, item.name, map_inputs(getattr(value, item.name), change))
        return twin
    return value


def repeat_batch(value: Any, batch: int, times: int) -> Any:
    """Repeat every tensor that has one row an example, so that several batches stand one after the other."""

    def repeat(t: Tensor) -> Tensor:
        same = times == 1 or not t.ndim or t.shape[0] != batch
        return t if same else t.repeat(times, *[1] * (t.ndim - 1))

    return map_inputs(value, repeat)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module takes or returns, in order."""
    if isinstance(value, Tensor):
        yield value
    for part in parts_of(value):
        yield from tensors_of(part)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of a value."""
    return next((t for t in tensors_of(value) if t.is_floating_point()), None)


def replace_tensor(value: Any, old: Tensor, new: Tensor, where: str) -> Any:
    """Return the value with one tensor of it, known by identity, replaced, or say that it cannot be."""
    if old is new:
        return value
    found = False

    def change(t: Tensor) -> Tensor:
        nonlocal found
        found = found or t is old
        return new if t is old else t

    changed = map_inputs(value, change)
    if not found:
        raise UsageError(
            f"{where} holds its state in something that cannot be rebuilt with another tensor: let it be a tensor, or "
            "a tuple, list, dict or dataclass of tensors"
        )
    return changed


def pick_state(value: Any, state: StateFn | None, where: str) -> Tensor:
    """Return the state in what a block takes or returns: the first floating-point tensor, or what ``state`` says."""
    found = state(value) if state else first_tensor(value)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        remedy = "state= must return a floating-point tensor" if state else "say which tensor it is with state=fn"
        raise UsageError(f"{where} has no floating-point tensor that could be the state; {remedy}")
    return found


def pick_input(args: tuple, kwargs: dict, state: StateFn | None, where: str) -> Tensor:
    """Return the state among a block's arguments; keyword arguments count behind positional ones."""
    return pick_state((*args, *kwargs.values()), state, where)


def pick_entering(args: tuple, kwargs: dict, state: StateFn | None, where: str) -> Tensor:
    """Return h_L among the arguments of the module behind the blocks; ``state`` is asked where there is a choice."""
    given = (*args, *kwargs.values())
    one = len([t for t in tensors_of(given) if t.is_floating_point()]) == 1
    return pick_state(given, None if one else state, where)


@contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Leave buffers and random states as they were, whatever happens inside, which sees copies of the buffers."""
    devices = {t.device for t in (*network.parameters(), *network.buffers()) if t.is_cuda}
    with torch.random.fork_rng(devices=[device.index for device in devices]), copied_buffers(network):
        yield


@contextmanager
def copied_buffers(network: nn.Module) -> Iterator[None]:
    """Show copies of the buffers to what happens inside.

    Copies, and not values written back: a graph made inside can still be differentiated after it, and buffers that a
    module assigns anew are put back as well.
    """
    held = [(module, {**module._buffers}) for module in network.modules() if module._buffers]
    copies = {b: b.clone() for _, buffers in held for b in buffers.values() if b is not None}
    try:
        for module, buffers in held:
            module._buffers.update({name: None if b is None else copies[b] for name, b in buffers.items()})
        yield
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def gradients_of(parameters: Sequence[nn.Parameter], wanted: bool) -> Iterator[None]:
    """Switch ``requires_grad`` of some parameters for a while; their ``.grad`` is not looked at."""
    switched = [p for p in parameters if p.requires_grad != wanted and p.is_floating_point()]
    for parameter in switched:
        parameter.requires_grad_(wanted)
    try:
        yield
    finally:
        for parameter in switched:
            parameter.requires_grad_(not wanted)


@torch.enable_grad()
def copied_input(t: Tensor) -> Tensor:
    """Return a copy that may be written into and whose place in the graph can be told."""
    return t.detach().clone().requires_grad_().clone() if t.is_floating_point() else t.clone()


def random_state(device: torch.device) -> RandomState:
    """Return the state of the generators that a module on this device draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the generators back to a recorded state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Let a module compute something else for a while; its hooks still run."""
    before = module.__dict__.get("forward")
    module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before  # pyright: ignore[reportAttributeAccessIssue]


def plain_precision(tensor: Tensor) -> Any:
    """Switch autocast off: backward passes run in the precision that the forward chose."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
