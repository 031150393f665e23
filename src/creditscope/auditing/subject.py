"""What is audited: a network, one evaluation set, and the credits or updates that are claimed for it.

A callable of the user's is called exactly once, with x and y as given, in eval mode, with gradients enabled. Whatever
it leaves behind is put back; one that trains the network is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, StateFn, tensors_of
from creditscope.errors import UsageError, unknown
from creditscope.evaluation import evaluating
from creditscope.rules import REGISTRY
from creditscope.rules._base import Learner
from creditscope.tape import Cut, LossFn, cross_entropy

CreditFn = Callable[[Any, Any], Sequence[Tensor | None]]
UpdateFn = Callable[[Any, Any], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Convention:
    """How a credit callable states its credit: of the mean or of the summed loss, along the gradient or against it."""

    reduction: Literal["sum", "mean"] = "sum"
    sign: Literal[1, -1] = 1

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise unknown("convention.reduction", str(self.reduction), ["sum", "mean"])
        if self.sign not in (1, -1):
            raise UsageError(f"convention.sign must be 1 (along the gradient) or -1 (descent), not {self.sign!r}")

    def to_ours(self, credit: Tensor) -> Tensor:
        """Return the credit per example, of the summed loss, along the gradient."""
        factor = self.sign * (credit.shape[0] if self.reduction == "mean" else 1)
        return credit if factor == 1 else credit * factor


@dataclass
class Claim:
    """One credit under audit."""

    name: str
    credits: list[Tensor | None]
    driving: list[int]
    """For each block, the state whose credit drives it."""
    exact: set[int] = field(default_factory=set)
    """States whose credit is exact by construction."""
    learner: Learner | None = None
    trained: tuple[bool, ...] = ()
    """For each block, whether the rule trains it; all, where nothing is known."""

    @property
    def driven(self) -> list[int]:
        """The states whose credit drives a block that is trained."""
        trained = self.trained or (True,) * len(self.driving)
        return sorted({l for l, is_trained in zip(self.driving, trained, strict=True) if is_trained})


@dataclass
class Subject:
    """A network with its claims on one evaluation set."""

    cut: Cut
    x: Inputs
    y: Any
    claims: list[Claim]
    updates: dict[str, Tensor] | None = None
    learner: Learner | None = None
    labelled: bool = False
    """Whether several credits were given, so that results carry a dimension "credit"."""

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self.cut.network

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return self.cut.depth


def batch_of(x: Inputs) -> int:
    """Return the number of examples of an input."""
    if isinstance(x, Tensor):
        return x.shape[0] if x.ndim else 0
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else ()
    return next((n for part in parts if (n := batch_of(part))), 0)


@contextmanager
def preserved(*modules: nn.Module) -> Iterator[list[_Kept]]:
    """Leave modules as they were, whatever happens: parameters, buffers, ``.grad``, modes, hooks, random states.

    Gives the tensors with the values that they will be given back.
    """
    own = [m for module in modules for m in module.modules()]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    before = [_Kept.of(t) for t in tensors.values()]
    attributes = [(vars(m), {key: _shallow(value) for key, value in vars(m).items()}) for m in own]
    devices = sorted({t.device.index for t in tensors.values() if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield before
        finally:
            for found, kept in attributes:
                _put_back(found, kept)
            for kept in before:
                kept.restore()


BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass
class _Kept:
    """A tensor as it was."""

    tensor: Tensor
    value: Tensor
    wanted: bool
    grad: Tensor | None
    grad_value: Tensor | None
    hooks: dict[str, dict]

    @classmethod
    def of(cls, t: Tensor) -> _Kept:
        grad = t.grad if t.is_leaf else None
        hooks = {kind: dict(getattr(t, kind, None) or {}) for kind in TENSOR_HOOKS}
        return cls(
            t,
            t.detach().clone(),
            t.requires_grad,
            grad,
            None if grad is None else grad.detach().clone(),
            hooks,
        )

    @property
    def changed(self) -> bool:
        """Whether the tensor has other bits now."""
        return not same_bits(self.tensor, self.value)

    @torch.no_grad()
    def restore(self) -> None:
        t = self.tensor
        if self.changed:
            t.copy_(self.value)
        for kind, kept in self.hooks.items():
            if (found := getattr(t, kind, None)) is not None and found != kept:
                found.clear()
                found.update(kept)
        if not t.is_leaf:
            return
        if t.is_floating_point():
            t.requires_grad_(self.wanted)
        t.grad = self.grad
        if self.grad is not None and self.grad_value is not None and not same_bits(self.grad, self.grad_value):
            self.grad.copy_(self.grad_value)


def _shallow(value: Any) -> tuple[Any, Any]:
    """Return an attribute with a copy of what it holds, where it is a dict: hooks, parameters, submodules."""
    return value, value.copy() if isinstance(value, dict) else None


def _put_back(found: dict[str, Any], kept: dict[str, tuple[Any, Any]]) -> None:
    """Give a module the attributes that it had; what was added goes."""
    for key in found.keys() - kept.keys():
        del found[key]
    for key, (value, content) in kept.items():
        found[key] = value
        if content is not None and (value.keys() != content.keys() or any(value[k] is not content[k] for k in content)):
            value.clear()
            value.update(content)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same to the bit: NaN is NaN, and −0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    whole = BITS.get(a.element_size(), torch.uint8)
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(whole) for t in (a, b)))


def ask(function: Callable[[Any, Any], Any], network: nn.Module, x: Inputs, y: Any, what: str) -> Any:
    """Call a user's function once, and refuse it if it trained the network or wrote into the data."""
    data = [_Kept.of(t) for t in tensors_of((x, y))]
    names = {id(p): f"the network ('{name}')" for name, p in network.named_parameters()}
    with preserved(network) as held, evaluating(network), torch.enable_grad():
        try:
            given = function(x, y)
            trained = next((names[id(k.tensor)] for k in held if id(k.tensor) in names and k.changed), None)
            written = "its inputs" if any(kept.changed for kept in data) else None
        finally:
            for kept in data:
                kept.restore()
    changed = trained or written
    if changed is not None:
        raise UsageError(f"{what} changed {changed}: an audit trains nothing; it must only return its signal")
    return given


