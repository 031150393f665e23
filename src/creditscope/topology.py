"""How a module is put together around its blocks, found by running it once and looking.

A *block* is a named submodule, called once, in order. The state h_l is the tensor that enters block l; h_L is what
enters the rest after the last block. Where the skip is added outside the blocks (``h = h + block(h)``), the last
block's output is only a branch, and h_L is what enters the first module called afterwards.

Nothing is assumed about the user's ``forward``: one plain run records who calls whom with what, one run cut at the
blocks records what depends on what (its autograd graph), and their outputs must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from creditscope.calling import (
    Inputs,
    StateFn,
    call,
    copied_input,
    first_tensor,
    gradients_of,
    map_inputs,
    pick_entering,
    pick_input,
    pick_state,
    undisturbed,
)
from creditscope.errors import UsageError, unknown
from creditscope.recorder import CHECKPOINT, Point, Recorder, branch_of, nodes_of

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
    rewritten: frozenset[int]
    """Blocks whose branch is written into after it was made: its value has to be kept."""
    shared: frozenset[int]
    """States that others read than the module that they enter: a skip, a second head."""
    early: frozenset[int]
    """States that others read before they enter that module, where a replay cannot put another value in time."""
    hidden: tuple[str, ...]
    """Blocks that add their skip inside and do not expose their branch."""
    packed: tuple[str, ...]
    """Blocks that return a tuple or the like, with their state in it."""
    reentrant: frozenset[int]
    """Blocks that run under reentrant activation checkpointing: their output has no graph of its own."""
    recomputes: bool
    """There is a reentrant checkpoint: it works on what requires a gradient alone, and accumulates every gradient."""
    exact_sum: bool
    """h_{l+1} is block l's output, or h_l plus it and nothing else, for all l."""
    rest: tuple[str, ...] | None
    """The modules from h_L to the output, where they are a plain chain; None otherwise."""
    sections: dict[str, tuple[str, ...]]
    """Parameter names of the stem, of each block, and of the head, in that order."""


