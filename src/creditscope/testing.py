"""The conformance suite: what every rule and every network has to keep, whoever wrote it.

Both functions raise ``AssertionError`` with one line that says what does not hold and where. They need no test runner::

    check_rule(MyRule())
    check_network(my_network, blocks=["layers.0", "layers.1"], x=images, y=labels)
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs, StateFn, call, map_inputs, pick_state
from creditscope.errors import UsageError
from creditscope.nets import MLP, ResMLP, SmallCNN, SmallResNet, ViT
from creditscope.rules import BP, DFA, FA, Learner, LocalRule, Rule, Shallow
from creditscope.tape import Cut, LossFn, cross_entropy

CLASSES = 3
BATCH = 4
COVERAGE = {"rule", "local backprop", "plain backprop", "true loss", "nothing"}


class Chain(nn.Module):
    """A network of blocks that hold their skip, and that names them: another package's, as far as a rule can see."""

    credit_blocks = ("1", "2")

    def __init__(self, width: int = 8):
        super().__init__()
        parts = [nn.Linear(6, width), _Residual(width), _Residual(width), nn.Linear(width, CLASSES)]
        for name, part in enumerate(parts):
            self.add_module(str(name), part)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (batch, classes)."""
        for part in self.children():
            x = part(x)
        return x

    def example(self) -> Tensor:
        """Return a batch of two zeros."""
        return next(self.parameters()).new_zeros(2, 6)


class _Residual(nn.Module):
    """h + W tanh(h)."""

    def __init__(self, width: int):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.a(torch.tanh(h))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resmlp": lambda: ResMLP(6, width=8, depth=2, classes=CLASSES, branch_std=0.5),
    "mlp": lambda: MLP(6, width=8, depth=3, classes=CLASSES),
    "chain": Chain,
    "vit": lambda: ViT(image=4, channels=1, patch=2, width=8, depth=2, heads=2, classes=CLASSES),
    "small-cnn": lambda: SmallCNN(image=4, channels=1, width=2, hidden=4, classes=CLASSES),
    "small-resnet": lambda: SmallResNet(image=4, channels=1, width=2, stages=2, stage_blocks=1, classes=CLASSES),
}
"""The networks that a rule is checked on: skips outside and inside and none, tokens, images, BatchNorm, all tiny."""


@dataclass(frozen=True)
class Report:
    """What was checked, and what was refused with which sentence."""

    checked: tuple[str, ...]
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Bench:
    """A rule on one network, made anew for each check."""

    name: str
    rule: Rule
    network: nn.Module
    x: Inputs
    y: Any
    cut: dict[str, Any]
    training_steps: int

    def learner(self, seed: int | None = 0, **options: Any) -> Learner:
        """Attach the rule to a copy of the network."""
        return self.rule.attach(
            copy.deepcopy(self.network),
            example=self.x,
            training_steps=self.training_steps,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **self.cut,
            **options,
        )

    def require(self, condition: bool, what: str) -> None:
        """Fail in one line."""
        if not condition:
            raise AssertionError(f"{type(self.rule).__name__} on {self.name}: {what}")

    def same(self, found: Sequence[Any], expected: Sequence[Any], what: str, tolerance: float = 0.0) -> None:
        """Fail where two lists of tensors differ; None counts as zero, and the largest entry of all is the measure."""
        size = max((float(b.abs().max()) for b in expected if b is not None and b.numel()), default=0.0)
        for a, b in zip(found, expected, strict=True):
            if a is None or b is None:
                there = b if a is None else a
                self.require(there is None or not bool(there.any()), what)
            else:
                close = torch.equal(a, b) or bool(((a.double() - b.double()).abs() <= tolerance * size).all())
                self.require(a.shape == b.shape and close, what)


@torch.random.fork_rng(devices=[])
def check_rule(
    rule: Rule,
    network: nn.Module | None = None,
    *,
    blocks: Sequence[str] | None = None,
    head: str | None = None,
    state: StateFn | None = None,
    loss: LossFn | None = None,
    x: Inputs | None = None,
    y: Any = None,
    training_steps: int = 10,
) -> Report:
    """Check that a rule keeps what every rule promises, on a network or on all of ours.

    A network on which the rule is not defined may be refused when it is attached, by a ``UsageError``; it must be
    defined on one at least. Without x and y, inputs are drawn like the network's ``example()`` and labels at random.
    """
    _check_options(rule)
    cut = {"blocks": blocks, "head": head, "state": state, "loss": loss}
    networks = {type(network).__name__: network} if network is not None else _networks()
    benches = [_bench(name, rule, net, cut, x, y, training_steps) for name, net in networks.items()]
    refused: dict[str, str] = {}
    checked: list[str] = []
    for bench in benches:
        try:
            bench.learner()
        except UsageError as error:
            refused[bench.name] = str(error)
            continue
        for check in _CHECKS:
            try:
                check(bench)
            except UsageError as error:
                bench.require(False, f"it was attached, and refuses later: {error}")
        checked.append(bench.name)
    if not checked:
        raise AssertionError(f"{type(rule).__name__} is not defined on any network: {next(iter(refused.values()))}")
    return Report(tuple(checked), refused)


def _networks() -> dict[str, nn.Module]:
    """Make our networks, with the same weights each time, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: make().double() for name, make in NETWORKS.items()}


