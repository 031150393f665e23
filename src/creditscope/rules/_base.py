"""What a rule is, what a learner is, and the one training step that all rules with a credit share.

A *rule* is a frozen dataclass: the hyper-parameters, and the formula that makes credit. ``rule.attach(network)`` gives
a *learner*: the rule on a network, with its feedback matrices, estimators and random stream, in one ``nn.Module``.

The credit a_l is an estimate of g_l = ∂(Σᵢ ℓᵢ)/∂h_l, per example and of the summed loss; descent is −a. The division
by the batch size happens when the step is applied and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from creditscope.calling import Inputs, StateFn, plain_precision, undisturbed
from creditscope.errors import UsageError, unknown
from creditscope.recorder import Point, Recorder
from creditscope.tape import Cut, LossFn, Tape
from creditscope.topology import Topology

Feedback = Sequence[Tensor] | Mapping[str, Any]
EstimatorGradients = list[tuple[nn.Parameter, Tensor]]


@dataclass(eq=False)
class Site:
    """Where a rule is attached: the cut network, the length of the training, and how far it is."""

    cut: Cut
    training_steps: int | None
    example: Inputs = None
    """The input that the network was first run on."""
    group: dist.ProcessGroup | None = None
    step: int = 0
    """Updates of the network so far."""
    noise: torch.Generator | None = None
    """The stream of what is drawn at every step, on the network's device; None until a rule asks for one."""

    @property
    def topology(self) -> Topology:
        """Shapes and joins, once the network has been run."""
        assert self.cut.topology is not None
        return self.cut.topology

    @property
    def factory(self) -> dict[str, Any]:
        """Device and dtype of the network's parameters."""
        like = next((p for p in self.cut.network.parameters() if p.is_floating_point()), torch.empty(0))
        return {"device": like.device, "dtype": like.dtype}

    def fraction(self, at: float) -> float:
        """Return the step at which a fraction of the training is done."""
        if self.training_steps is None:
            raise UsageError("this rule changes after a fraction of the training: pass training_steps= to attach")
        return at * self.training_steps

    def is_before(self, at: float) -> bool:
        """Tell whether that fraction of the training is still to come."""
        return self.step < self.fraction(at)

    def start_noise(self, generator: torch.Generator) -> None:
        """Begin the stream of per-step noise, seeded by the generator that draws the rule's pathway."""
        if self.noise is None:
            self.noise = derived(generator, self.factory["device"])

    def noise_on(self, device: torch.device) -> torch.Generator:
        """Return the stream of per-step noise, continued on another device where the network has moved there."""
        assert self.noise is not None
        if self.noise.device.type != device.type:
            self.noise = derived(self.noise, device)
        return self.noise


