"""Replay a network from one of its states: the loss per example as a function of h_l, on any topology.

Where every state is exactly the block's output, or exactly the state before plus it, only blocks l.. are run, and
the modules after the last block. Otherwise the whole forward runs again with the earlier blocks answering from
memory and the new value put in place of the state, so whatever the user's forward does in between is done again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from creditscope.calling import (
    Inputs,
    RandomState,
    call,
    map_inputs,
    pick_entering,
    pick_input,
    pick_state,
    random_state,
    repeat_batch,
    replace_tensor,
    replaced_forward,
    set_random_state,
    tensors_of,
    undisturbed,
)
from creditscope.errors import UsageError
from creditscope.tape import Cut, per_example


@dataclass
class Replay:
    """One recorded forward pass, from each of whose states the rest can be run again."""

    cut: Cut
    x: Inputs
    y: Any
    states: list[Tensor]
    output: Tensor
    losses: Tensor
    returned: list[Any]
    calls: list[tuple[tuple, dict, Tensor]]
    rng: list[RandomState]
    start: RandomState
    direct: bool = False
    """Whether blocks l.. and the modules behind them, and nothing else, make the output from state l."""

    @classmethod
    def of(cls, cut: Cut, x: Inputs, y: Any, start: RandomState | None = None) -> Replay:
        """Run the network once, in its present mode, leaving buffers and random states as they are."""
        cut.settle(x)
        own = map_inputs(x, lambda t: t.detach().clone())
        device = next((p.device for p in cut.network.parameters()), torch.device("cpu"))
        with undisturbed(cut.network), torch.no_grad():
            if start is not None:
                set_random_state(start, device)
            start = random_state(device)
            with cut.recorder("local", keep_calls=True) as record:
                output = pick_state(call(cut.network, own), None, "the network's output")
                cut._check_fired(record)
                losses = per_example(cut.loss, output, y)
            replay = cls(cut, x, y, record.states, output, losses, record.returned, record.calls, record.rng, start)
            mode = cut.network.training
            if mode not in cut.direct:  # once, since the device is waited for
                cut.direct[mode] = replay._is_direct()
        replay.direct = cut.direct[mode]
        return replay

    def _is_direct(self) -> bool:
        """Tell whether running the parts by themselves gives the output to the bit; a context around them may not."""
        topology = self.cut.topology
        assert topology is not None
        if not topology.exact_sum or topology.rest is None or self.cut.bypass:
            return False
        set_random_state(self.rng[0], self.output.device)
        return torch.equal(self._chain(0, self.states[0], topology.rest), self.output)

    def tail(self, l: int, h: Tensor) -> Tensor:
        """Return ℓᵢ with h in place of state l, (B,); for h of n·B examples, n replays side by side, (n·B,).

        Runs in the precision of h. Dropout masks are those of the recorded pass where h has its batch size and its
        precision; in another precision they are the same from call to call. It is differentiable in h.
        """
        self._check(l, h)
        if h.dtype != self.states[l].dtype:
            return self.astype(h.dtype).tail(l, h)
        return per_example(self.cut.loss, self.output_at(l, h), self.labels(h))

    def labels(self, h: Tensor) -> Any:
        """Return the labels, repeated as often as h holds the batch."""
        return map_inputs(self.y, lambda t: self._repeat(t, h))

    def output_at(self, l: int, h: Tensor) -> Tensor:
        """Return the network's output with h in place of state l."""
        self._check(l, h)
        if h.dtype != self.states[l].dtype:
            return self.astype(h.dtype).output_at(l, h)
        with undisturbed(self.cut.network):
            set_random_state(self.rng[l], h.device)
            return self._output(l, h)

    def _check(self, l: int, h: Tensor) -> None:
        if not 0 <= l <= self.cut.depth:
            raise UsageError(f"there is no state {l}: the states are 0..{self.cut.depth}")
        expected = self.states[l].shape
        if h.shape[1:] != expected[1:] or not h.shape[0] or h.shape[0] % expected[0]:
            raise UsageError(
                f"state {l} has shape {tuple(expected)}; {tuple(h.shape)} does not fit (a multiple of the batch may "
                "stand first)"
            )

    def astype(self, dtype: torch.dtype) -> Replay:
        """Return the same replay on a copy of the network in another precision, made once."""
        if dtype not in self._copies:
            cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
            x, y = map_inputs(self.x, cast), map_inputs(self.y, cast)
            self._copies[dtype] = Replay.of(self.cut.astype(dtype), x, y, self.start)
        return self._copies[dtype]

    @cached_property
    def _copies(self) -> dict[torch.dtype, Replay]:
        return {}

    def _repeat(self, t: Tensor, h: Tensor) -> Tensor:
        """Repeat what belongs to the batch as often as h holds it."""
        batch = self.output.shape[0]
        return repeat_batch(t, batch, h.shape[0] // batch)

    def _output(self, l: int, h: Tensor) -> Tensor:
        topology = self.cut.topology
        assert topology is not None
        if self.direct and topology.rest is not None and not self._is_ambiguous(h):
            return self._chain(l, h, topology.rest)
        if l in topology.early:
            raise UsageError(
                f"state {l} is read before it enters its module, so no other value can be put there in time; let the "
                "module be called first"
            )
        return self._again(l, h)

    def _is_ambiguous(self, h: Tensor) -> bool:
        """Tell whether n·B examples are asked for of blocks that take something else of B rows: it may be a mask."""
        batch = self.output.shape[0]
        others = (t for args, kwargs, entered in self.calls for t in tensors_of((args, kwargs)) if t is not entered)
        return h.shape[0] != batch and any(t.ndim and t.shape[0] == batch for t in others)

    def _chain(self, l: int, h: Tensor, rest: tuple[str, ...]) -> Tensor:
        """Run blocks l.. and the modules behind them, nothing else."""
        assert self.cut.topology is not None
        blocks = list(self.cut.blocks.values())
        for k in range(l, self.cut.depth):
            args, kwargs, entered = self.calls[k]
            put = lambda t, entered=entered, h=h: h if t is entered else self._repeat(t, h)  # noqa: E731
            args, kwargs = map_inputs((args, kwargs), put)
            value = blocks[k](*args, **kwargs)
            out = pick_state(value, self.cut.state, "what a block returns")
            h = h + out if self.cut.topology.joins[k] == "skip" else out
        h = self._unwritten(self.cut.depth, h)
        for name in rest:
            h = pick_state(self.cut.network.get_submodule(name)(h), None, f"what '{name}' returns")
        return h

    def _again(self, l: int, h: Tensor) -> Tensor:
        """Run the whole forward again, blocks before l answering from memory, state l replaced where it is met."""
        network, depth = self.cut.network, self.cut.depth
        repeat = lambda t: self._repeat(t, h)  # noqa: E731
        topology = self.cut.topology
        assert topology is not None
        modules = list(self.cut.blocks.values())
        with ExitStack() as stack:
            if self.cut.bypass:
                for name, forward in self.cut.bypasses().items():
                    stack.enter_context(replaced_forward(self.cut.blocks[name], forward))
            for k in range(min(l, depth)):
                memory = map_inputs(self.returned[k], lambda t: repeat(t).clone())
                stack.enter_context(replaced_forward(modules[k], lambda *a, memory=memory, **kw: memory))
            if l < depth or topology.terminal is not None:
                at = modules[l] if l < depth else network.get_submodule(str(topology.terminal))
                hook = self._inject_before(l, h, modules[-1], stack)
                stack.callback(at.register_forward_pre_hook(hook, with_kwargs=True).remove)
            else:
                stack.callback(modules[-1].register_forward_hook(self._inject_after(h)).remove)
            own = map_inputs(self.x, lambda t: repeat(t.detach()).clone())
            return pick_state(call(network, own), None, "the network's output")

    def _inject_before(self, l: int, h: Tensor, last: torch.nn.Module, stack: ExitStack) -> Callable:
        """Make the hook that puts h in place of what enters a module, also where a skip around it reads the state."""
        assert self.cut.topology is not None
        shared = l in self.cut.topology.shared
        ready = l < self.cut.depth
        used = False

        def passed(*_: Any) -> None:
            nonlocal ready
            ready = True

        if not ready:  # a head module may have served before the blocks as well
            stack.callback(last.register_forward_hook(passed).remove)

        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            nonlocal used
            if not ready or used:
                return None
            used = True
            pick = pick_input if l < self.cut.depth else pick_entering
            met = pick(args, kwargs, self.cut.state, "what enters a block")
            set_random_state(self.rng[l], h.device)
            if shared:  # the user's own variable has to change, since the skip reads it
                met.copy_(h)
                return None
            return replace_tensor((args, kwargs), met, self._unwritten(l, h), "a block's input")

        return hook

    def _unwritten(self, l: int, h: Tensor) -> Tensor:
        """Return a copy of the caller's value where the network writes into the state."""
        assert self.cut.topology is not None
        return h.clone() if l in self.cut.topology.mutated else h

    def _inject_after(self, h: Tensor) -> Callable:
        """Make the hook that puts h in place of the state in the last block's output."""

        def hook(module: torch.nn.Module, args: tuple, value: Any) -> Any:
            out = pick_state(value, self.cut.state, "what the last block returns")
            set_random_state(self.rng[self.cut.depth], h.device)
            return replace_tensor(value, out, self._unwritten(self.cut.depth, h), "what the last block returns")

        return hook