def _bench(
    name: str, rule: Rule, network: nn.Module, cut: dict[str, Any], x: Inputs | None, y: Any, training_steps: int
) -> _Bench:
    g = torch.Generator().manual_seed(0)
    if x is None:
        example = getattr(network, "example", None)
        if not callable(example):
            raise UsageError(f"{name} has no example(): pass x= (and y=)")
        x = map_inputs(example(), lambda t: _like(t, g))
    if y is None:
        with torch.no_grad():
            output = pick_state(call(copy.deepcopy(network), x), None, "the network's output")
        y = torch.randint(output.shape[1], (len(output),), generator=g).to(output.device)
    return _Bench(name, rule, network, x, y, cut, training_steps)


def _like(t: Tensor, g: torch.Generator) -> Tensor:
    """Draw a batch like an example's."""
    return torch.randn(BATCH, *t.shape[1:], generator=g, dtype=torch.float64).to(t)


# --- what is looked at ------------------------------------------------------------------------------------------------


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Take down what looking must leave as it is."""
    seen: dict[str, Any] = {"the global random generator": torch.get_rng_state()}
    if isinstance(module, Learner):
        seen["the learner's generator"] = module.generator.get_state()
    for name, p in module.named_parameters():
        seen |= {f"parameter {name}": p.detach().clone(), f"{name}.requires_grad": p.requires_grad}
        seen[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
    seen |= {f"buffer {name}": b.clone() for name, b in module.named_buffers()}
    for name, part in module.named_modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        seen |= {f"the mode of '{name}'": part.training, f"the hooks of '{name}'": sum(map(len, hooks))}
        seen[f"the forward of '{name}'"] = "forward" in part.__dict__
    return seen


@contextmanager
def _untouched(bench: _Bench, module: nn.Module, doing: str, *, but: str = "nothing") -> Iterator[None]:
    before = _snapshot(module)
    yield
    after = _snapshot(module)
    for key in [*before, *(after.keys() - before.keys())]:
        a, b = before.get(key), after.get(key)
        same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        bench.require(bool(same) or key.endswith(but), f"{doing} changes {key}")


@contextmanager
def _same_draws() -> Iterator[None]:
    """Let dropout draw the same in two passes that are compared."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _backward(bench: _Bench, learner: Learner, scale: float | Tensor = 1.0) -> Tensor:
    with _same_draws():
        return learner.backward(bench.x, bench.y, scale=scale)


def _gradients(learner: Learner) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in learner.parameters()]


# --- the checks -------------------------------------------------------------------------------------------------------