def checked_credits(
    given: Any, shapes: Sequence[tuple[int, ...]], device: torch.device, name: str, convention: Convention
) -> list[Tensor | None]:
    """Check the number, shapes, type and device of what a callable returned."""
    what = f"credits '{name}'"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(
            f"{what} must be a list of {len(shapes)} tensors (None: not given), not {type(given).__name__}"
        )
    if len(given) != len(shapes):
        raise UsageError(f"{what} must hold one tensor a state h_0..h_L, {len(shapes)} in all; there are {len(given)}")
    checked: list[Tensor | None] = []
    for l, (credit, shape) in enumerate(zip(given, shapes, strict=True)):
        if credit is None:
            checked.append(None)
            continue
        if not isinstance(credit, Tensor) or not credit.is_floating_point():
            kind = credit.dtype if isinstance(credit, Tensor) else type(credit).__name__
            raise UsageError(f"{what}[{l}] must be a floating-point tensor, not {kind}")
        if tuple(credit.shape) != tuple(shape):
            raise UsageError(f"{what}[{l}] must have the state's shape {tuple(shape)}; it has {tuple(credit.shape)}")
        if credit.device != device:
            raise UsageError(f"{what}[{l}] is on {credit.device}, the states are on {device}")
        checked.append(convention.to_ours(credit.detach()))
    if all(credit is None for credit in checked):
        raise UsageError(f"{what} are all None: there is nothing to audit")
    return checked


def checked_updates(given: Any, network: nn.Module) -> dict[str, Tensor]:
    """Check names and shapes of updates."""
    if not isinstance(given, Mapping):
        raise UsageError(f"updates must be a dict of parameter names, not {type(given).__name__}")
    parameters = dict(network.named_parameters())
    for name, update in given.items():
        if name not in parameters:
            raise unknown("parameter in updates", str(name), parameters)
        if not isinstance(update, Tensor) or update.shape != parameters[name].shape:
            shape = tuple(update.shape) if isinstance(update, Tensor) else type(update).__name__
            raise UsageError(f"updates['{name}'] must have the shape {tuple(parameters[name].shape)}; it has {shape}")
    return {name: update.detach() for name, update in given.items()}


