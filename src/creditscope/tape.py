"""Cut any module at its blocks: record the states, put a credit in place of each state's gradient, replay a tail.

The network is never rewritten. For one call, hooks feed every block a detached copy of its state, so that the
autograd graph falls into segments (stem, blocks, head), and one backward pass through all of them applies every
local update. Where the skip is added outside a block, gradients would still travel along it from state to state:
a tensor hook on each state replaces whatever arrives there by that state's credit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from creditscope.errors import UsageError
from creditscope.topology import (
    Inputs,
    StateFn,
    Topology,
    call,
    describe,
    find_blocks,
    first_tensor,
    gradients_of,
    map_inputs,
    pick_input,
    pick_state,
    replace_tensor,
    undisturbed,
)

LossFn = Callable[[Tensor, Any], Tensor]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """ℓᵢ = −log softmax(outputᵢ)[yᵢ], per example and in at least float32."""
    return F.cross_entropy(output.float() if output.dtype in (torch.bfloat16, torch.float16) else output, y, reduction="none")


def per_example(loss: LossFn, output: Tensor, y: Any) -> Tensor:
    """Return the loss of each example, or say that ``loss`` does not give one."""
    losses = loss(output, y)
    if not isinstance(losses, Tensor) or losses.shape != output.shape[:1]:
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(f"loss(output, y) must give one value per example, shape ({output.shape[0]},); it gave {got}")
    return losses


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


Mode = Literal["local", "exact", "trial"]


class Recorder:
    """The hooks of one call. ``local`` cuts the graph at each state; ``exact`` leaves it whole and only listens;
    ``trial`` cuts it to see what depends on what, before it is known where h_L is.

    Hooks stay until the backward pass is over, since activation checkpointing calls the blocks again; such a second
    call is cut in the same way and recorded nowhere.
    """

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        *,
        terminal: tuple[str, nn.Module] | None,
        state: StateFn | None,
        copied: frozenset[int] = frozenset(),
        mode: Mode = "local",
        leaf: bool = False,
        forwards: dict[str, Callable] | None = None,
        keep_calls: bool = False,
    ):
        self.blocks, self.terminal, self.state, self.mode = blocks, terminal, state, mode
        self.copied, self.leaf, self.forwards, self.keep_calls = copied, leaf, forwards or {}, keep_calls
        self.depth = len(blocks)
        self.incoming: list[Point] = []
        self.states: list[Tensor] = []
        self.outputs: list[Point] = []
        self.branches: list[Point | None] = [None] * self.depth
        self.inner_skip: list[bool] = []
        self.returned: list[Any] = []
        self.calls: list[tuple[tuple, dict, Tensor]] = []
        self.rng: list[tuple[Tensor, Tensor | None]] = []
        self.arrivals: list[Tensor | None] = [None] * (self.depth + 1)
        self.credits: list[Tensor | None] | None = None
        self.fed: dict[int, Tensor] = {}
        self.finished = False
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
            at_head = l == self.depth
            if at_head and not self.finished and (len(self.outputs) < l or len(self.incoming) > l):
                return None  # a head module that also serves elsewhere
            h = pick_input(args, kwargs, self.state, f"what enters '{name}'")
            fed = self._again(l, name, h) if len(self.incoming) > l else self._meet(l, name, h, args, kwargs)
            if fed is h:
                return None
            return replace_tensor(args, h, fed), replace_tensor(kwargs, h, fed)

        return hook

    def _leaving(self, l: int, name: str) -> Callable:
        """Make the hook that meets block l's output, which for the last block may be the state h_L itself."""

        def hook(module: nn.Module, args: tuple, kwargs: dict, value: Any) -> Any:
            out = pick_state(value, self.state, f"what block '{name}' returns")
            ends = l == self.depth - 1 and self.terminal is None and self.mode != "trial"
            if len(self.outputs) > l:
                return replace_tensor(value, out, self._again(self.depth, name, out)) if ends else None
            self.outputs.append(Point.at(out))
            if branch_of(module) is module:
                self.branches[l] = self.outputs[l]
            if self.mode == "trial":
                self.inner_skip.append(adds_input(out, self.fed.get(l)))
            if self.keep_calls:
                self.returned.append(map_value(value, lambda t: t.detach().clone()))
            if not ends:
                return None
            fed = self._meet(self.depth, name, out, (), {})
            return None if fed is out else replace_tensor(value, out, fed)

        return hook

    def _branching(self, l: int) -> Callable:
        """Make the hook that meets the branch f_l which a block exposes as its submodule ``branch``."""

        def hook(module: nn.Module, args: tuple, value: Any) -> None:
            if self.branches[l] is None:
                self.branches[l] = Point.at(pick_state(value, None, "the branch"))

        return hook

    def _again(self, l: int, name: str, h: Tensor) -> Tensor:
        """A module called again: by activation checkpointing during the backward pass, or wrongly."""
        if not self.finished:
            raise UsageError(f"block '{name}' is used twice in one forward: its credit would be ambiguous")
        return h if self.mode == "exact" else h.detach()

    def _meet(self, l: int, name: str, h: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """Record state l and return what is fed in its place."""
        if l != len(self.incoming):
            raise UsageError(f"'{name}' was called out of order: state {len(self.incoming)} was expected, not {l}")
        if self.mode == "exact" and not h.requires_grad and torch.is_grad_enabled():
            h.requires_grad_()  # a leaf of ours: the parameters are off and the inputs are copies
            self._stack.callback(h.requires_grad_, False)
        self.incoming.append(Point.at(h))
        self.states.append(h.detach().clone() if l in self.copied else h.detach())
        if self.keep_calls:
            self.calls.append((args, kwargs, h))
            self.rng.append(random_state(h.device))
        if h.requires_grad:
            self._stack.callback(h.register_hook(lambda g: self._arrive(l, g)).remove)
        if self.mode == "exact":
            return h
        if l in self.copied:
            return h.detach()  # shares memory: what is written into it is seen where the skip reads it, as uncut
        if self.mode == "trial" or (l == self.depth and self.leaf):
            self.fed[l] = h.detach().requires_grad_(torch.is_grad_enabled())
            return self.fed[l]
        return self.states[l]

    def _arrive(self, l: int, gradient: Tensor) -> Tensor | None:
        """What a gradient arriving at state l becomes: recorded (exact), or the state's credit (local)."""
        if self.mode == "exact":
            self.arrivals[l] = gradient
            return None
        credit = self.credits[l] if self.credits else None
        return torch.zeros_like(gradient) if credit is None else credit


def branch_of(block: nn.Module) -> nn.Module:
    """Return the module whose output is the branch f_l: the block's submodule ``branch``, or the block itself."""
    branch = getattr(block, "branch", None)
    return branch if isinstance(branch, nn.Module) else block


def adds_input(out: Tensor, fed: Tensor | None) -> bool:
    """Tell whether a block adds its own input to what it returns (a skip inside the block)."""
    if out.grad_fn is None or fed is None or not fed.requires_grad:
        return False
    leaf = get_gradient_edge(fed).node
    todo = [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is leaf:
            return True
        if node is not None and node.name() == "AddBackward0":
            todo += [following for following, _ in node.next_functions]
    return False


def map_value(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a value, keeping its containers."""
    if isinstance(value, list):
        return [map_value(part, change) for part in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_value(part, change) for part in value))
    if isinstance(value, dict) and type(value) is not dict:
        return type(value)(**{key: map_value(part, change) for key, part in value.items()})
    return map_inputs(value, change)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of the generators that a module on this device draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
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


@dataclass(eq=False)
class Cut:
    """A network, where to cut it, and its loss: everything a rule or an audit needs to know of it."""

    network: nn.Module
    blocks: dict[str, nn.Module]
    head: str | None
    state: StateFn | None
    loss: LossFn
    bypass: bool = False
    """Leave the blocks out: h_0 goes straight to the head (the shallow baseline)."""
    topology: Topology | None = None
    forwards: dict[str, Callable] = field(default_factory=dict)
    """Compiled forwards of blocks, in place for the duration of a call."""

    @classmethod
    def of(
        cls,
        network: nn.Module,
        *,
        blocks: Sequence[str] | None = None,
        head: str | None = None,
        state: StateFn | None = None,
        loss: LossFn | None = None,
    ) -> Cut:
        """Check the names and make the cut; shapes and joins are found at the first call."""
        found = find_blocks(network, blocks)
        own = blocks is None or list(blocks) == list(getattr(network, "credit_blocks", ()))
        head = head if head is not None or not own else getattr(network, "credit_head", None)
        if head is not None:
            modules = dict(network.named_modules(remove_duplicate=False))
            if head not in modules:
                from creditscope.errors import unknown

                raise unknown("head", head, [name for name in modules if name])
        return cls(network, found, head, state, loss or cross_entropy)

    @property
    def depth(self) -> int:
        """The number of blocks L; there are L + 1 states."""
        return len(self.blocks)

    def settle(self, x: Inputs) -> Topology:
        """Find out how the network is put together, once."""
        if self.topology is None:
            topology = describe(self.network, self.blocks, x, head=self.head, state=self.state)
            if self.bypass and topology.shapes[0] != topology.shapes[-1]:
                raise UsageError(
                    f"without its blocks the network does not fit: h_0 is {tuple(topology.shapes[0])}, the head takes "
                    f"{tuple(topology.shapes[-1])}"
                )
            self.topology = topology
        return self.topology

    def recorder(self, mode: Mode, *, leaf: bool = False, keep_calls: bool = False) -> Recorder:
        """Make the hooks of one call."""
        assert self.topology is not None
        name = self.topology.terminal
        return Recorder(
            self.blocks,
            terminal=(name, self.network.get_submodule(name)) if name else None,
            state=self.state,
            copied=self.topology.mutated,
            mode=mode,
            leaf=leaf,
            forwards=self.bypasses() if self.bypass else self.forwards,
            keep_calls=keep_calls,
        )

    def bypasses(self) -> dict[str, Callable]:
        """Return forwards that leave the blocks out: zero for a branch, the state itself for a whole block."""
        assert self.topology is not None

        def without(join: str) -> Callable:
            def forward(*args: Any, **kwargs: Any) -> Any:
                h = pick_input(args, kwargs, self.state, "what enters a block")
                return torch.zeros_like(h) if join == "skip" else h

            return forward

        return {name: without(join) for name, join in zip(self.blocks, self.topology.joins, strict=True)}

    def forward(self, x: Inputs) -> Any:
        """Run the network as it is (or without its blocks, for the shallow baseline)."""
        with ExitStack() as stack:
            if self.bypass:
                self.settle(x)
            for name, forward in (self.bypasses() if self.bypass else self.forwards).items():
                stack.enter_context(replaced_forward(self.blocks[name], forward))
            return call(self.network, x)

    @contextmanager
    def tape(self, x: Inputs, y: Any, *, leaf: bool = False) -> Iterator[Tape]:
        """Run forward cut at every state; the backward pass belongs inside the context.

        ``leaf`` makes h_L a leaf, so that its exact gradient can be taken through the head alone.
        """
        self.settle(x)
        with torch.enable_grad(), self.recorder("local", leaf=leaf) as record:
            output = pick_state(call(self.network, x), None, "the network's output")
            self._check_fired(record)
            yield Tape(self, record, output, y)

    @contextmanager
    def whole(self, x: Inputs) -> Iterator[tuple[Recorder, Tensor]]:
        """Run forward uncut, with the branches recorded and differentiable."""
        self.settle(x)
        with torch.enable_grad(), self.recorder("exact") as record:
            output = pick_state(call(self.network, x), None, "the network's output")
            self._check_fired(record)
            yield record, output

    def exact(self, x: Inputs, y: Any) -> Exact:
        """Return the states and their exact credits g_l = ∂(Σᵢ ℓᵢ)/∂h_l, by autograd, touching nothing.

        Parameters are switched off meanwhile, so no ``.grad`` is written; gradients are caught where they arrive, by
        which blocks under activation checkpointing, and blocks that write into their input, are measured as well.
        """
        topology = self.settle(x)
        own = map_inputs(x, lambda t: t.detach())
        if topology.mutated or topology.reentrant:  # a leaf cannot be written into; a checkpoint wants a graph
            own = map_inputs(own, lambda t: t.clone().requires_grad_().clone() if t.is_floating_point() else t)
        with gradients_of(list(self.network.parameters()), False), torch.enable_grad(), self.recorder("exact") as record:
            output = pick_state(call(self.network, own), None, "the network's output")
            self._check_fired(record)
            losses = per_example(self.loss, output, y)
            if not losses.requires_grad:
                raise UsageError("the loss does not depend on any state by autograd, so there is no exact credit")
            with plain_precision(output):
                losses.sum().backward()
        gradients = [
            torch.zeros_like(h) if g is None else g.detach() for h, g in zip(record.states, record.arrivals, strict=True)
        ]
        return Exact(record.states, gradients, output.detach(), losses.detach())

    def states(self, x: Inputs) -> tuple[list[Tensor], Tensor]:
        """Return the states h_0..h_L and the output, detached."""
        self.settle(x)
        with torch.no_grad(), self.recorder("local") as record:
            output = pick_state(call(self.network, x), None, "the network's output")
            self._check_fired(record)
        return record.states, output

    def _check_fired(self, record: Recorder) -> None:
        """Every hook must have been called: a compiled network drops hooks without a word."""
        record.finished = True
        if len(record.states) != self.depth + 1:
            where = [*self.blocks, self.topology.terminal if self.topology else None][len(record.states)]
            raise UsageError(
                f"'{where}' was not called by the network's forward (a network compiled before it was cut hides its "
                "blocks: leave it uncompiled and use learner.compile())"
            )

    def astype(self, dtype: torch.dtype) -> Cut:
        """Return the same cut on a copy of the network in another precision."""
        network = copy.deepcopy(self.network).to(dtype)
        modules = dict(network.named_modules(remove_duplicate=False))
        blocks = {name: modules[name] for name in self.blocks}
        return Cut(network, blocks, self.head, self.state, self.loss, self.bypass, self.topology)

    def replay(self, x: Inputs, y: Any) -> Replay:
        """Run once and keep what is needed to replay the network from any of its states."""
        from creditscope.replay import Replay

        return Replay.of(self, x, y)


@dataclass(frozen=True)
class Exact:
    """The reference: states, exact credits (per example, of the summed loss), output and loss per example."""

    states: list[Tensor]
    gradients: list[Tensor]
    output: Tensor
    losses: Tensor


def plain_precision(tensor: Tensor) -> Any:
    """Switch autocast off: backward passes run in the precision that the forward chose."""
    return torch.autocast(tensor.device.type, enabled=False)


@dataclass
class Tape:
    """One forward pass cut at its states, waiting for its credits."""

    cut: Cut
    record: Recorder
    output: Tensor
    y: Any

    @property
    def states(self) -> list[Tensor]:
        """The states h_0..h_L, detached."""
        return self.record.states

    @property
    def batch(self) -> int:
        """The number of examples."""
        return self.output.shape[0]

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor]:
        leaf = self.output.detach().requires_grad_()
        with torch.enable_grad():
            losses = per_example(self.cut.loss, leaf, self.y)
            total = losses.sum()
        with plain_precision(leaf):
            (errors,) = torch.autograd.grad(total, leaf)
        return losses.detach(), errors

    @property
    def losses(self) -> Tensor:
        """ℓᵢ, detached."""
        return self._scored[0]

    @property
    def errors(self) -> Tensor:
        """∂ℓᵢ/∂outputᵢ, shaped like the output; softmax − onehot for cross-entropy."""
        return self._scored[1]

    @cached_property
    def terminal_gradient(self) -> Tensor:
        """g_L = ∂ℓᵢ/∂h_L, exact, through the head alone (a tape made with ``leaf=True``)."""
        if not self.output.requires_grad:
            return torch.zeros_like(self.states[-1])
        with plain_precision(self.output):
            (gradient,) = torch.autograd.grad(
                self.output, self.record.fed[self.cut.depth], self.errors, retain_graph=True, allow_unused=True
            )
        return torch.zeros_like(self.states[-1]) if gradient is None else gradient

    def backward(self, credits: Sequence[Tensor | None], scale: float | Tensor, *, branch: Sequence[Tensor] = ()) -> None:
        """Apply every local update in one backward pass: ``.grad`` += scale × (Σᵢ ⟨·, credit⟩)/B.

        ``credits[l]`` goes in place of the gradient of h_l and so drives the segment that made it; None leaves that
        segment alone. ``branch[l]`` is added at the branch f_l (the penalty's gradient). The head is driven by the
        true loss. The division by the batch size happens here and nowhere else.
        """
        factor = scale / self.batch
        joined = [*credits]
        roots: list[Any] = []
        gradients: list[Tensor] = []
        for l, term in enumerate(branch):
            point = self.record.branches[l]
            assert point is not None
            arriving = joined[l + 1]
            if arriving is not None and point.is_edge_of(self.record.incoming[l + 1]):
                joined[l + 1] = arriving + term
            elif point.edge is not None:
                roots.append(point.edge)
                gradients.append((term * factor).to(point.tensor.dtype))
        given = [l for l, credit in enumerate(joined) if credit is not None]
        scaled = torch._foreach_mul([joined[l] for l in given], factor) if given else []
        injected: list[Tensor | None] = [None] * len(joined)
        for l, credit in zip(given, scaled, strict=True):
            point = self.record.incoming[l]
            injected[l] = credit.to(point.tensor.dtype)
            if point.edge is not None:
                roots.append(point.edge)
                gradients.append(injected[l])
        if self.output.requires_grad:
            roots.append(self.output)
            gradients.append((self.errors * factor).to(self.output.dtype))
        self.record.credits = injected
        if roots:
            with plain_precision(self.output):
                torch.autograd.backward(roots, gradients)