def _check_options(rule: Rule) -> None:
    """A rule is its hyper-parameters: a frozen dataclass that says what it is."""
    name = type(rule).__name__
    if not isinstance(rule, Rule):
        raise AssertionError(f"check_rule takes a rule, an instance of creditscope.rules.Rule, not {rule!r}")
    if not (dataclasses.is_dataclass(rule) and type(rule).__dataclass_params__.frozen):  # pyright: ignore
        raise AssertionError(f"{name} must be a frozen dataclass: write @dataclass(frozen=True) above it")
    if "__dataclass_fields__" not in vars(type(rule)):
        raise AssertionError(f"{name} must be a dataclass itself: write @dataclass(frozen=True) above it")
    if not (type(rule).__doc__ or "").strip() or (type(rule).__doc__ or "").startswith(f"{name}("):
        raise AssertionError(f"{name} needs a docstring: its update in one line, its paper, its deviations")
    if dataclasses.replace(rule) != rule or hash(dataclasses.replace(rule)) != hash(rule):
        raise AssertionError(f"{name} must equal a copy with the same options")


def _check_draws(bench: _Bench) -> None:
    """The pathway is drawn from the given generator alone; none given is seed 0."""
    torch.rand(1)  # so that a rule that reseeds the global generator shows
    before = torch.get_rng_state()
    learner, again, default, other = (bench.learner(seed) for seed in (0, 0, None, 1))
    bench.require(torch.equal(before, torch.get_rng_state()), "attach draws from the global random generator")
    own = lambda one: [t for name, t in one.state_dict().items() if name.startswith("pathway.")]  # noqa: E731
    bench.same(own(again), own(learner), "the same seed gives other matrices or estimators")
    bench.same(own(default), own(learner), "generator=None must be seed 0")
    drawn = any(t.is_floating_point() and t.numel() > 1 and t.std() > 0 for t in own(learner))
    different = any(not torch.equal(a, b) for a, b in zip(own(other), own(learner), strict=True))
    bench.require(different or not drawn, "another seed gives the same matrices: they do not come from the generator")


def _check_feedback(bench: _Bench) -> None:
    """Feedback of the user's own is taken or refused, and never passed over."""
    try:
        bench.learner(feedback={"no such matrix": torch.zeros(1)})
    except UsageError:
        return
    bench.require(False, "feedback= is passed over in silence: take it, or refuse it with Rule.build(...)")


def _check_credits(bench: _Bench) -> None:
    """One credit a state, shaped like it; looking touches nothing."""
    learner = bench.learner()
    learner.zero_grad()
    for p in learner.parameters():
        p.grad = torch.ones_like(p)
    with _untouched(bench, learner, "credits()"):
        credits = learner.credits(bench.x, bench.y)
    with _untouched(bench, learner, "states()"):
        states = learner.states(bench.x)
    with _untouched(bench, learner, "coverage()"):
        coverage = learner.coverage(bench.x, bench.y)
    shapes, wanted = [tuple(a.shape) for a in credits], [tuple(h.shape) for h in states]
    bench.require(shapes == wanted, f"credits have shapes {shapes}, the states {wanted}")
    for l, (a, h) in enumerate(zip(credits, states, strict=True)):
        bench.require(a.dtype == h.dtype and a.device == h.device, f"credit {l} is {a.dtype}, its state {h.dtype}")
        bench.require(bool(a.isfinite().all()), f"credit {l} is not finite")
        bench.require(not a.requires_grad, f"credit {l} requires grad")
    bench.require(
        learner.exact_states <= set(range(len(states))), f"exact_states names {learner.exact_states}, not states"
    )
    driving, depth = learner.driving_states, learner.cut.depth
    bench.require(
        len(driving) == depth and set(driving) <= set(range(depth + 1)),
        f"driving_states gives {driving}: one state a block is needed",
    )
    named = {name for name, _ in learner.network.named_parameters()}
    bench.require(coverage.keys() == named, "coverage() does not name every parameter")
    bench.require(set(coverage.values()) <= COVERAGE, f"coverage() gives {set(coverage.values()) - COVERAGE}")