def make_subject(
    subject: Learner | nn.Module,
    x: Inputs,
    y: Any,
    *,
    credits: CreditFn | Mapping[str, CreditFn] | None,
    updates: UpdateFn | None,
    blocks: Sequence[str] | None,
    head: str | None,
    state: StateFn | None,
    loss: LossFn | None,
    convention: Convention | None,
) -> Subject:
    """Settle what is audited, and ask every callable for its signal, once."""
    n = batch_of(x)
    if n == 0:
        raise UsageError("the evaluation set is empty")
    if isinstance(y, Tensor) and y.ndim and y.shape[0] != n:
        raise UsageError(f"there are {n} examples and {y.shape[0]} labels")
    learner = subject if isinstance(subject, Learner) else None
    network = learner.network if learner is not None else subject
    if not isinstance(network, nn.Module):
        raise UsageError(f"an audit takes a learner or an nn.Module, not {type(subject).__name__}")
    if learner is None and credits is None and updates is None:
        raise UsageError(
            "a network alone has no signal to audit: pass credits=function, updates=function, or a learner"
        )
    if learner is not None and any(option is not None for option in (blocks, head, state)):
        raise UsageError("a learner knows its blocks: blocks=, head= and state= are for a bare network")
    if learner is not None and loss is not None and loss is not learner.cut.loss:
        raise UsageError("a learner knows its loss: loss= is for a bare network")
    if credits is not None:
        _check_claims(credits)
    cut = learner.cut if learner is not None else Cut.of(network, blocks=blocks, head=head, state=state, loss=loss)
    with evaluating(network):
        if learner is not None:
            learner._settle(x)
        topology = cut.settle(x)
        _check_labels(y, topology.output_shape, cut)
    shapes = [(n, *shape) for shape in topology.shapes]
    device = next((t.device for t in (*network.parameters(), *tensors_of(x))), torch.device("cpu"))
    found = Subject(cut, x, y, [], learner=learner, labelled=isinstance(credits, Mapping))
    usual = convention or Convention()
    if credits is None and learner is not None:
        key = REGISTRY.key_of(type(learner.rule))
        given = ask(learner.credits, network, x, y, "the learner's credits")
        own = checked_credits(given, shapes, device, key, Convention())
        found.claims.append(Claim(key, own, learner.driving_states, learner.exact_states, learner, _trained(learner)))
    functions = credits if isinstance(credits, Mapping) else {"credit": credits} if credits is not None else {}
    for name, function in functions.items():
        given = ask(function, network, x, y, f"credits '{name}'")
        own = checked_credits(given, shapes, device, name, usual)
        found.claims.append(Claim(name, own, list(range(1, cut.depth + 1))))
    if updates is not None:
        found.updates = checked_updates(ask(updates, network, x, y, "updates"), network)
    return found


def _trained(learner: Learner) -> tuple[bool, ...]:
    """Return for each block whether the rule trains any of its parameters (a block without any counts as trained)."""
    frozen = learner.rule.frozen(learner.site)
    sections = [learner.sections[name] for name in learner.cut.blocks]
    return tuple(not names or not set(names) <= frozen for names in sections)


def _check_labels(y: Any, output_shape: torch.Size, cut: Cut) -> None:
    """Labels of the default loss are class indices that the output has."""
    if cut.loss is not cross_entropy:
        return
    if not isinstance(y, Tensor) or y.dtype != torch.long or y.ndim != 1:
        given = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise UsageError(
            f"labels must be class indices, one an example (torch.int64), not {given}; for another task pass loss=fn"
        )
    classes = output_shape[0] if len(output_shape) else 0
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise UsageError(f"labels run from {int(y.min())} to {int(y.max())}, but the network has {classes} outputs")


def _check_claims(credits: Any) -> None:
    """Credits are a function, or several by name."""
    functions = [*credits.values()] if isinstance(credits, Mapping) else [credits]
    if not functions:
        raise UsageError("no credits were given: credits is an empty dict")
    for function in functions:
        if not callable(function):
            raise UsageError(f"credits must be a function (x, y) -> [a_0..a_L], not {type(function).__name__}")