def derived(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return a new generator on a device, seeded by a draw from another."""
    seed = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    return torch.Generator(device).manual_seed(int(seed))


@dataclass(frozen=True)
class Outcome:
    """What one step gave: the mean loss and the outputs, detached, and named scalars on the device."""

    loss: Tensor
    outputs: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Injection:
    """What drives each segment: the credit at h_l for the segment that makes h_l, and a gradient at each branch."""

    credits: list[Tensor | None]
    branch: list[Tensor] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    estimators: EstimatorGradients = field(default_factory=list)
    """The gradients of the rule's own estimators, which :func:`accumulate` applies."""


@dataclass(frozen=True)
class Lesson:
    """What a local rule makes of a forward pass: credits, and what its own estimators learn from it."""

    credits: Sequence[Tensor]
    estimators: EstimatorGradients = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def accumulate(gradients: EstimatorGradients, scale: float | Tensor) -> None:
    """.grad += scale × gradient, as a backward pass would."""
    for parameter, gradient in gradients:
        if parameter.grad is None:
            parameter.grad = (gradient * scale).to(parameter.dtype)
        else:
            parameter.grad.add_(gradient * scale)


@dataclass(frozen=True)
class Rule:
    """The base of all rules: options are its fields, checked when it is made."""

    has_feedback: ClassVar[bool] = False
    has_estimators: ClassVar[bool] = False
    bypasses_blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    # --- what a rule is made of: override these -------------------------------------------------------------------

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Draw the feedback matrices and estimators: the rule's own backward pathway, an empty module where none."""
        if feedback is not None:
            raise UsageError(f"{type(self).__name__} has no feedback matrices; feedback= does not apply")
        return nn.Module()

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return a_0..a_L for a batch."""
        raise NotImplementedError

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Add scale × this rule's gradient of the mean loss to ``.grad``."""
        raise NotImplementedError

    def drives(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> Injection:
        """Return what drives each segment on a batch; by default the credits themselves."""
        return Injection([*self.credits(site, pathway, x, y)])

    def prepare(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> dict[str, Tensor]:
        """Train the rule's own estimators on a batch and nothing else, as while another rule still trains the network.

        Adds scale × their gradients to ``.grad`` and returns named scalars.
        """
        return {}

    # --- what it says of itself -----------------------------------------------------------------------------------

    def refuse(self, site: Site) -> None:
        """Say by name where this network is none that the rule is defined on; nothing where it is."""
        self.driving_states(site)

    def estimator_groups(self, pathway: nn.Module) -> list[dict[str, Any]]:
        """Return an optimiser's groups for the estimators: undecayed, unscheduled, at the rule's ``estimator_lr``."""
        own = [*pathway.parameters()]
        lr = {"lr": getattr(self, "estimator_lr")} if hasattr(self, "estimator_lr") else {}  # noqa: B009
        return [{"params": own, **lr, "weight_decay": 0.0, "scheduled": False}] if own else []

    def frozen(self, site: Site) -> set[str]:
        """Return the names of the parameters that this rule leaves as they are."""
        return set()

    def exact_states(self, site: Site) -> set[int]:
        """Return the states whose credit is exact by construction."""
        return set()

    def driving_states(self, site: Site) -> list[int]:
        """Return, for each block, the state whose credit drives it."""
        return list(range(1, site.cut.depth + 1))

    def phase(self, site: Site) -> tuple[int, ...]:
        """Return what the rule does at present; a captured step is captured again where this changes."""
        return ()

    def capture_obstacle(self, site: Site) -> str | None:
        """Return why a step cannot be captured in a CUDA graph, None where it can."""
        return None

    @classmethod
    def study(cls) -> Self:
        """Return the rule as the source study used it (:mod:`creditscope.rules.study` has the evidence)."""
        from creditscope.rules.study import recipe_of

        return cls(**recipe_of(cls))

    def attach(
        self,
        network: nn.Module,
        *,
        blocks: Sequence[str] | None = None,
        head: str | None = None,
        state: StateFn | None = None,
        loss: LossFn | None = None,
        training_steps: int | None = None,
        feedback: Feedback | None = None,
        example: Inputs | None = None,
        generator: torch.Generator | None = None,
    ) -> Learner:
        """Attach the rule to a network; ``learner.backward(x, y)`` then stands in place of ``loss.backward()``.

        Args:
            network: any module; a ``DistributedDataParallel`` one is trained in step with the other processes.
            blocks: names of the modules at which the network is cut, in order; our own networks name theirs.
            head: name of the module that h_L enters, where that cannot be told.
            state: picks the state out of what a block takes or returns, where it is not the first tensor.
            loss: ``loss(output, y)`` per example, shape (B,); cross-entropy by default.
            training_steps: the number of updates, for rules that change after a fraction of them.
            feedback: the user's own feedback matrices.
            example: one input; settles shapes, feedback and refusals now rather than at the first call.
            generator: draws feedback and estimators; None is a generator of seed 0. The global one is never used.
        """
        return Learner(
            self,
            network,
            blocks=blocks,
            head=head,
            state=state,
            loss=loss,
            training_steps=training_steps,
            feedback=feedback,
            example=example,
            generator=generator,
        )


def check_options(rule: Rule) -> None:
    """Check each field with a closed set of values against its type, and numbers for being finite."""
    hints = get_type_hints(type(rule))
    for item in fields(rule):
        value, hint = getattr(rule, item.name), hints[item.name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise unknown(f"rule.{item.name}", str(value), [str(choice) for choice in get_args(hint)])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if hint is float and not (number and abs(value) < float("inf")):
            raise UsageError(f"rule.{item.name} must be a finite number, not {value!r}")
        if hint is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise UsageError(f"rule.{item.name} must be a whole number, not {value!r}")


def check_arguments(*, training_steps: Any, loss: Any, state: Any, generator: Any) -> None:
    """Check what ``attach`` is given beside the network."""
    if training_steps is not None:
        whole = isinstance(training_steps, int) and not isinstance(training_steps, bool)
        require(whole, f"training_steps must be a whole number, not {training_steps!r}")
        require(training_steps > 0, f"training_steps must be positive, not {training_steps}")
    for name, value in {"loss": loss, "state": state}.items():
        require(value is None or callable(value), f"{name} must be a function, not {value!r}")
    right = generator is None or isinstance(generator, torch.Generator)
    require(right, f"generator must be a torch.Generator, not {type(generator).__name__}")


def require(condition: bool, message: str) -> None:
    """Refuse in one line what does not hold."""
    if not condition:
        raise UsageError(message)


# --- local rules ------------------------------------------------------------------------------------------------------


def normalise(a: Tensor, how: str, floor: float, group: dist.ProcessGroup | None = None, lead: int = 0) -> Tensor:
    """â = a / (RMS(a) + floor), the RMS over each example's features, or over the whole batch.

    ``lead`` leading axes (several runs side by side) are kept apart. Under data parallelism "batch" is the batch of
    all processes.
    """
    if how == "none":
        return a
    axes = tuple(range(lead + 1 if how == "example" else lead, a.ndim))
    mean_square = a.square().mean(dim=axes, keepdim=True)
    if how == "batch" and group is not None:
        dist.all_reduce(mean_square, group=group)
        mean_square = mean_square / dist.get_world_size(group)
    return a / (mean_square.sqrt() + floor)


@dataclass(frozen=True)
class LocalRule(Rule):
    """A rule that gives a credit for every state; block l then minimises ⟨h_{l+1}, credit⟩ by itself.

    Write :meth:`formula` (and :meth:`build`, where there is something to draw) and the rest is here: the forward pass
    cut at the blocks, the normalisation, the penalty, and the one backward pass that applies all local updates. A rule
    that needs more than tensors, such as a network of its own, writes :meth:`credit` instead.
    """

    normalise: Literal["none", "example", "batch"] = field(default="none", kw_only=True)
    """Divide the credit that drives a block by its RMS, per example or over the batch."""
    normalise_floor: float = field(default=1e-6, kw_only=True)
    """Added to that RMS."""
    penalty: float = field(default=0.0, kw_only=True)
    """λ of the penalty λ·‖f_l(h_l)‖² on each branch, mean over the batch."""
    penalty_reduction: Literal["sum", "mean"] = field(default="sum", kw_only=True)
    """‖f‖² summed over the features, or averaged."""
    drive: Literal["output", "input"] = field(default="output", kw_only=True)
    """Block l is driven by the credit at its output h_{l+1}; the source study used the one at its input h_l."""

    needs_terminal_gradient: ClassVar[bool] = False
    """The formula uses g_L, exact through the head: ``tape.terminal_gradient``."""
    needs_replay: ClassVar[bool] = False
    """The formula runs the network again from its states: ``tape.replay``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.normalise_floor >= 0, f"rule.normalise_floor must not be negative, not {self.normalise_floor}")
        require(self.penalty >= 0, f"rule.penalty must not be negative, not {self.penalty}")

    def formula(
        self,
        states: Sequence[Tensor],
        outputs: Tensor,
        errors: Tensor,
        matrices: Sequence[Tensor],
        terminal: Tensor | None,
    ) -> Sequence[Tensor]:
        """Return a_0..a_L, shaped like h_0..h_L, as a pure function of tensors.

        ``errors`` are ∂ℓᵢ/∂outputᵢ, ``matrices`` the pathway's buffers in order, and ``terminal`` is g_L where
        ``needs_terminal_gradient`` says so. One more axis may stand in front of all of them, before the batch: several
        runs side by side, of which each must come out as it would alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has to write formula() or credit()")

    def credit(self, site: Site, pathway: nn.Module, tape: Tape) -> Sequence[Tensor]:
        """Return a_0..a_L from a forward pass; by default what the formula gives."""
        terminal = tape.terminal_gradient if self.needs_terminal_gradient else None
        return self.formula(tape.states, tape.output.detach(), tape.errors, [*pathway.buffers()], terminal)

    def learn(self, site: Site, pathway: nn.Module, tape: Tape) -> Lesson:
        """Return the credits, and the gradients of the rule's own estimators where it has any: one pass for both."""
        return Lesson(self.credit(site, pathway, tape))

    def tape(self, site: Site, x: Inputs, y: Any) -> AbstractContextManager[Tape]:
        """Run the forward pass that the formula needs."""
        return site.cut.tape(x, y, leaf=self.needs_terminal_gradient, replayed=self.needs_replay)

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return a_0..a_L for a batch, as the formula gives them (not normalised)."""
        with site.cut.tape(x, y, leaf=self.needs_terminal_gradient) as tape:
            return self._checked(self.credit(site, pathway, tape), tape)

    def injection(self, site: Site, pathway: nn.Module, tape: Tape) -> Injection:
        """Return what drives each segment: the credits, shifted and normalised as the options say, and the penalty."""
        with torch.no_grad(), plain_precision(tape.output):
            lesson = self.learn(site, pathway, tape)
            credits = self._checked(lesson.credits, tape)
            driving = [credits[0], *(credits[k] for k in self.driving_states(site))]
            driven = [normalise(a, self.normalise, self.normalise_floor, site.group) for a in driving]
            branch, metrics = penalise(tape, self.penalty, self.penalty_reduction)
        return Injection([*driven], branch, {**lesson.metrics, **metrics}, lesson.estimators)

    def drives(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> Injection:
        """Return what drives each segment on a batch."""
        with self.tape(site, x, y) as tape:
            return self.injection(site, pathway, tape)

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Apply every local update in one backward pass."""
        with self.tape(site, x, y) as tape:
            injection = self.injection(site, pathway, tape)
            tape.backward(injection.credits, scale, branch=injection.branch)
        accumulate(injection.estimators, scale)
        return Outcome(tape.losses.mean(), tape.output.detach(), injection.metrics)

    def refuse(self, site: Site) -> None:
        """Penalties need branches, and a drive at the input blocks that keep the state's shape."""
        super().refuse(site)
        if self.penalty:
            refuse_hidden(site.cut)

    def driving_states(self, site: Site) -> list[int]:
        """State l + 1 drives block l, or state l where the drive is at the input."""
        if self.drive == "output":
            return super().driving_states(site)
        shapes = site.topology.shapes
        for l, name in enumerate(site.cut.blocks):
            require(
                shapes[l] == shapes[l + 1],
                f"block '{name}' changes the state's shape from {tuple(shapes[l])} to {tuple(shapes[l + 1])}: it "
                "cannot be driven by the credit at its input; use drive='output'",
            )
        return list(range(site.cut.depth))

    def _checked(self, credits: Sequence[Tensor], tape: Tape) -> list[Tensor]:
        """Credits are shaped like their states."""
        return check_credits(self, credits, [h.shape for h in tape.states])


def check_credits(rule: Rule, credits: Any, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the credits of a rule as a list, or say what it gave instead of one tensor a state, shaped like it."""
    name = type(rule).__name__
    require(
        isinstance(credits, list | tuple),
        f"{name} must give a list of {len(shapes)} credits, not {type(credits).__name__}",
    )
    wrong = next((a for a in credits if not isinstance(a, Tensor)), None)
    require(
        all(isinstance(a, Tensor) for a in credits),
        f"{name} gave {type(wrong).__name__} for a credit; every state has one",
    )
    given, wanted = [tuple(a.shape) for a in credits], [tuple(shape) for shape in shapes]
    require(given == wanted, f"{name} gave credits of shapes {given}; the states have {wanted}")
    return [*credits]


def penalise(tape: Tape, strength: float, reduction: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return ∂(λ‖f_l‖²)/∂f_l = 2λf_l per example for each branch, and the penalty's value."""
    if strength == 0:
        return [], {}
    branches = [point.tensor.detach() for point in exposed_branches(tape.cut, tape.record)]
    weights = [strength / (1 if reduction == "sum" else f[0].numel()) for f in branches]
    value = torch.stack(
        [w * f.float().square().sum() / tape.batch for w, f in zip(weights, branches, strict=True)]
    ).sum()
    return [2 * w * f for w, f in zip(weights, branches, strict=True)], {"penalty": value}


def refuse_hidden(cut: Cut) -> None:
    """Refuse blocks whose branch f_l the network does not expose."""
    topology = cut.topology
    assert topology is not None
    for name in topology.hidden:
        raise UsageError(
            f"block '{name}' adds its skip inside, so its branch cannot be penalised: let the block return the branch, "
            "or make the branch a submodule named 'branch'"
        )
    require(not topology.reentrant, "a penalty needs use_reentrant=False in activation checkpointing")


def exposed_branches(cut: Cut, record: Recorder) -> list[Point]:
    """Return the branches f_l, or say which block does not expose its own."""
    refuse_hidden(cut)
    return [point for point in record.branches if point is not None]


# --- the learner ------------------------------------------------------------------------------------------------------


def _advance_versions(optimiser: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Make up for torch's fused optimisers: alone of all, they change parameters and leave their versions as they are.

    By its version a learner sees, without waiting for a device, that the network has been updated; autograd, that a
    graph is out of date.
    """
    fused = [p for group in optimiser.param_groups if group.get("fused") for p in group["params"] if p.grad is not None]
    if fused:
        increment_version(fused)


register_optimizer_step_post_hook(_advance_versions)


class Learner(nn.Module):
    """A rule attached to a network: feedback, estimators and random stream, saved and moved with it as one module."""

    def __init__(
        self,
        rule: Rule,
        network: nn.Module,
        *,
        blocks: Sequence[str] | None = None,
        head: str | None = None,
        state: StateFn | None = None,
        loss: LossFn | None = None,
        training_steps: int | None = None,
        feedback: Feedback | None = None,
        example: Inputs | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        require(isinstance(network, nn.Module), f"network must be an nn.Module, not {type(network).__name__}")
        check_arguments(training_steps=training_steps, loss=loss, state=state, generator=generator)
        parallel = network if isinstance(network, DistributedDataParallel) else None
        inner: nn.Module = parallel.module if parallel is not None else network
        self.rule = rule
        self.network = inner
        self.pathway: nn.Module | None = None
        self.generator = generator if generator is not None else torch.Generator().manual_seed(0)
        self._parallel = [parallel] if parallel is not None else []  # in a list: not a submodule
        cut = Cut.of(inner, blocks=blocks, head=head, state=state, loss=loss)
        cut.bypass = rule.bypasses_blocks
        self.site = Site(cut, training_steps, group=parallel.process_group if parallel is not None else None)
        self._feedback = feedback
        self._outcome: Outcome | None = None
        self._last: tuple[Inputs, Any] | None = None
        self._counted: int | None = None
        own = getattr(inner, "example", None)
        if example is None and blocks is None and callable(own):
            example = own()
        if example is not None:
            self._settle(example)

    @property
    def cut(self) -> Cut:
        """The network's cut: for measurements of states, exact credits and tails."""
        return self.site.cut

    # --- training ------------------------------------------------------------------------------------------------

    def backward(self, x: Inputs, y: Any, scale: float | Tensor = 1.0) -> Tensor:
        """Stand in place of ``loss.backward()``: ``.grad`` += scale × this rule's gradient of the mean loss.

        Gradients are added for every trainable parameter of the network and of the rule's own estimators. Returns the
        unscaled mean loss, detached. Accumulation is ``scale=1/n``; a GradScaler is ``scale=scaler.scale(...)``.
        """
        self._settle(x)
        self._count_update()
        self._outcome = self.rule.step(self.site, self._path, x, y, scale)
        self._last = (x, y)
        if self._parallel:
            self._synchronise(self._parallel[0])
        return self._outcome.loss

    @property
    def outputs(self) -> Tensor:
        """The network's outputs in the last ``backward``, detached."""
        return self._require_outcome().outputs

    def metrics(self) -> dict[str, Tensor]:
        """Return the named scalars of the last ``backward``, on the device."""
        return dict(self._require_outcome().metrics)

    def forward(self, x: Inputs) -> Any:
        """Run the network as the rule trains it: as it is, but without its blocks under the shallow baseline."""
        return self.cut.forward(x)

    # --- looking -------------------------------------------------------------------------------------------------

    def credits(self, x: Inputs, y: Any) -> list[Tensor]:
        """Return a_0..a_L, shaped like the states, in the present mode; touches no ``.grad``, buffer or RNG."""
        self._settle(x)
        with self._untouched():
            given = self.rule.credits(self.site, self._path, x, y)
        states = self.cut.depth + 1
        require(
            len(given) == states, f"{type(self.rule).__name__} gave {len(given)} credits; there are {states} states"
        )
        return [a.detach() for a in given]

    def states(self, x: Inputs) -> list[Tensor]:
        """Return h_0..h_L in the present mode; buffers and RNG are put back."""
        self._settle(x)
        with self._untouched():
            return self.cut.states(x)[0]

    def coverage(self, x: Inputs | None = None, y: Any = None) -> dict[str, str]:
        """Return what trains each parameter, measured on a step; without data, on that of the last ``backward``.

        The values are "rule", "local backprop", "plain backprop", "true loss" and "nothing"
        (:func:`creditscope.rules._coverage.measure_coverage` says how each is told).
        """
        from creditscope.rules._coverage import measure_coverage

        if x is None:
            require(self._last is not None, "coverage() without data measures the last backward: there was none yet")
            assert self._last is not None
            x, y = self._last
        self._settle(x)
        with self._untouched():
            return measure_coverage(self, x, y)

    @property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """Parameter names by segment: "stem", each block by its name, "head"."""
        self._require_settled("sections")
        return self.site.topology.sections

    @property
    def exact_states(self) -> set[int]:
        """The states whose credit is exact by construction."""
        self._require_settled("exact_states")
        return self.rule.exact_states(self.site)

    @property
    def driving_states(self) -> list[int]:
        """For each block, the state whose credit drives it."""
        self._require_settled("driving_states")
        return self.rule.driving_states(self.site)

    @property
    def phase(self) -> tuple[int, ...]:
        """What the rule does in the next ``backward``: a captured step is to be captured again where this changes."""
        self._count_update()
        return self.rule.phase(self.site)

    # --- what trains, what is saved ------------------------------------------------------------------------------

    def param_groups(self, lr: float = 1e-3, weight_decay: float = 0.01) -> list[dict[str, Any]]:
        """Return groups for an optimiser: the network's parameters, and the estimators at their own rate, undecayed.

        A group with ``"scheduled": False`` keeps its rate whatever the schedule does.
        """
        self._require_settled("param_groups()", self.rule.has_estimators)
        groups: list[dict[str, Any]] = [
            {"params": [*self.network.parameters()], "lr": lr, "weight_decay": weight_decay, "scheduled": True}
        ]
        return groups + self.estimator_groups()

    def estimator_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the rule's own estimators."""
        return self.rule.estimator_groups(self._path) if self.pathway is not None else []

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the network's and the estimators' parameters; feedback matrices are buffers."""
        self._require_settled("parameters()", self.rule.has_estimators)
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return everything that a continued training needs: network, feedback, estimators, random stream, progress."""
        self._require_settled("state_dict()", self.rule.has_estimators or self.rule.has_feedback)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what :meth:`state_dict` gave."""
        self._require_settled("load_state_dict()", self.rule.has_estimators or self.rule.has_feedback)
        return super().load_state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the random stream and the progress, as tensors."""
        updated = self._counted is not None and self._counted != self._network_version()
        noise = self.site.noise
        own = {f"noise_{noise.device.type}": noise.get_state()} if noise is not None else {}
        return {"generator": self.generator.get_state(), "step": torch.tensor(self.site.step + updated), **own}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the random stream and the progress."""
        self.generator.set_state(state["generator"].cpu())
        if self.site.noise is not None:
            noise = self.site.noise_on(self.site.factory["device"])
            saved = state.get(f"noise_{noise.device.type}")  # the stream of one kind of device means nothing to another
            if saved is not None:
                noise.set_state(saved.cpu())
        self.site.step = int(state["step"])
        self._counted = None

    def __getstate__(self) -> dict[str, Any]:
        """Count what was updated so far: the parameters of a copy have versions of their own."""
        if self._counted is not None:
            self._count_update()
        return {**self.__dict__, "_counted": None}

    def compile(self, **options: Any) -> Learner:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compile each block's own forward inside the cut (options go to ``torch.compile``), and return the learner.

        Compiling the whole network would hide its blocks: hooks that come after the first compiled call are dropped.
        """
        for name, block in self.cut.blocks.items():
            self.cut.forwards[name] = torch.compile(block.forward, **options)
        return self

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> nn.Module:
        assert self.pathway is not None
        return self.pathway

    def _settle(self, x: Inputs) -> None:
        """Find the shapes, make the refusals, draw feedback and estimators: once."""
        if self.pathway is not None:
            return
        self.cut.settle(x)
        self.rule.refuse(self.site)
        self.site.example = x
        self.pathway = self.rule.build(self.site, self.generator, self._feedback).train(self.training)
        self._feedback = self.site.example = None

    def _require_settled(self, what: str, needed: bool = True) -> None:
        require(
            self.pathway is not None or not needed,
            f"{what} of {type(self.rule).__name__} is known after the first call, or with example= given to attach",
        )

    def _require_outcome(self) -> Outcome:
        require(self._outcome is not None, "there was no backward(x, y) yet")
        assert self._outcome is not None
        return self._outcome

    def _count_update(self) -> None:
        """Advance the progress once per change of the network, which a host can see without waiting for a device."""
        version = self._network_version()
        if self._counted is not None and version != self._counted:
            self.site.step += 1
        self._counted = version

    def _network_version(self) -> int:
        return sum(p._version for p in self.network.parameters())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the progress as it is: for the capture of a step, which does not run it."""
        step, version = self.site.step, self._counted
        try:
            yield
        finally:
            self.site.step, self._counted = step, version

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        streams = [generator for generator in (self.generator, self.site.noise) if generator is not None]
        before = [generator.get_state() for generator in streams]
        try:
            with undisturbed(self.network):
                yield
        finally:
            for generator, state in zip(streams, before, strict=True):
                generator.set_state(state)

    @torch.no_grad()
    def _synchronise(self, parallel: DistributedDataParallel) -> None:
        """Average ``.grad`` over the processes, as DistributedDataParallel does; also after accumulation.

        Its own reducer waits for every parameter, and a rule may leave some alone, so it is not armed: the cut calls
        the module inside it.
        """
        if not parallel.require_backward_grad_sync:
            return
        world = dist.get_world_size(self.site.group)
        trained = [p for p in self.parameters() if p.grad is not None]
        for dtype in {p.grad.dtype for p in trained if p.grad is not None}:
            gradients = [p.grad for p in trained if p.grad is not None and p.grad.dtype == dtype]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.site.group)
            flat /= world
            for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(averaged.view_as(gradient))
        if parallel.broadcast_buffers:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0, group=self.site.group)