def _check_backward(bench: _Bench) -> None:
    """Backward returns the mean loss, keeps the outputs, and adds ``scale`` times one gradient to what was there."""
    learner = bench.learner()
    twins = [copy.deepcopy(learner) for _ in range(4)]
    with _same_draws():
        output = pick_state(learner(bench.x), None, "the network's output").detach()
    learner.load_state_dict(twins[0].state_dict())  # batch statistics have moved
    loss = _backward(bench, learner)
    mean = learner.cut.loss(output, bench.y).mean()
    bench.require(loss.shape == () and not loss.requires_grad, "backward() must return a detached scalar")
    bench.same([loss], [mean], "backward() does not return the mean loss", 1e-6)
    bench.same([learner.outputs], [output], "outputs are not what the network gives", 1e-6)
    for name, value in learner.metrics().items():
        detached = isinstance(value, Tensor) and value.shape == () and not value.requires_grad
        bench.require(detached, f"metrics()['{name}'] must be a detached scalar tensor")
    once = _gradients(learner)
    bench.require(any(g is not None for g in once) or learner.rule.frozen(learner.site) != set(), "nothing is trained")
    for p, g in zip(learner.parameters(), once, strict=True):
        bench.require(g is None or bool(g.isfinite().all()), "a gradient is not finite")
        bench.require(g is None or g.dtype == p.dtype, "a gradient has another dtype than its parameter")
    scaled, by_tensor, added, again = twins
    for twin, scale in ((scaled, 0.25), (by_tensor, torch.tensor(0.25, dtype=torch.float64)), (again, 1.0)):
        _backward(bench, twin, scale)
    bench.same(_gradients(again), once, "the same step on a copy gives other bits")
    quarter = [None if g is None else 0.25 * g for g in once]
    bench.same(_gradients(scaled), quarter, "backward(scale=0.25) is not a quarter of the gradient", 1e-9)
    bench.same(_gradients(by_tensor), quarter, "a tensor as scale gives something else than the number", 1e-9)
    for p, g in zip(added.parameters(), once, strict=True):
        p.grad = None if g is None else torch.full_like(p, 3.0)
    _backward(bench, added)
    expected = [None if g is None else g + 3.0 for g in once]
    bench.same(_gradients(added), expected, "backward() does not add to the gradients that are there", 1e-9)


def _check_left_alone(bench: _Bench) -> None:
    """What the rule or the user freezes gets no gradient; nothing but gradients changes, also after an exception."""
    learner = bench.learner()
    named = dict(learner.network.named_parameters())
    frozen = learner.rule.frozen(learner.site)
    bench.require(frozen <= named.keys(), f"frozen() names {frozen - named.keys()}, which are no parameters")
    mine = next(iter(named))
    named[mine].requires_grad_(False)
    learner.eval()
    with _untouched(bench, learner.network, "backward() in evaluation mode", but=".grad"):
        learner.backward(bench.x, bench.y)
    for name in {*frozen, mine}:
        g = named[name].grad
        bench.require(g is None or not bool(g.any()), f"'{name}' is frozen and gets a gradient")
    learner.zero_grad()
    handle = learner.cut.blocks[[*learner.cut.blocks][-1]].register_forward_pre_hook(_fail)
    if not learner.rule.bypasses_blocks:
        try:
            with _untouched(bench, learner.network, "backward() of a forward that fails", but=".grad"):
                _expect_failure(bench, lambda: learner.backward(bench.x, bench.y))
                _expect_failure(bench, lambda: learner.credits(bench.x, bench.y))
        finally:
            handle.remove()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError("a failure on purpose")


def _expect_failure(bench: _Bench, call: Callable[[], Any]) -> None:
    try:
        call()
    except ZeroDivisionError:
        return
    bench.require(False, "an exception in the network's forward was swallowed")


def _check_head(bench: _Bench) -> None:
    """A local rule leaves the head to the true loss."""
    if not isinstance(bench.rule, LocalRule) or type(bench.rule).step is not LocalRule.step:
        return
    learner, reference = bench.learner(), BP().attach(copy.deepcopy(bench.network), **bench.cut)
    behind = _behind(learner, bench)
    _backward(bench, learner)
    _backward(bench, reference)
    mine, true = (dict(one.network.named_parameters()) for one in (learner, reference))
    what = "the head is not trained by the true loss"
    bench.same([mine[name].grad for name in behind], [true[name].grad for name in behind], what, 1e-9)


