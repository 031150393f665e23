"""How a module is put together around its blocks, found by running it once and looking.

A *block* is a named submodule, called once, in order. The state h_l is the tensor that enters block l; h_L is what
enters the rest after the last block. Where the skip is added outside the blocks (``h = h + block(h)``), the last
block's output is only a branch, and h_L is what enters the first module called afterwards.

Nothing is assumed about the user's ``forward``: one plain run records who calls whom with what, one run cut at the
blocks records what depends on what (its autograd graph), and their outputs must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from creditscope.errors import UsageError, unknown

StateFn = Callable[[Any], Tensor]
Inputs = Any  # a tensor, a tuple of positional arguments, or a dict of keyword arguments
Join = Literal["chain", "skip", "between"]


@dataclass(frozen=True)
class Topology:
    """What one run of a network showed; everything is per example, without the batch axis."""

    shapes: tuple[torch.Size, ...]
    """Shapes of the states h_0..h_L."""
    output_shape: torch.Size
    joins: tuple[Join, ...]
    """How h_{l+1} comes from block l: its output itself, with the skip added outside, or by something in between."""
    terminal: str | None
    """The module that h_L enters; None where h_L is the last block's own output."""
    mutated: frozenset[int]
    """States that are written into after they were reached, by the block that they enter or behind its back."""
    hidden: tuple[str, ...]
    """Blocks that add their skip inside and do not expose their branch."""
    reentrant: bool
    """Some block runs under reentrant activation checkpointing: its output has no graph of its own."""
    exact_sum: bool
    """h_{l+1} is exactly block l's output, or exactly h_l plus it, for all l: then a tail can be replayed."""
    rest: tuple[str, ...] | None
    """The modules from h_L to the output, where they are a plain chain; None otherwise."""
    sections: dict[str, tuple[str, ...]]
    """Parameter names of the stem, of each block, and of the head, in that order."""


def call(network: nn.Module, x: Inputs) -> Any:
    """Call a network with a tensor, a tuple (positional) or a dict (keyword arguments)."""
    if isinstance(x, dict):
        return network(**x)
    if isinstance(x, tuple):
        return network(*x)
    return network(x)


