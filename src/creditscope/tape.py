"""Cut any module at its blocks: record the states, put a credit in place of each state's gradient, replay a tail.

The network is never rewritten. For one call, hooks feed every block a detached copy of its state, so that the
autograd graph falls into segments (stem, blocks, head), and one backward pass through all of them applies every
local update. Where the skip is added outside a block, gradients would still travel along it from state to state:
a tensor hook on each state replaces whatever arrives there by that state's credit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.errors import UsageError, unknown
from creditscope.topology import (
    Inputs,
    Point,
    StateFn,
    Topology,
    branch_of,
    call,
    copied_buffers,
    copied_input,
    describe,
    find_blocks,
    gradients_of,
    holds_checkpoint,
    map_inputs,
    pick_entering,
    pick_input,
    pick_state,
    refuse_compiled,
    repeat_batch,
    replace_tensor,
    undisturbed,
)

if TYPE_CHECKING:
    from creditscope.replay import Replay

LossFn = Callable[[Tensor, Any], Tensor]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """ℓᵢ = −log softmax(outputᵢ)[yᵢ], per example and in at least float32."""
    return F.cross_entropy(
        output.float() if output.dtype in (torch.bfloat16, torch.float16) else output, y, reduction="none"
    )


def per_example(loss: LossFn, output: Tensor, y: Any) -> Tensor:
    """Return the loss of each example, or say that ``loss`` does not give one."""
    losses = loss(output, y)
    if not isinstance(losses, Tensor) or losses.shape != output.shape[:1]:
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(f"loss(output, y) must give one value per example, shape ({output.shape[0]},); it gave {got}")
    return losses


Mode = Literal["local", "exact", "trial"]


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


class _Alias(torch.autograd.Function):
    """The same memory with a place of its own in the graph, so that it can be written into."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, h: Tensor) -> Tensor:
        return h.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