def _behind(learner: Learner, bench: _Bench) -> list[str]:
    """Return the parameters that only h_L's own segment holds: those that no credit reaches."""
    with learner.cut.tape(bench.x, bench.y) as tape:
        tape.backward([None] * (learner.cut.depth + 1), 1.0)
    names = [n for n, p in learner.network.named_parameters() if p.grad is not None and bool(p.grad.any())]
    learner.zero_grad()
    learner.load_state_dict(bench.learner().state_dict())
    return names


def _check_saving(bench: _Bench) -> None:
    """A saved learner goes on with the same bits, in a learner that was drawn from another seed; so does a copy."""
    learner, other = bench.learner(), bench.learner(seed=7)
    _backward(bench, learner)
    learner.zero_grad()
    other.load_state_dict(pickle.loads(pickle.dumps(learner.state_dict())))
    copies = {"a loaded state_dict": other, "a deep copy": copy.deepcopy(learner)}
    _backward(bench, learner)
    for what, one in copies.items():
        one.zero_grad()
        _backward(bench, one)
        bench.same(_gradients(one), _gradients(learner), f"{what} does not go on with the same bits")


def _check_groups(bench: _Bench) -> None:
    """The groups for an optimiser hold every parameter once."""
    learner = bench.learner()
    grouped = [p for group in learner.param_groups() for p in group["params"]]
    own = [*learner.parameters()]
    once = len({*grouped}) == len(grouped) and {*grouped} == {*own}
    bench.require(once, "param_groups() must hold every parameter once")
    torch.optim.AdamW(learner.param_groups(), lr=1e-3)


def _check_precision(bench: _Bench) -> None:
    """A learner moves to another precision like any module, or says that it cannot."""
    learner = bench.learner()
    learner.to(torch.float32)
    x = map_inputs(bench.x, lambda t: t.float() if t.is_floating_point() else t)
    y = map_inputs(bench.y, lambda t: t.float() if t.is_floating_point() else t)
    try:
        learner.backward(x, y)
    except UsageError:
        return
    for p in learner.parameters():
        bench.require(p.grad is None or p.grad.dtype == torch.float32, "after .to(float32) a gradient is not float32")
    found = {a.dtype for a in learner.credits(x, y)}
    bench.require(found == {torch.float32}, f"after .to(float32) credits are {found}")


def _check_formula(bench: _Bench) -> None:
    """Where a rule's credit is a pure formula, it is what ``credits`` gives, and takes one more axis in front."""
    rule = bench.rule
    if not isinstance(rule, LocalRule) or type(rule).formula is LocalRule.formula:
        return
    runs = [_operands(bench.learner(seed), bench) for seed in (0, 1)]
    try:
        alone = [[*rule.formula(*run)] for run in runs]
    except UsageError:
        return  # of no use with these options, and says so
    with _same_draws():
        expected = bench.learner().credits(bench.x, bench.y)
    bench.same(alone[0], expected, "formula() is not what credits() gives", 1e-12)
    together = rule.formula(*(_stacked(parts) for parts in zip(*runs, strict=True)))
    for i, run in enumerate(alone):
        of_run = [a[i] for a in together]
        bench.same(of_run, run, "formula() with one more axis in front is not what each run gives alone", 1e-9)


def _operands(learner: Learner, bench: _Bench) -> tuple[Any, ...]:
    rule = learner.rule
    assert isinstance(rule, LocalRule)
    assert learner.pathway is not None
    with _same_draws(), torch.no_grad(), rule.tape(learner.site, bench.x, bench.y) as tape:
        terminal = tape.terminal_gradient if rule.needs_terminal_gradient else None
        return tape.states, tape.output.detach(), tape.errors, [*learner.pathway.buffers()], terminal