def find_blocks(network: nn.Module, blocks: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the blocks by name, or say in one line what is wrong with the names."""
    if blocks is None:
        blocks = getattr(network, "credit_blocks", None)
        if blocks is None:
            raise UsageError(
                f"{type(network).__name__} does not name its blocks: pass blocks=[...], "
                f"e.g. some of {', '.join(name for name, _ in network.named_children()) or 'its submodules'}"
            )
    if isinstance(blocks, str) or not (isinstance(blocks, Iterable) and all(isinstance(name, str) for name in blocks)):
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
    refuse_compiled(network, found)
    return found


def refuse_compiled(network: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Refuse blocks inside something compiled: hooks that come later are dropped there without a word, or traced."""
    wanted = {*blocks.values()}
    for name, module in network.named_modules():
        what = f"'{name}'" if name else "the network"
        wraps = "_orig_mod" in module._modules and module not in wanted
        if (wraps or module._compiled_call_impl is not None) and not wanted.isdisjoint(module.modules()):
            raise UsageError(
                f"{what} is compiled, which hides its blocks: attach to the module as it was before and use "
                "learner.compile()"
            )


# --- the plain run ----------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """One outermost module call after the last block."""

    name: str
    entered: Point | None
    """What it took, where that was one tensor and nothing else."""
    left: Point | None = None
    """The first tensor that it returned."""


@dataclass
class _Plain:
    """What the uncut run showed."""

    output: Point
    written: frozenset[int]
    """Blocks whose state was written into after it had entered them."""
    rewritten: frozenset[int]
    """Blocks whose branch was."""
    packed: frozenset[int]
    """Blocks that return more than a tensor."""
    written_last: bool
    """Whether the last block's output was written into afterwards."""
    written_terminal: bool
    """Whether what entered the first module after the last block (or the named head) was written into afterwards."""
    terminal: str | None
    """That module."""
    after: list[_Call]


class _Plainly:
    """The hooks of the uncut run: call order, writes into block inputs, and what is called after the last block."""

    def __init__(self, network: nn.Module, blocks: dict[str, nn.Module], head: str | None, state: StateFn | None):
        self.network, self.blocks, self.state = network, blocks, state
        self.head = (head, network.get_submodule(head)) if head is not None else None
        self.order: list[str] = []
        self.entered: list[tuple[Tensor, int]] = []
        self.branches: dict[int, tuple[Tensor, int]] = {}
        self.packed: set[int] = set()
        self.last: tuple[Tensor, int] | None = None
        self.terminal: tuple[str, Tensor, int] | None = None
        self.calls: list[_Call] = []
        self.open: list[nn.Module] = []

    def run(self, x: Inputs) -> _Plain:
        """Call the network and say what was seen."""
        with ExitStack() as stack:
            self._hook(stack)
            output = pick_state(call(self.network, x), None, "the network's output")
        self._refuse_order()
        written = frozenset(l for l, seen in enumerate(self.entered) if _is_written(seen))
        last, terminal = self.last, self.terminal
        return _Plain(
            Point.at(output),
            written,
            frozenset(l for l, seen in self.branches.items() if _is_written(seen)),
            frozenset(self.packed),
            last is not None and _is_written(last),
            terminal is not None and _is_written(terminal[1:]),
            terminal[0] if terminal else None,
            self.calls,
        )

    def _hook(self, stack: ExitStack) -> None:
        inside = {m for block in self.blocks.values() for m in block.modules()}
        blocks = {*self.blocks.values()}
        around = {m for m in self.network.modules() if not blocks.isdisjoint(m.modules())} - inside
        for name, module in self.blocks.items():
            stack.callback(module.register_forward_pre_hook(self._entering(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(self._leaving(name), with_kwargs=True).remove)
            stack.callback(branch_of(module).register_forward_hook(self._branching(name)).remove)
        for name, module in self.network.named_modules():
            if module not in inside and module not in around:
                stack.callback(module.register_forward_pre_hook(self._behind(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._done, with_kwargs=True).remove)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if name in self.order:
                raise UsageError(f"block '{name}' is used twice in one forward: its credit would be ambiguous")
            h = pick_input(args, kwargs, self.state, f"what enters block '{name}'")
            self.order.append(name)
            self.entered.append((h, h._version))

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            out = pick_state(output, self.state, f"what block '{name}' returns")
            if output is not out:
                self.packed.add(len(self.order) - 1)
            if len(self.order) == len(self.blocks):
                self.last = (out, out._version)

        return leave

    def _branching(self, name: str) -> Callable[..., None]:
        own = branch_of(self.blocks[name]) is self.blocks[name]

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            out = pick_state(output, self.state if own else None, f"the branch of block '{name}'")
            self.branches.setdefault(len(self.order) - 1, (out, out._version))

        return leave

    def _behind(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self.last is None:
                return
            h = first_tensor((*args, *kwargs.values()))
            if self.terminal is None and h is not None and (self.head is None or self.head[1] is module):
                met = pick_entering(args, kwargs, self.state, f"what enters '{name}'")
                self.terminal = (self.head[0] if self.head else name, met, met._version)
            if not self.open:
                alone = len(args) == 1 and args[0] is h and not kwargs
                self.calls.append(_Call(name, Point.at(h) if alone and h is not None else None))
            self.open.append(module)

        return enter

    def _done(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.open and self.open[-1] is module:
            self.open.pop()
            out = first_tensor(output)
            if not self.open:
                self.calls[-1].left = None if out is None else Point.at(out)

    def _refuse_order(self) -> None:
        names = [*self.blocks]
        missing = [name for name in names if name not in self.order]
        if missing:
            raise UsageError(f"block '{missing[0]}' was not called by the network's forward")
        if self.order != names:
            raise UsageError(f"blocks are called in the order {', '.join(self.order)}; give them in that order")


def _is_written(seen: tuple[Tensor, int]) -> bool:
    tensor, version = seen
    return tensor._version != version


# --- the graph of the cut run -----------------------------------------------------------------------------------------


def _node(point: Any) -> Any:
    """Return the autograd node that made a recorded tensor, None where it has no graph."""
    return point.edge.node if point.edge is not None else None


def _depends(start: Any, on: Any) -> bool:
    """Tell whether a node comes from another."""
    return on is not None and start is not None and on in nodes_of(start, {on})


def describe(
    network: nn.Module, blocks: dict[str, nn.Module], x: Inputs, *, head: str | None, state: StateFn | None
) -> Topology:
    """Run the network twice, undisturbed, and describe it; refuse by name what cannot be cut."""
    names = [*blocks]
    with undisturbed(network), gradients_of([*network.parameters()], True), torch.enable_grad():
        with undisturbed(network):
            plain = _Plainly(network, blocks, head, state).run(map_inputs(x, lambda t: t.detach().clone()))
        if head is not None and plain.terminal is None:
            raise UsageError(f"head '{head}' is not called after the last block '{names[-1]}'")
        terminal = (plain.terminal, network.get_submodule(plain.terminal)) if plain.terminal is not None else None
        copied = plain.written | ({len(names)} if plain.written_terminal else set())
        recorder = Recorder(blocks, terminal=terminal, state=state, copied=copied, mode="trial")
        with recorder as record:
            output = pick_state(call(network, map_inputs(x, copied_input)), None, "the network's output")
    if not torch.allclose(output, plain.output.tensor, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise UsageError(
            "cutting this network at its blocks changes its output (its forward is not deterministic, or a block "
            "writes into what is used again): it cannot be cut there"
        )
    final = Point.at(output)
    last_join, terminal_name = _last_join(record, plain.terminal, final, names, head is not None)
    joins: list[Join] = [*(_join(record, l, record.incoming[l + 1]) for l in range(len(names) - 1)), last_join]
    incoming = [*record.incoming[: len(names)], record.incoming[-1] if terminal_name else record.outputs[-1]]
    behind = [final] if terminal_name else [*record.incoming[len(names) :], final]
    _refuse_bypasses(incoming, behind, names, terminal_name)
    states = [*record.states[: len(names)], record.states[-1] if terminal_name else incoming[-1].tensor.detach()]
    _check_batch(states, output, names)
    written = plain.written_terminal if terminal_name else plain.written_last
    graph = set().union(*(nodes_of(_node(point), set()) for point in [*incoming, *record.outputs, *behind]))
    shared, early = _shared(record, incoming, graph, terminal_name)
    return Topology(
        shapes=tuple(h.shape[1:] for h in states),
        output_shape=output.shape[1:],
        joins=tuple(joins),
        terminal=terminal_name,
        mutated=plain.written | ({len(names)} if written else set()),
        rewritten=plain.rewritten,
        shared=shared,
        early=early,
        hidden=tuple(name for l, name in enumerate(names) if _hides_branch(record, l, name, joins[l])),
        packed=tuple(name for l, name in enumerate(names) if l in plain.packed),
        reentrant=frozenset(l for l, point in enumerate(record.outputs) if point.edge is None),
        recomputes=any(node.name() == CHECKPOINT for node in graph),
        exact_sum=not plain.written and all(_is_exact(record, l, incoming[l + 1]) for l in range(len(names))),
        rest=_rest_chain(plain, record, final, terminal_name),
        sections=_sections(network, blocks, _node(incoming[0])),
    )


def _is_sum(record: Recorder, l: int, following: Tensor) -> bool:
    """Tell by the values whether h_{l+1} = h_l + block(h_l), where no graph can tell."""
    before, branch = record.states[l], record.outputs[l].tensor.detach()
    return before.shape == branch.shape == following.shape and torch.equal(before + branch, following.detach())


def _join(record: Recorder, l: int, following: Point) -> Join:
    """Say how h_{l+1} comes from block l; the block was fed a detached h_l, so a path to h_l goes around it."""
    if following.is_same(record.outputs[l]):
        return "chain"
    if _depends(_node(following), _node(record.incoming[l])) or _is_sum(record, l, following.tensor):
        return "skip"
    return "between"


def _last_join(
    record: Recorder, entered: str | None, output: Point, names: list[str], named: bool
) -> tuple[Join, str | None]:
    """Find h_L: the last block's own output, or, with the skip outside, what enters the next (or the named) module."""
    l, last = len(names) - 1, names[-1]
    entering = record.incoming[-1] if len(record.incoming) > len(names) else None
    returned, around = record.outputs[-1], _node(record.incoming[l])
    join = _join(record, l, entering) if entering is not None else None
    if named and join is not None:
        return join, entered
    if join == "chain":
        # under reentrant activation checkpointing a block's own output has no graph, what enters the next module has
        return "chain", entered if _node(returned) is None and _node(entering) is not None else None
    if join == "skip" and (_depends(_node(entering), _node(returned)) or _node(returned) is None):
        return "skip", entered
    if _depends(_node(output), around) or join == "skip":
        raise UsageError(
            f"cannot tell h_L: the skip around the last block '{last}' is added outside it, and the sum enters no "
            "module directly; put the rest into a module and name it with head="
        )
    return "chain", None


def _refuse_bypasses(incoming: list[Point], behind: list[Point], names: list[str], terminal: str | None) -> None:
    """Refuse networks in which a state does not hold all that later states depend on, the inputs themselves aside."""
    label = [*(f"what enters block '{name}'" for name in names), f"what enters '{terminal}'" if terminal else "h_L"]
    states = {_node(point) for point in incoming}
    ancestors: set[Any] = set()
    for l, points in enumerate([*([point] for point in incoming), behind]):
        previous = _node(incoming[l - 1]) if l else None
        stop = {previous} if previous is not None else set()
        nodes = set().union(*(nodes_of(_node(point), stop) for point in points))
        around = {node for node in nodes & ancestors if not hasattr(node, "variable")} - {previous}
        if l and any(not _is_constant(node, states) for node in around):
            where = label[l] if l < len(label) else "the output"
            raise UsageError(
                f"{where} depends on what came before {label[l - 1]} by a path around it, so the state there is not "
                "the whole state; choose blocks between which everything passes"
            )
        ancestors |= nodes


def _is_constant(node: Any, states: set[Any]) -> bool:
    """Tell whether a node depends on neither a parameter nor a state, but on the inputs alone."""
    return not any(n in states or isinstance(getattr(n, "variable", None), nn.Parameter) for n in nodes_of(node, set()))


def _shared(
    record: Recorder, incoming: list[Point], graph: set[Any], terminal: str | None
) -> tuple[frozenset[int], frozenset[int]]:
    """Find the states that are read by others than the (detached) module that they enter, and those read before it."""
    met = {l: point.edge for l, point in enumerate(incoming) if l < len(incoming) - 1 or terminal is not None}
    shared: set[int] = set()
    early: set[int] = set()
    for node in graph:
        if node.name() == CHECKPOINT:  # it holds the state that it hands on
            continue
        for l, edge in met.items():
            if edge is None or (edge.node, edge.output_nr) not in node.next_functions:
                continue
            shared.add(l)
            mark = record.marks.get(l)
            if mark is not None and node._sequence_nr() < mark:
                early.add(l)
    return frozenset(shared), frozenset(early)


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


def _hides_branch(record: Recorder, l: int, name: str, join: Join) -> bool:
    """Tell whether a block adds its input to what it makes of it and returns the sum, its branch nowhere to be seen.

    Where there is no other skip, an addition anywhere in the block counts of which one side is the input by a path
    without parameters and the other depends on it: h + f(h), relu(h + f(h)), norm(h + f(h)). Where the skip is outside,
    such sums belong to the branch, but for h + f(h) itself.
    """
    if record.branches[l] is None:  # a submodule 'branch' that is not called
        return True
    start, end = record.fed.get(l), record.outputs[l].edge
    if branch_of(record.blocks[name]) is not record.blocks[name] or start is None or start.edge is None or end is None:
        return False
    leaf = start.edge.node
    nodes = nodes_of(end.node, {leaf})
    depending = _climb(leaf, nodes, lambda node: True)
    plain = _climb(leaf, nodes, lambda node: all(_is_constant(n, depending) or n in depending for n in _before(node)))
    sums = [node for node in nodes if node.name() == "AddBackward0" and len(depending & {*_before(node)}) > 1]
    if join == "skip":
        sums = [node for node in sums if node is end.node]
        plain = {leaf}
    return any(n in plain for node in sums for n in _before(node))


def _before(node: Any) -> list[Any]:
    """Return the nodes that a node takes its operands from."""
    return [following for following, _ in node.next_functions if following is not None]


def _climb(start: Any, nodes: set[Any], passes: Callable[[Any], bool]) -> set[Any]:
    """Return the nodes that depend on a node, going up only through those that pass."""
    above: dict[Any, list[Any]] = {}
    for node in nodes - {start}:
        for before in _before(node):
            above.setdefault(before, []).append(node)
    reached, todo = {start}, [start]
    while todo:
        for node in above.get(todo.pop(), []):
            if node not in reached and passes(node):
                reached.add(node)
                todo.append(node)
    return reached


def _is_exact(record: Recorder, l: int, following: Point) -> bool:
    """Tell by the graph whether h_{l+1} is block l's output, or h_l plus it, whatever the values."""
    if following.is_same(record.outputs[l]):
        return True
    edges = (record.incoming[l].edge, record.outputs[l].edge)
    if following.edge is None or None in edges or following.edge.node.name() != "AddBackward0":
        return False
    added = {(node, nr) for node, nr in following.edge.node.next_functions}
    alpha = following.edge.node._saved_alpha  # pyright: ignore[reportAttributeAccessIssue]
    return alpha == 1 and added == {(edge.node, edge.output_nr) for edge in edges if edge is not None}


def _rest_chain(plain: _Plain, record: Recorder, output: Point, terminal: str | None) -> tuple[str, ...] | None:
    """Return the modules from h_L to the output where each takes exactly what the one before gave, and nothing else."""
    if not plain.after:
        return () if output.is_same(record.outputs[-1]) else None
    direct = plain.after[0].name == terminal or (terminal is None and record.incoming[-1].is_same(record.outputs[-1]))
    given = [after.left for after in plain.after]
    taken = [after.entered for after in plain.after]
    links = zip([*taken[1:], plain.output], given, strict=True)
    joined = all(a is not None and b is not None and a.is_same(b) for a, b in links)
    return tuple(after.name for after in plain.after) if direct and joined and taken[0] is not None else None


def _sections(network: nn.Module, blocks: dict[str, nn.Module], stem: Any) -> dict[str, tuple[str, ...]]:
    """Sort the parameters into stem (what h_0 depends on), blocks (their own) and head (the rest)."""
    owner = {p: name for name, block in blocks.items() for p in block.parameters()}
    before = {node.variable for node in nodes_of(stem, set()) if hasattr(node, "variable")}
    sections: dict[str, list[str]] = {"stem": [], **{name: [] for name in blocks}, "head": []}
    for name, parameter in network.named_parameters():
        sections[owner.get(parameter, "stem" if parameter in before else "head")].append(name)
    return {section: tuple(members) for section, members in sections.items()}