def map_inputs(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to every tensor of an input."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple):
        return tuple(map_inputs(part, change) for part in x)
    if isinstance(x, dict):
        return {name: map_inputs(part, change) for name, part in x.items()}
    return x


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of a value, looked for in tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return the value with one tensor of it, known by identity, replaced; the container's type is kept."""
    if value is old:
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace_tensor(part, old, new) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(replace_tensor(part, old, new) for part in value)
    if isinstance(value, dict):
        changed = {key: replace_tensor(part, old, new) for key, part in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    return value


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


def find_blocks(network: nn.Module, blocks: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the blocks by name, or say in one line what is wrong with the names."""
    if blocks is None:
        blocks = getattr(network, "credit_blocks", None)
        if blocks is None:
            raise UsageError(
                f"{type(network).__name__} does not name its blocks: pass blocks=[...], "
                f"e.g. some of {', '.join(name for name, _ in network.named_children()) or 'its submodules'}"
            )
    if isinstance(blocks, str) or not all(isinstance(name, str) for name in blocks):
        raise UsageError(f"blocks must be a list of module names, not {blocks!r}")
    if len(blocks) == 0:
        raise UsageError("blocks is empty: name at least one block")
    modules = dict(network.named_modules(remove_duplicate=False))
    del modules[""]
    found: dict[str, nn.Module] = {}
    for name in blocks:
        if name not in modules:
            raise unknown("block", name, modules)
        same = next((other for other, module in found.items() if module is modules[name]), None)
        if same is not None:
            raise UsageError(f"block '{name}' is repeated" + (f": it is the module '{same}'" if same != name else ""))
        found[name] = modules[name]
    for name, module in found.items():
        inside = next((other for other, m in found.items() if m is not module and m in set(module.modules())), None)
        if inside:
            raise UsageError(f"block '{inside}' lies inside block '{name}': blocks follow each other, they do not nest")
    return found


@contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Leave buffers and random states as they were, whatever happens inside."""
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    devices = {t.device for t in (*network.parameters(), *network.buffers()) if t.is_cuda}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


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


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are one: the same object, or the same view of the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


# --- the plain run ----------------------------------------------------------------------------------------------------


@dataclass
class _Plain:
    """What the uncut run showed."""

    output: Tensor
    mutated: frozenset[int]
    first_after: str | None
    """The first module called after the last block."""
    after: list[tuple[str, Tensor | None, Tensor | None]]
    """Outermost module calls after the last block: name, first tensor in, first tensor out."""


def _run_plain(network: nn.Module, blocks: dict[str, nn.Module], x: Inputs, state: StateFn | None) -> _Plain:
    """Run once without cutting: call order, writes into block inputs, and what is called after the last block."""
    index = {module: l for l, module in enumerate(blocks.values())}
    names = list(blocks)
    inside = {m for block in blocks.values() for m in block.modules()}
    around = {m for m in network.modules() if any(block in set(m.modules()) for block in blocks.values())} - inside
    order: list[str] = []
    entered: list[tuple[int, Tensor, int]] = []
    calls: list[list[Any]] = []
    open_calls: list[nn.Module] = []
    last = names[-1]
    finished = False

    def enter_block(module: nn.Module, args: tuple, kwargs: dict) -> None:
        name = names[index[module]]
        if name in order:
            raise UsageError(f"block '{name}' is used twice in one forward: its credit would be ambiguous")
        h = pick_input(args, kwargs, state, f"what enters block '{name}'")
        order.append(name)
        entered.append((index[module], h, h._version))

    def leave_block(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        nonlocal finished
        out = pick_state(output, state, f"what block '{names[index[module]]}' returns")
        if names[index[module]] == last:
            finished = True
            entered.append((len(names), out, out._version))

    def enter_other(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if finished:
            if not open_calls:
                calls.append([name, first_tensor((*args, *kwargs.values())), None])
            open_calls.append(module)

    def leave_other(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if open_calls and open_calls[-1] is module:
            open_calls.pop()
            if not open_calls:
                calls[-1][2] = first_tensor(output)

    with ExitStack() as stack:
        for module in index:
            stack.callback(module.register_forward_pre_hook(enter_block, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave_block, with_kwargs=True).remove)
        for name, module in network.named_modules():
            if module not in inside and module not in around:
                hook = lambda m, a, k, name=name: enter_other(name, m, a, k)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave_other, with_kwargs=True).remove)
        with torch.no_grad():
            output = call(network, x)
    missing = [name for name in names if name not in order]
    if missing:
        raise UsageError(
            f"block '{missing[0]}' was not called by the network's forward"
            + (" (a compiled network hides its blocks: use learner.compile() instead)" if len(missing) == len(names) else "")
        )
    if order != names:
        raise UsageError(f"blocks are called in the order {', '.join(order)}; give them in that order")
    return _Plain(
        pick_state(output, None, "the network's output"),
        frozenset(l for l, h, version in entered if h._version != version),
        calls[0][0] if calls else None,
        [(name, before, after) for name, before, after in calls],
    )


# --- the graph of the cut run -----------------------------------------------------------------------------------------


def _nodes(start: Any, stop: set[Any]) -> set[Any]:
    """Return the autograd nodes that a node comes from, itself included, not going beyond those in ``stop``."""
    seen: set[Any] = set()
    todo = [start]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node not in stop:
            todo += [following for following, _ in node.next_functions]
    return seen


def _node(point: Any) -> Any:
    """Return the autograd node that made a recorded tensor, None where it has no graph."""
    return point.edge.node if point.edge is not None else None


def _depends(start: Any, on: Any) -> bool:
    """Tell whether a node comes from another."""
    return on is not None and start is not None and on in _nodes(start, {on})


def describe(
    network: nn.Module, blocks: dict[str, nn.Module], x: Inputs, *, head: str | None, state: StateFn | None
) -> Topology:
    """Run the network twice, undisturbed, and describe it; refuse by name what cannot be cut."""
    from creditscope.tape import Point, Recorder  # the cut run is the tape's own

    parameters = list(network.parameters())
    names = list(blocks)
    with undisturbed(network), gradients_of(parameters, True):
        with undisturbed(network):
            plain = _run_plain(network, blocks, x, state)
        differentiable = map_inputs(
            x, lambda t: t.detach().clone().requires_grad_().clone() if t.is_floating_point() else t
        )
        name = head if head is not None else plain.first_after
        terminal = (name, network.get_submodule(name)) if name is not None else None
        recorder = Recorder(blocks, terminal=terminal, state=state, copied=plain.mutated, mode="trial")
        with torch.enable_grad(), recorder as record:
            output = pick_state(call(network, differentiable), None, "the network's output")
    if not torch.allclose(output.detach(), plain.output, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise UsageError(
            "cutting this network at its blocks changes its output (its forward is not deterministic, or a block writes "
            "into what is used again): it cannot be cut there"
        )
    final = Point.at(output)
    join, terminal_name = _last_join(record, name if head is None else None, final, names, head)
    joins = [*(_join(record, l, record.incoming[l + 1]) for l in range(len(names) - 1)), join]
    incoming = [*record.incoming[: len(names)], record.incoming[-1] if terminal_name else record.outputs[-1]]
    _refuse_bypasses(incoming, final, names, terminal_name)
    states = [*record.states[: len(names)], record.states[-1] if terminal_name else incoming[-1].tensor.detach()]
    _check_batch(states, output, names)
    return Topology(
        shapes=tuple(h.shape[1:] for h in states),
        output_shape=output.shape[1:],
        joins=tuple(joins),
        terminal=terminal_name,
        mutated=plain.mutated,
        hidden=tuple(names[l] for l in range(len(names)) if record.inner_skip[l] and record.branches[l] is record.outputs[l]),
        reentrant=any(point.edge is None for point in record.outputs),
        exact_sum=_is_exact_sum(record, states, joins, plain.mutated),
        rest=_rest_chain(plain, states[-1]),
        sections=_sections(network, blocks, _node(incoming[0])),
    )


def _is_sum(record: Any, l: int, following: Tensor) -> bool:
    """Tell by the values whether h_{l+1} = h_l + block(h_l), where no graph can tell."""
    before, branch = record.states[l], record.outputs[l].tensor.detach()
    return before.shape == branch.shape == following.shape and torch.equal(before + branch, following.detach())


def _join(record: Any, l: int, following: Any) -> Join:
    """Say how h_{l+1} comes from block l; the block was fed a detached h_l, so a path to h_l goes around it."""
    if following.is_same(record.outputs[l]):
        return "chain"
    if _depends(_node(following), _node(record.incoming[l])) or _is_sum(record, l, following.tensor):
        return "skip"
    return "between"


def _last_join(
    record: Any, after: str | None, output: Any, names: list[str], head: str | None
) -> tuple[Join, str | None]:
    """Find h_L: the last block's own output, or, with the skip outside, what enters the next module."""
    l, last = len(names) - 1, names[-1]
    entering = record.incoming[-1] if len(record.incoming) > len(names) else None
    returned, around = record.outputs[-1], _node(record.incoming[l])
    if head is not None:
        if entering is None:
            raise UsageError(f"head '{head}' is not called after the last block '{last}'")
        return _join(record, l, entering), head
    join = _join(record, l, entering) if entering is not None else None
    if join == "chain":
        # under reentrant activation checkpointing a block's own output has no graph, what enters the next module has
        return "chain", after if _node(returned) is None and _node(entering) is not None else None
    if join == "skip" and (_depends(_node(entering), _node(returned)) or _node(returned) is None):
        return "skip", after
    if _depends(_node(output), around) or join == "skip":
        raise UsageError(
            f"cannot tell h_L: the skip around the last block '{last}' is added outside it, and the sum enters no module "
            "directly; put the rest into a module and name it with head="
        )
    return "between" if entering is not None else "chain", None


def _refuse_bypasses(incoming: list[Any], output: Any, names: list[str], terminal: str | None) -> None:
    """Refuse networks in which a state does not hold all that later states depend on."""
    label = [*(f"what enters block '{name}'" for name in names), f"what enters '{terminal}'" if terminal else "h_L"]
    ancestors: set[Any] = set()
    for l, point in enumerate([*incoming, output]):
        previous = _node(incoming[l - 1]) if l else None
        nodes = _nodes(_node(point), {previous} if previous is not None else set())
        around = {node for node in nodes & ancestors if not hasattr(node, "variable")} - {previous}
        if around and l:
            where = label[l] if l < len(label) else "the output"
            raise UsageError(
                f"{where} depends on what came before {label[l - 1]} by a path around it, so the state there is not the "
                "whole state; choose blocks between which everything passes"
            )
        ancestors |= nodes


def _check_batch(states: list[Tensor], output: Tensor, names: list[str]) -> None:
    """The batch comes first, in every state and in the output."""
    batch = output.shape[0] if output.ndim else None
    for l, h in enumerate(states):
        if h.ndim < 2 or h.shape[0] != batch:
            where = f"entering block '{names[l]}'" if l < len(names) else "after the last block"
            raise UsageError(
                f"the state {where} has shape {tuple(h.shape)}, the output {tuple(output.shape)}: the batch must come "
                "first in both"
            )


def _is_exact_sum(record: Any, states: list[Tensor], joins: list[Join], mutated: frozenset[int]) -> bool:
    """Tell whether the states can be rebuilt to the bit from the blocks alone."""
    for l, join in enumerate(joins):
        branch = record.outputs[l].tensor.detach()
        fits = join == "chain" or (join == "skip" and branch.shape == states[l].shape)
        if not fits or not torch.equal(branch if join == "chain" else states[l] + branch, states[l + 1]):
            return False
    return not mutated


def _rest_chain(plain: _Plain, last: Tensor) -> tuple[str, ...] | None:
    """Return the modules from h_L to the output where each takes exactly what the one before gave."""
    taken = [before for _, before, _ in plain.after]
    given = [last, *(after for _, _, after in plain.after)]
    if not taken or any(t is None for t in taken) or any(g is None for g in given):
        return None
    pairs = list(zip(given[1:-1], taken[1:], strict=True))
    if not all(same_tensor(a, b) for a, b in pairs) or not same_tensor(given[-1], plain.output):
        return None
    if taken[0].shape != last.shape or not torch.equal(taken[0], last):
        return None
    return tuple(name for name, _, _ in plain.after)


def _sections(network: nn.Module, blocks: dict[str, nn.Module], stem: Any) -> dict[str, tuple[str, ...]]:
    """Sort the parameters into stem (what h_0 depends on), blocks (their own) and head (the rest)."""
    owner = {p: name for name, block in blocks.items() for p in block.parameters()}
    before = {node.variable for node in _nodes(stem, set()) if hasattr(node, "variable")}
    sections: dict[str, list[str]] = {"stem": [], **{name: [] for name in blocks}, "head": []}
    for name, parameter in network.named_parameters():
        sections[owner.get(parameter, "stem" if parameter in before else "head")].append(name)
    return {section: tuple(members) for section, members in sections.items()}
