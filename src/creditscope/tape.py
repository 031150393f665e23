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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.calling import (
    Inputs,
    RandomState,
    StateFn,
    call,
    copied_buffers,
    copied_input,
    gradients_of,
    map_inputs,
    pick_input,
    pick_state,
    plain_precision,
    random_state,
    repeat_batch,
    replaced_forward,
    undisturbed,
)
from creditscope.errors import UsageError, unknown
from creditscope.recorder import Mode, Recorder, holds_checkpoint
from creditscope.topology import Topology, describe, find_blocks, refuse_compiled

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
    direct: dict[bool, bool] = field(default_factory=dict)
    """By mode: whether a replay may run blocks and head by themselves; found out by the first."""

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
        if torch.is_inference_mode_enabled():
            raise UsageError("torch.inference_mode() keeps no graph, which a cut needs: use torch.no_grad()")
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