RandomState = tuple[Tensor, Tensor | None]


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
    """How the network is put together in its present mode."""
    forwards: dict[str, Callable] = field(default_factory=dict)
    """Compiled forwards of blocks, in place for the duration of a call."""
    topologies: dict[bool, Topology] = field(default_factory=dict)
    """By mode: what is written in place, or comes between blocks, in training mode may do nothing in evaluation."""

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
                raise unknown("head", head, [name for name in modules if name])
        return cls(network, found, head, state, loss or cross_entropy)

    @property
    def depth(self) -> int:
        """The number of blocks L; there are L + 1 states."""
        return len(self.blocks)

    def settle(self, x: Inputs) -> Topology:
        """Find out how the network is put together, once a mode."""
        if any(module._compiled_call_impl is not None for module in (self.network, *self.blocks.values())):
            refuse_compiled(self.network, self.blocks)
        training = self.network.training
        if training not in self.topologies:
            topology = describe(self.network, self.blocks, x, head=self.head, state=self.state)
            if self.bypass and topology.packed:
                raise UsageError(f"block '{topology.packed[0]}' returns more than a tensor, so it cannot be left out")
            if self.bypass and topology.shapes[0] != topology.shapes[-1]:
                raise UsageError(
                    f"without its blocks the network does not fit: h_0 is {tuple(topology.shapes[0])}, the head takes "
                    f"{tuple(topology.shapes[-1])}"
                )
            self.topologies[training] = topology
        self.topology = self.topologies[training]
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
            rewritten=self.topology.rewritten,
            reentrant=self.topology.reentrant,
            recomputes=self.topology.recomputes,
            shared=self.topology.shared,
            mode=mode,
            leaf=leaf,
            forwards=self.bypasses() if self.bypass else self.forwards,
            keep_calls=keep_calls,
        )

    def bypasses(self) -> dict[str, Callable]:
        """Return forwards that leave the blocks out: zero for a branch, the state itself for a whole block."""
        assert self.topology is not None
        wanted = bool(self.topology.reentrant)  # a reentrant checkpoint asks for an output that requires a gradient

        def without(join: str) -> Callable:
            def forward(*args: Any, **kwargs: Any) -> Any:
                h = pick_input(args, kwargs, self.state, "what enters a block")
                return torch.zeros_like(h, requires_grad=wanted and h.requires_grad) if join == "skip" else h

            return forward

        return {name: without(join) for name, join in zip(self.blocks, self.topology.joins, strict=True)}

    def forward(self, x: Inputs) -> Any:
        """Run the network as it is (or without its blocks, for the shallow baseline)."""
        with self.running(x) as output:
            return output

    @contextmanager
    def running(self, x: Inputs) -> Iterator[Any]:
        """Run the network; the backward pass belongs inside, where checkpoints call what they called in the forward."""
        with ExitStack() as stack:
            if self.bypass:
                self.settle(x)
            for name, forward in (self.bypasses() if self.bypass else self.forwards).items():
                stack.enter_context(replaced_forward(self.blocks[name], forward))
            yield call(self.network, x)

    @contextmanager
    def tape(self, x: Inputs, y: Any, *, leaf: bool = False, replayed: bool = False) -> Iterator[Tape]:
        """Run forward cut at every state; the backward pass belongs inside the context.

        ``leaf`` makes h_L a leaf, so that its exact gradient can be taken through the head alone. ``replayed`` keeps
        what a replay with the same draws needs: the input, which the forward may write into, and the random state.
        """
        self.settle(x)
        start, own = None, x
        if replayed:
            device = next((p.device for p in self.network.parameters()), torch.device("cpu"))
            start, own = random_state(device), map_inputs(x, torch.Tensor.clone)
        with torch.enable_grad(), self.recorder("local", leaf=leaf) as record:
            output = pick_state(call(self.network, x), None, "the network's output")
            self._check_fired(record)
            yield Tape(self, record, output, y, own, start)

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

        Gradients are taken at the places where the states were met, by which blocks that write into their input are
        measured as well. Parameters are switched off meanwhile, but where a state is read before it is met.
        """
        topology = self.settle(x)
        # a leaf cannot be written into; a checkpoint wants a graph; what is read early must have one from the start
        copied = topology.mutated or topology.recomputes or topology.early
        own = map_inputs(x, copied_input if copied else torch.Tensor.detach)
        wanted = gradients_of([*self.network.parameters()], bool(topology.early) and not topology.recomputes)
        with undisturbed(self.network), wanted, torch.enable_grad(), self.recorder("exact") as record:
            output = pick_state(call(self.network, own), None, "the network's output")
            self._check_fired(record)
            losses = per_example(self.loss, output, y)
            if not losses.requires_grad:
                raise UsageError("the loss does not depend on any state by autograd, so there is no exact credit")
            with record.backward_pass():
                found = record.gradients(losses.sum())
        both = zip(record.states, found, strict=True)
        gradients = [torch.zeros_like(h) if g is None else g.detach() for h, g in both]
        return Exact(record.states, gradients, output.detach(), losses.detach())

    def states(self, x: Inputs) -> tuple[list[Tensor], Tensor]:
        """Return the states h_0..h_L and the output, detached, touching nothing."""
        self.settle(x)
        with undisturbed(self.network), torch.no_grad(), self.recorder("local") as record:
            output = pick_state(call(self.network, x), None, "the network's output")
            self._check_fired(record)
        return record.states, output

    def _check_fired(self, record: Recorder) -> None:
        """Every hook must have been called; what is compiled drops hooks without a word."""
        record.finished = True
        if len(record.states) != self.depth + 1:
            where = [*self.blocks, self.topology.terminal if self.topology else None][len(record.states)]
            raise UsageError(
                f"'{where}' was not called by the network's forward (inside something compiled it would be hidden: use "
                "learner.compile() instead)"
            )

    def astype(self, dtype: torch.dtype) -> Cut:
        """Return the same cut on a copy of the network in another precision."""
        network = copy.deepcopy(self.network).to(dtype)
        modules = dict(network.named_modules(remove_duplicate=False))
        blocks = {name: modules[name] for name in self.blocks}
        twin = Cut(network, blocks, self.head, self.state, self.loss, self.bypass, self.topology)
        twin.topologies.update(self.topologies)
        return twin

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
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _times(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Multiply all tensors by one factor, in one launch where the device allows it."""
    multiply: Callable[..., Sequence[Tensor]] = torch._foreach_mul  # pyright: ignore[reportPrivateImportUsage]
    return [*multiply(tensors, factor)] if tensors else []


