"""The hooks of one call: they meet each state where it enters a module, and put there what is to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from creditscope.calling import (
    RandomState,
    StateFn,
    map_inputs,
    pick_entering,
    pick_input,
    pick_state,
    plain_precision,
    random_state,
    replace_tensor,
    replaced_forward,
)
from creditscope.errors import UsageError

Mode = Literal["local", "exact", "trial"]
CHECKPOINT = "CheckpointFunctionBackward"  # the node of torch's reentrant activation checkpointing


@dataclass
class Point:
    """A place in the graph as it was when the forward passed it; later writes into the tensor do not move it."""

    tensor: Tensor
    version: int
    edge: GradientEdge | None

    @classmethod
    def at(cls, tensor: Tensor) -> Point:
        """Take hold of a tensor's present place in the graph."""
        return cls(tensor, tensor._version, get_gradient_edge(tensor) if tensor.requires_grad else None)

    def is_same(self, other: Point) -> bool:
        """Tell whether two places are one: the same memory, not written to in between."""
        a, b = self.tensor, other.tensor
        same_memory = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        return same_memory and self.version == other.version

    def is_edge_of(self, other: Point) -> bool:
        """Tell whether two places receive the very same gradient."""
        a, b = self.edge, other.edge
        return a is not None and b is not None and a.node is b.node and a.output_nr == b.output_nr


def nodes_of(start: Any, stop: set[Any]) -> set[Any]:
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


def holds_checkpoint(start: Any, stop: Any = None) -> bool:
    """Tell whether a reentrant checkpoint lies between a node and another (or its beginnings)."""
    return any(node.name() == CHECKPOINT for node in nodes_of(start, {stop}) - {stop})


def branch_of(block: nn.Module) -> nn.Module:
    """Return the module whose output is the branch f_l: the block's submodule ``branch``, or the block itself."""
    branch = getattr(block, "branch", None)
    return branch if isinstance(branch, nn.Module) else block