def _stacked(parts: Sequence[Any]) -> Any:
    """Put several runs side by side."""
    if isinstance(parts[0], Tensor):
        return torch.stack([*parts])
    return None if parts[0] is None else [torch.stack([*of_one]) for of_one in zip(*parts, strict=True)]


_CHECKS: list[Callable[[_Bench], None]] = [
    _check_draws,
    _check_feedback,
    _check_credits,
    _check_backward,
    _check_left_alone,
    _check_head,
    _check_saving,
    _check_groups,
    _check_precision,
    _check_formula,
]


# --- networks ---------------------------------------------------------------------------------------------------------


@torch.random.fork_rng(devices=[])
def check_network(
    network: nn.Module,
    *,
    blocks: Sequence[str] | None = None,
    head: str | None = None,
    state: StateFn | None = None,
    loss: LossFn | None = None,
    x: Inputs | None = None,
    y: Any = None,
) -> Report:
    """Check that a network can be cut at its blocks, and say which rules are defined on it.

    What cannot be cut is refused by a ``UsageError`` that gives the remedy. Then: cutting touches nothing; exact
    credits, put in place of the gradients, give backpropagation; the loss replayed from each state is the loss, and
    falls along the exact credit; every rule that is defined on it passes :func:`check_rule`. The network itself is
    left as it is: a copy in float64 is looked at.
    """
    twin = copy.deepcopy(network).double()
    cast = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
    cut = {"blocks": blocks, "head": head, "state": state, "loss": loss}
    given = None if x is None else map_inputs(x, cast)
    bench = _bench(type(network).__name__, BP(), twin, cut, given, map_inputs(y, cast), 10)
    _check_exact(bench)
    _check_tail(bench)
    checked: list[str] = []
    refused: dict[str, str] = {}
    for rule in (BP(), DFA(), FA(), FA(level="block"), Shallow()):
        name = f"FA(level='{rule.level}')" if isinstance(rule, FA) else type(rule).__name__
        try:
            dataclasses.replace(bench, rule=rule).learner()
        except UsageError as error:
            refused[name] = str(error)
            continue
        check_rule(rule, twin, **cut, x=bench.x, y=bench.y)
        checked.append(name)
    return Report(tuple(checked), refused)


def _check_exact(bench: _Bench) -> None:
    """The exact credits in place of the gradients are backpropagation."""
    network = copy.deepcopy(bench.network)
    cut = Cut.of(network, **bench.cut)
    with _same_draws():
        output = pick_state(call(network, bench.x), None, "the network's output")
        (bench.cut["loss"] or cross_entropy)(output, bench.y).mean().backward()
    expected = [p.grad for p in network.parameters()]
    network.zero_grad()
    network.load_state_dict(bench.network.state_dict())
    with _same_draws():
        credits = cut.exact(bench.x, bench.y).gradients  # puts the generators back
        with cut.tape(bench.x, bench.y) as tape:
            tape.backward(credits, 1.0)
    what = "exact credits in place of the gradients do not give backpropagation"
    bench.same([p.grad for p in network.parameters()], expected, what, 1e-9)


def _check_tail(bench: _Bench) -> None:
    """The loss replayed from a state is the loss, and its slope along the exact credit that credit's square."""
    network = copy.deepcopy(bench.network).eval()
    cut = Cut.of(network, **bench.cut)
    exact = cut.exact(bench.x, bench.y)
    replay = cut.replay(bench.x, bench.y)
    for l, (h, g) in enumerate(zip(exact.states, exact.gradients, strict=True)):
        try:
            bench.same([replay.tail(l, h)], [exact.losses], f"the loss replayed from state {l} is not the loss", 1e-9)
        except UsageError:  # it is read too early to be replaced, which the message says
            continue
        unit = g / g.norm().clamp(min=1e-12)
        up, down = (replay.tail(l, h + e * unit).sum() for e in (1e-5, -1e-5))
        slope, size = float((up - down).detach() / 2e-5), float(g.norm())
        off = abs(slope - size) > 1e-4 * max(size, 1e-3)
        rise = f"the loss rises by {slope:.6g} along the exact credit of state {l}, whose norm is {size:.6g}"
        bench.require(not off, rise)