@dataclass
class Tape:
    """One forward pass cut at its states, waiting for its credits."""

    cut: Cut
    record: Recorder
    output: Tensor
    y: Any
    x: Inputs
    start: RandomState | None = None
    """The random state before the forward pass, where a replay is to draw the same."""

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
        if not total.requires_grad:
            raise UsageError("the loss does not depend on the output by autograd, so there is no error to send back")
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
        edge = self.record.incoming[-1].edge
        if not self.output.requires_grad or edge is None:
            return torch.zeros_like(self.states[-1])
        if self.record.recomputes and holds_checkpoint(self.output.grad_fn, edge.node):
            raise UsageError(
                "g_L cannot be taken through a reentrant checkpoint in the head: pass it use_reentrant=False"
            )
        with self.record.backward_pass():
            (gradient,) = torch.autograd.grad(self.output, [edge], self.errors, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.states[-1]) if gradient is None else gradient

    @cached_property
    def replay(self) -> Replay:
        """The same pass recorded once more, to run the network again from any of its states."""
        from creditscope.replay import Replay

        with plain_precision(self.output):
            return Replay.of(self.cut, self.x, self.y, self.start)

    def head(self, h: Tensor) -> Tensor:
        """Return the outputs with h in place of h_L, for n·B examples n batches one after the other.

        They are differentiable in h alone, and no buffer changes. Where modules that follow each other lead from h_L
        to the output, these alone are run (in training mode with dropout masks and batch statistics of their own);
        otherwise the whole forward is replayed, its blocks answering from memory.
        """
        topology, network = self.cut.topology, self.cut.network
        assert topology is not None
        with gradients_of([*network.parameters()], False):
            if topology.rest is None:
                return self.replay.output_at(self.cut.depth, h)
            h = h.clone() if self.cut.depth in topology.mutated else h
            for module in map(network.get_submodule, topology.rest):
                with copied_buffers(module):
                    h = pick_state(module(h), None, "what a module of the head returns")
        return h

    def head_losses(self, h: Tensor) -> Tensor:
        """ℓᵢ with h in place of h_L, (n·B,), as :meth:`head`."""
        output = self.head(h)
        losses = per_example(self.cut.loss, output, repeat_batch(self.y, self.batch, len(output) // self.batch))
        if h.requires_grad and not losses.requires_grad:
            raise UsageError("the loss does not depend on h_L by autograd, so no credit can come back through the head")
        return losses

    def backward(
        self, credits: Sequence[Tensor | None], scale: float | Tensor, *, branch: Sequence[Tensor] = ()
    ) -> None:
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
            if point.is_edge_of(self.record.incoming[l + 1]):
                joined[l + 1] = term if arriving is None else arriving + term
            elif point.edge is not None:
                roots.append(point.edge)
                gradients.append((term * factor).to(point.tensor.dtype))
        given = {l: credit for l, credit in enumerate(joined) if credit is not None}
        scaled = _times([*given.values()], factor)
        injected: list[Tensor | None] = [None] * len(joined)
        for l, credit in zip(given, scaled, strict=True):
            point = self.record.incoming[l]
            injected[l] = cast = credit.to(point.tensor.dtype)
            if point.edge is not None:
                roots.append(point.edge)
                gradients.append(cast)
        if self.output.requires_grad:
            roots.append(self.output)
            gradients.append((self.errors * factor).to(self.output.dtype))
        self.record.credits = injected
        if roots:
            with self.record.backward_pass():
                torch.autograd.backward(roots, gradients)