class _Alias(torch.autograd.Function):
    """The same memory with a place of its own in the graph, so that it can be written into."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, h: Tensor) -> Tensor:
        return h.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class Recorder:
    """The hooks of one call. ``local`` cuts the graph at each state; ``exact`` leaves it whole and only listens;
    ``trial`` cuts it to see what depends on what, before it is known where h_L is.

    Hooks stay until the backward pass is over, since activation checkpointing calls the blocks again in it; such a
    second call is cut in the same way and recorded nowhere. Between the two the hooks rest: a rule may run the network
    as often as it likes while its tape waits for the credits.
    """

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        *,
        terminal: tuple[str, nn.Module] | None,
        state: StateFn | None,
        copied: frozenset[int] = frozenset(),
        rewritten: frozenset[int] = frozenset(),
        reentrant: frozenset[int] = frozenset(),
        recomputes: bool = False,
        shared: frozenset[int] = frozenset(),
        mode: Mode = "local",
        leaf: bool = False,
        forwards: dict[str, Callable] | None = None,
        keep_calls: bool = False,
    ):
        self.blocks, self.terminal, self.state, self.mode = blocks, terminal, state, mode
        self.rewritten, self.reentrant, self.recomputes = rewritten, reentrant, recomputes
        self.copied, self.leaf, self.forwards, self.keep_calls = copied, leaf, forwards or {}, keep_calls
        self.shared = shared
        self.depth = len(blocks)
        self.incoming: list[Point] = []
        self.states: list[Tensor] = []
        self.outputs: list[Point] = []
        self.branches: list[Point | None] = [None] * self.depth
        self.returned: list[Any] = []
        self.calls: list[tuple[tuple, dict, Tensor]] = []
        self.rng: list[RandomState] = []
        self.arrivals: list[Tensor | None] = [None] * (self.depth + 1)
        self.credits: list[Tensor | None] | None = None
        self.fed: dict[int, Point] = {}
        self.marks: dict[int, int] = {}
        self.wants: list[bool] = []
        self.finished = False
        self.recomputing = False
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            for l, (name, block) in enumerate(self.blocks.items()):
                if name in self.forwards:
                    stack.enter_context(replaced_forward(block, self.forwards[name]))
                stack.callback(block.register_forward_pre_hook(self._entering(l, name), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leaving(l, name), with_kwargs=True).remove)
                if (branch := branch_of(block)) is not block:
                    stack.callback(branch.register_forward_hook(self._branching(l)).remove)
            if self.terminal is not None:
                name, module = self.terminal
                hook = self._entering(self.depth, name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- states --------------------------------------------------------------------------------------------------

    def _entering(self, l: int, name: str) -> Callable:
        """Make the hook that meets state l where it enters a module."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if self.finished and not self.recomputing:
                return None
            at_head = l == self.depth
            if at_head and not self.finished and (len(self.outputs) < l or len(self.incoming) > l):
                return None  # a head module that also serves elsewhere
            where = f"what enters '{name}'"
            h = (pick_entering if at_head else pick_input)(args, kwargs, self.state, where)
            fed = self._again(l, name, h) if len(self.incoming) > l else self._meet(l, name, h, args, kwargs)
            return replace_tensor((args, kwargs), h, fed, where)

        return hook

    def _leaving(self, l: int, name: str) -> Callable:
        """Make the hook that meets block l's output, which for the last block may be the state h_L itself."""

        def hook(module: nn.Module, args: tuple, kwargs: dict, value: Any) -> Any:
            if self.finished and not self.recomputing:
                return None
            where = f"what block '{name}' returns"
            out = pick_state(value, self.state, where)
            ends = l == self.depth - 1 and self.terminal is None and self.mode != "trial"
            if len(self.outputs) > l:
                return replace_tensor(value, out, self._again(self.depth, name, out), where) if ends else None
            self.outputs.append(Point.at(out))
            if branch_of(module) is module:
                self._take_branch(l, self.outputs[l])
            if self.keep_calls:
                self.returned.append(map_inputs(value, lambda t: t.detach().clone()))
            if not ends:
                return None
            return replace_tensor(value, out, self._meet(self.depth, name, out, (), {}), where)

        return hook

    def _branching(self, l: int) -> Callable:
        """Make the hook that meets the branch f_l which a block exposes as its submodule ``branch``."""

        def hook(module: nn.Module, args: tuple, value: Any) -> None:
            if self.branches[l] is None:
                self._take_branch(l, Point.at(pick_state(value, None, "the branch")))

        return hook

    def _take_branch(self, l: int, point: Point) -> None:
        """Record the branch f_l, and its value apart from it where it will be written into."""
        self.branches[l] = replace(point, tensor=point.tensor.clone()) if l in self.rewritten else point

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Cut what activation checkpointing computes again inside; in the precision that the forward chose."""
        self.recomputing = True
        try:
            with plain_precision(self.states[-1]):
                yield
        finally:
            self.recomputing = False

    def _again(self, l: int, name: str, h: Tensor) -> Tensor:
        """A module called again: by activation checkpointing during the backward pass, or wrongly."""
        if not self.finished:
            raise UsageError(f"block '{name}' is used twice in one forward: its credit would be ambiguous")
        # a reentrant checkpoint hands on a copy of its own, and its gradient is replaced where it arrives
        return h if self.mode == "exact" or l in self.reentrant else h.detach().requires_grad_(self.wants[l])

    def _meet(self, l: int, name: str, h: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """Record state l and return what is fed in its place."""
        if l != len(self.incoming):
            raise UsageError(f"'{name}' was called out of order: state {len(self.incoming)} was expected, not {l}")
        followed = self.mode == "exact" or (self.leaf and l == self.depth)
        if followed and torch.is_grad_enabled() and not h.requires_grad:
            self._follow(l, h)
        self.incoming.append(Point.at(h))
        self.states.append(h.detach().clone() if l in self.copied else h.detach())
        if self.keep_calls:
            self.calls.append((args, kwargs, h))
            self.rng.append(random_state(h.device))
        if h.requires_grad and self._receives(l, followed):
            self._stack.callback(h.register_hook(lambda g: self._arrive(l, g)).remove)
        fed = h if followed else self._cut_off(l, h)
        self.wants.append(fed.requires_grad)
        return fed

    def _receives(self, l: int, followed: bool) -> bool:
        """Tell whether a gradient can arrive at state l, which was cut off from the module that it enters."""
        if self.mode == "local":
            return followed or l in self.shared or l in self.reentrant
        return self.mode == "exact" and self.recomputes

    def _cut_off(self, l: int, h: Tensor) -> Tensor:
        """Return the state without its past; where it is written into, the skip around sees that as it would uncut."""
        if self.mode == "trial":
            start = torch.zeros((), requires_grad=True)
            fed = _Alias.apply(start, h.detach()) if l in self.copied else h.detach().requires_grad_()
            assert isinstance(fed, Tensor)
            if torch.is_grad_enabled():
                self.fed[l] = Point.at(fed)
                node = start.clone().grad_fn
                assert node is not None
                self.marks[l] = node._sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
            return fed
        if l in self.copied:
            return h.detach()
        return h.detach().requires_grad_() if self.recomputes and torch.is_grad_enabled() else self.states[l]

    def _follow(self, l: int, h: Tensor) -> None:
        """Let gradients reach a state that no parameter made, and put it back as it was."""
        if l in self.copied:  # a leaf could not be written into; h − 0 is h to the bit, a leaf no more
            h.sub_(torch.zeros((), dtype=h.dtype, device=h.device, requires_grad=True))
            return
        h.requires_grad_()

        def put_back() -> None:
            h.grad = None
            h.requires_grad_(False)

        self._stack.callback(put_back)

    def gradients(self, total: Tensor) -> list[Tensor | None]:
        """Return the gradient at each state; nothing is accumulated, but where a reentrant checkpoint needs it."""
        if self.recomputes:
            total.backward()
            return self.arrivals
        edges = {l: point.edge for l, point in enumerate(self.incoming) if point.edge is not None}
        found = torch.autograd.grad(total, [*edges.values()], allow_unused=True)
        return [dict(zip(edges, found, strict=True)).get(l) for l in range(len(self.incoming))]

    def _arrive(self, l: int, gradient: Tensor) -> Tensor | None:
        """What a gradient arriving at state l becomes: recorded (exact), or the state's credit (local)."""
        if self.mode == "exact":
            self.arrivals[l] = gradient
        if self.mode == "exact" or self.credits is None:  # g_L is asked for before there are credits
            return None
        credit = self.credits[l]
        return torch.zeros_like(gradient) if credit is None else credit
