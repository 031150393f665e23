"""The one training loop: any network, any rule, any data set; resumable to the bit."""

from __future__ import annotations

import copy
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from creditscope import config, recipes
from creditscope.auditing.monitor import Monitor, ReferenceLostError
from creditscope.auditing.result import Audit
from creditscope.auditing.trained import (
    Scope,
    Scores,
    Trained,
    about_training,
    audit_trained,
    network_part,
    stored_audit,
)
from creditscope.calling import StateFn, call, pick_state, undisturbed
from creditscope.data import Dataset, Loader
from creditscope.errors import UsageError
from creditscope.evaluation import evaluate, evaluating, norms
from creditscope.history import as_dataset
from creditscope.options import require_known
from creditscope.recipes import Recipe
from creditscope.rng import derive, stream
from creditscope.rules._base import Feedback, Learner, Rule
from creditscope.rules.baselines import baselines_of
from creditscope.runs import RunDirectory, Status, environment, flatten, unflatten
from creditscope.runs.checkpoint import digest
from creditscope.steps import Place, Schedule, Stepper, Tally, Watch, all_finite, make_optimiser, tensor_rates
from creditscope.tape import LossFn, cross_entropy, per_example

if TYPE_CHECKING:
    import xarray as xr

EVALUATION_BATCH = 1000
MONITORED = 256
"""Test examples that a monitor looks at: enough for a mean cosine to some .01, at a quarter of a probe's cost."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}

Outcome = Literal["finished", "diverged"]
Keep = int | Literal["last"]


@dataclass(frozen=True)
class EpochEnd:
    """What a callback is told after each epoch (0 is the initialisation)."""

    epoch: int
    epochs: int
    row: dict[str, Any]
    learner: Learner


Callback = Callable[[EpochEnd], Any]
Progress = Callable[[int, int, int], Any]


@dataclass(frozen=True)
class Result:
    """What a training gave."""

    history: xr.Dataset
    """One row an epoch, epoch 0 being the initialisation; layers 0..L."""
    learner: Learner
    """As trained; of a diverged run, as it was at the last checkpoint."""
    status: Outcome
    detail: dict[str, Any] = field(default_factory=dict)
    """Of a diverged run: the epoch, step (from 1 on), layer and tensor at which something was not finite first."""
    directory: Path | None = None
    resumed: bool = False
    """Whether the run had ended before and was only read."""
    eager: str | None = None
    """Why the steps were not replayed from a CUDA graph; None where they were."""
    baselines: dict[str, list[float]] = field(default_factory=dict)
    """Final test accuracies of the matched baselines, where asked for: "frozen-bp", "frozen-rule", "shallow"."""
    refused: dict[str, str] = field(default_factory=dict)
    """The baselines that could not be trained, or have no accuracy, and why."""
    monitor: Monitor | None = None
    """What monitored the training, where that was asked for."""
    _plan: _Plan | None = field(default=None, repr=False)
    _initial: dict[str, Tensor] | None = field(default=None, repr=False)

    @cached_property
    def audit(self) -> Audit:
        """The audit of the trained learner on the first 1024 test examples, with drift, accuracy and baselines.

        Made when it is first asked for. A run with a folder keeps it there, as ``audit.nc``, and reads it again.
        """
        assert self._plan is not None
        return _audited(self, self._plan)

    @property
    def network(self) -> nn.Module:
        """The trained network, in train mode."""
        return self.learner.network


def fit(
    network: nn.Module | Callable[[], nn.Module],
    rule: Rule,
    data: Dataset,
    *,
    epochs: int,
    seed: int = 0,
    blocks: Sequence[str] | None = None,
    head: str | None = None,
    state: StateFn | None = None,
    loss: LossFn | None = None,
    feedback: Feedback | None = None,
    out: str | Path | None = None,
    recipe: Recipe | None = None,
    device: str | torch.device = "cpu",
    threads: int | None = None,
    graph: Literal["auto", "off"] = "auto",
    compile: bool = False,
    evaluate_every: int = 1,
    keep: Iterable[Keep] = (0, "last"),
    probe: int = 1024,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
    baselines: bool = False,
    audit: bool = False,
    monitor: bool | Mapping[str, Any] = False,
    **changes: Any,
) -> Result:
    """Train a network by a rule.

    Ctrl-C and SIGTERM finish the step, save the run where it has a folder, and raise ``KeyboardInterrupt``. A training
    that is no longer finite ends as "diverged", which is a result and no error.

    The same bits come out of a loop of one's own: ``rule.attach(..., generator=rng.stream(seed, "rule"))``, the
    recipe's optimiser with ``fused=True``, ``CosineAnnealingLR`` stepped once an epoch, and the batches of
    ``Loader.epoch(seed, epoch)`` for epochs from 1 on.

    Args:
        network: a module as it is, or a callable that makes one; the callable runs under the stream (seed, "init").
        rule: e.g. ``cs.rules.DFA()``.
        data: e.g. ``cs.data.load("digits")``; the test split is measured and never selects anything.
        epochs: passes over the training split.
        seed: every random stream of the run derives from it: initialisation, feedback, order, augmentation, noise.
        blocks: where the network is cut, as for ``attach``; so are ``head``, ``state``, ``loss`` and ``feedback``.
        head: as for ``attach``.
        state: as for ``attach``.
        loss: as for ``attach``.
        feedback: as for ``attach``.
        out: the run's folder. The run resumes there to the same bits; a finished one is read. None writes nothing.
        recipe: batch, optimiser, schedule, clipping, precision; ``cs.recipes.study`` is the source study's.
        device: where to train.
        threads: CPU threads, recorded; None is what torch uses now (or what the run has recorded).
        graph: "auto" captures the step in a CUDA graph on a GPU where nothing forbids it.
        compile: compile each block's forward.
        evaluate_every: epochs between evaluations; the first and the last are always evaluated.
        keep: epochs whose checkpoints stay, and "last".
        probe: number of test examples on which the norms of states and exact credits are taken.
        callbacks: called with an :class:`EpochEnd` after each epoch.
        progress: called with (epoch, step, steps) after each step.
        baselines: train the matched baselines too, of the same seed and recipe, each in ``out/baselines/NAME`` where
            there is a folder; one that cannot be trained on this network is left out with its reason.
        audit: audit the trained learner now; else that is done when ``result.audit`` is asked for.
        monitor: run the quick audit along the training, into ``out/monitor.jsonl`` where there is a folder; True, or
            options of ``cs.Monitor``, e.g. ``{"every": 1, "unit": "epoch"}``. It changes no bit of the run.
        **changes: options of the recipe, e.g. ``lr=3e-4``.
    """
    plan = _Plan(
        rule=rule,
        data=data,
        epochs=epochs,
        seed=seed,
        attach={"blocks": blocks, "head": head, "state": state, "loss": loss, "feedback": feedback},
        recipe=_recipe(recipe, changes),
        device=_device(device),
        threads=_threads(threads, out),
        graph=graph,
        compile=compile,
        evaluate_every=evaluate_every,
        keep=list(dict.fromkeys(keep)),
        probe=probe,
    )
    begun_from = copy.deepcopy(network) if baselines and isinstance(network, nn.Module) else network
    with _global_settings(plan.device, plan.threads, derive(seed, "noise")):
        made = _make(network, plan)
        started_as = _described(network, made) if out is not None else {}
        training = _Training(made, plan)  # refuses what cannot be trained before anything is written
        with _claimed(out, started_as, plan) as run:
            result = training.run(run, callbacks, progress, _monitor_options(monitor))
    if baselines:
        accuracies, refused = _train_baselines(begun_from, plan, out)
        result = replace(result, baselines=accuracies, refused=refused)
    if audit:
        _ = result.audit
    return result


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The options of a training, but for its network; checked when it is made."""

    rule: Rule
    data: Dataset
    epochs: int
    seed: int
    attach: dict[str, Any]
    recipe: Recipe
    device: torch.device
    threads: int
    graph: Literal["auto", "off"]
    compile: bool
    evaluate_every: int
    keep: list[Keep]
    probe: int

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("seed", 0), ("evaluate_every", 1), ("probe", 1)):
            _require_whole(name, getattr(self, name), low)
        for item in self.keep:
            if item != "last" and not (isinstance(item, int) and 0 <= item <= self.epochs):
                raise UsageError(f"keep holds epochs from 0 to {self.epochs} and 'last', not {item!r}")
        if self.graph not in ("auto", "off"):
            raise UsageError(f"graph must be 'auto' or 'off', not {self.graph!r}")
        if not isinstance(self.data, Dataset):
            raise UsageError(f"data must be a Dataset, as cs.data.load(name) gives it, not {type(self.data).__name__}")
        if not isinstance(self.rule, Rule):
            raise UsageError(f"rule must be a rule, as cs.rules.DFA() makes it, not {self.rule!r}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the network's parameters and the inputs."""
        return DTYPES[self.recipe.precision]

    def as_options(self) -> dict[str, Any]:
        """Return what a run records and compares: all that the bits depend on, as plain values."""
        data = self.data
        return {
            "rule": config.to_dict(self.rule),
            "data": {
                "name": data.name,
                "options": data.options,
                "fingerprint": data.fingerprint(),
                "normalise": {"mean": data.mean, "std": data.std},
                "augment": data.augment,
            },
            "epochs": self.epochs,
            "seed": self.seed,
            "recipe": asdict(self.recipe),
            "attach": _attach_options(**self.attach),
            "device": self.device.type,
            "threads": self.threads,
            "graph": self.graph,
            "compile": self.compile,
            "evaluate_every": self.evaluate_every,
            "keep": self.keep,
            "probe": self.probe,
        }


def _require_whole(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise UsageError(f"{name} must be a whole number of at least {low}, not {value!r}")


def _recipe(recipe: Recipe | None, changes: dict[str, Any]) -> Recipe:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a Recipe, such as cs.recipes.study, not {recipe!r}")
    return (recipe or recipes.default).with_(**changes)


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device '{given}' cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _threads(given: int | None, out: str | Path | None) -> int:
    """Return the thread count that is given, or that the run was begun with: the same bits want the same count."""
    if given is not None:
        _require_whole("threads", given, 1)
        return given
    recorded = RunDirectory.open(out).options.get("threads") if out and (Path(out) / "options.json").is_file() else None
    return recorded or torch.get_num_threads()


def _attach_options(
    blocks: Sequence[str] | None, head: str | None, state: Any, loss: Any, feedback: Feedback | None
) -> dict[str, Any]:
    return {
        "blocks": None if blocks is None else [*blocks],
        "head": head,
        "state": None if state is None else _name(state),
        "loss": _name(loss or cross_entropy),
        "feedback": None if feedback is None else _bits(feedback),
    }


def _described(network: Any, made: nn.Module) -> dict[str, Any]:
    """Return what a run records of its network: name and options, or name and the bits that it starts from."""
    if isinstance(network, config.NetworkSpec):
        return {"name": network.name, "options": network.options}
    return {"name": _name(type(made)), "fingerprint": _bits(made.state_dict())}


def _bits(state: Any) -> str:
    """Return 16 hexadecimal digits that change with any bit of a state."""
    tensors, structure = flatten(state)
    return digest({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, repr(structure))[:16]


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _monitor_options(given: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    if isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping):
        raise UsageError(f"monitor must be True, or a dict of options of Monitor, not {given!r}")
    options_of_monitor = ("every", "unit", "stop_on_lost_reference", "thresholds")
    require_known("monitor", given, dict.fromkeys(options_of_monitor))
    return {**given}


# --- where it happens -------------------------------------------------------------------------------------------------


def _make(network: Any, plan: _Plan) -> nn.Module:
    """Return the network, as it is or made under the stream (seed, "init"), if it takes this data."""
    if not isinstance(network, nn.Module) and callable(network):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(plan.seed, "init"))
            network = network()
    if not isinstance(network, nn.Module):
        raise UsageError(f"network must be a module or a callable that makes one, not {type(network).__name__}")
    return network.to(device=plan.device, dtype=plan.dtype)


@contextmanager
def _claimed(out: str | Path | None, network: dict[str, Any], plan: _Plan) -> Iterator[RunDirectory | None]:
    """Claim the run's folder, where there is one."""
    if out is None:
        yield None
        return
    with RunDirectory.claim(
        out, {"network": network, **plan.as_options()}, environment(device=plan.device, threads=plan.threads)
    ) as run:
        yield run


@contextmanager
def _global_settings(device: torch.device, threads: int, noise: int) -> Iterator[None]:
    """Set threads, determinism and the noise stream for the training, and put everything back."""
    before = torch.get_num_threads()
    on_gpu = device.type == "cuda"
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []))
        stack.enter_context(
            torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False)
        )
        torch.default_generator.manual_seed(noise)
        if on_gpu:
            torch.cuda.manual_seed(noise)
        if threads != before:
            stack.callback(torch.set_num_threads, before)
            torch.set_num_threads(threads)
        yield


class _Signals:
    """Ctrl-C and SIGTERM become a request that is granted between two steps; a second one is not waited for."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def __exit__(self, *error: object) -> None:
        self._restore()


class _DivergedError(Exception):
    """Something is no longer finite; ``where`` is the detail, where it is known already."""

    def __init__(self, where: dict[str, Any] | None = None):
        super().__init__(where)
        self.where = where


# --- the training -----------------------------------------------------------------------------------------------------


class _Training:
    """The state of one training, and its loop."""

    def __init__(self, network: nn.Module, plan: _Plan):
        self.plan = plan
        data, recipe = plan.data, plan.recipe
        self.loader = self._loader(data.train, recipe.batch, augment=None, drop_last=recipe.drop_last)
        self.evaluators = {
            name: self._loader(part, min(EVALUATION_BATCH, len(part)))
            for name, part in (("test", data.test), ("val", data.validation))
            if part is not None
        }
        self.probe = min(plan.probe, len(data.test))
        self.probed = next(self._loader(data.test, self.probe).ordered())
        example, labels = (part[:2] for part in self.probed)
        _check_outputs(network, example, labels, data, plan.attach["loss"] or cross_entropy)
        self.learner = plan.rule.attach(
            network,
            **plan.attach,
            training_steps=plan.epochs * len(self.loader),
            example=example,
            generator=stream(plan.seed, "rule"),
        )
        if plan.compile:
            self.learner.compile()
        network.train()
        self.optimiser = make_optimiser(self.learner, recipe)
        self.schedule = Schedule(self.optimiser, recipe, plan.epochs)
        self.tally = Tally(plan.device)
        self._no_graph = _graph_obstacle(self.learner, plan)
        self.stepper = Stepper(self.learner, self.optimiser, recipe, self.tally, graph=self._no_graph is None)
        self.loss_is_finite = Watch(self.tally.finite)
        self.monitor: Monitor | None = None
        self.initial = {name: t.cpu().clone() for name, t in network_part(self.learner.state_dict()).items()}
        self.rows: list[dict[str, Any]] = []
        self.epoch = self.batch = 0
        """Whole epochs done, and batches of the next one."""
        self.seconds = 0.0
        """Spent on those batches before an interruption."""
        self.signals = _Signals()
        self.journal = _Journal(None, plan.keep)

    def _loader(self, part: Any, batch: int, **options: Any) -> Loader:
        plan = self.plan
        given = {"dataset": plan.data, "device": plan.device, "dtype": plan.dtype, "augment": "none"} | options
        return Loader(part, batch=batch, **given)

    @property
    def eager(self) -> str | None:
        """Why the steps are not replayed from a CUDA graph; None where they are."""
        return self._no_graph or self.stepper.obstacle

    def run(
        self,
        directory: RunDirectory | None,
        callbacks: Sequence[Callback],
        progress: Progress | None,
        monitor: dict[str, Any] | None,
    ) -> Result:
        """Train from where the run stands to its end."""
        self.journal = _Journal(directory, self.plan.keep)
        if monitor is not None:
            self.monitor = self._made_monitor(monitor)
        ended = self._resumed()
        if ended is not None:
            return ended
        self._anchor()
        with self.signals:
            try:
                self._train(callbacks, progress)
                result = self._finished()
            except _DivergedError as error:
                result = self._diverged(error.where)
            if self.signals.requested:
                raise KeyboardInterrupt  # came too late to interrupt this, but is not lost
        if self.monitor is not None:
            self.monitor.close()
        return result

    def _made_monitor(self, options: dict[str, Any]) -> Monitor:
        x, y = (part[:MONITORED] for part in self.probed)
        out = None if self.journal.path is None else self.journal.path / "monitor.jsonl"
        return Monitor(self.learner, x, y, out=out, **options)

    def _monitored(self, unit: str, at: int, started: float) -> None:
        """Let the monitor look; where it stops the training, the run is saved as interrupted."""
        if self.monitor is None or self.monitor.unit != unit:
            return
        try:
            self.monitor(at)
        except ReferenceLostError:
            self.seconds += time.perf_counter() - started
            self.journal.interrupted(self)
            raise

    def _train(self, callbacks: Sequence[Callback], progress: Progress | None) -> None:
        if not self.rows:
            self._end_epoch({"epoch": 0}, time.perf_counter(), callbacks)
        while self.epoch < self.plan.epochs:
            started = time.perf_counter()
            self._grant_interruption(started)
            self._steps(started, progress)
            lr = self.schedule.lr
            self.schedule.step()
            self.epoch, self.batch = self.epoch + 1, 0
            self._end_epoch({"epoch": self.epoch, "lr": lr, **self.tally.means()}, started, callbacks)

    def _steps(self, started: float, progress: Progress | None) -> None:
        """Take the remaining steps of an epoch."""
        number, steps = self.epoch + 1, len(self.loader)
        if self.batch == 0:
            self.tally.reset()
        self.learner.network.train()
        for x, y in self.loader.epoch(self.plan.seed, number, skip=self.batch):
            self.stepper.step(x, y)
            self.batch += 1
            if progress is not None:
                progress(number, self.batch, steps)
            if not self.loss_is_finite():
                raise _DivergedError
            self._monitored("step", (number - 1) * steps + self.batch, started)
            self._grant_interruption(started)

    def _grant_interruption(self, started: float) -> None:
        """Between two steps, where the state is whole."""
        if self.signals.requested:
            self.seconds += time.perf_counter() - started
            self.journal.interrupted(self)
            raise KeyboardInterrupt

    def _end_epoch(self, row: dict[str, Any], started: float, callbacks: Sequence[Callback]) -> None:
        """Evaluate where it is due, write down, save."""
        if not bool(self.tally.finite) or not all_finite(self.learner.parameters()):
            raise _DivergedError
        if self.epoch % self.plan.evaluate_every == 0 or self.epoch == self.plan.epochs:
            row |= self._evaluation()
        row["seconds"] = self.seconds + time.perf_counter() - started
        self.seconds = 0.0
        self.rows.append(row)
        self._anchor()
        self.journal.epoch(self)
        for callback in callbacks:
            callback(EpochEnd(self.epoch, self.plan.epochs, row, self.learner))
        self._monitored("epoch", self.epoch, time.perf_counter())
        if self.epoch == 0:
            self._monitored("step", 0, time.perf_counter())

    def _evaluation(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, loader in self.evaluators.items():
            autocast = self.plan.recipe.precision == "bfloat16"
            row[f"{name}_loss"], row[f"{name}_acc"] = evaluate(self.learner, loader.ordered(), autocast=autocast)
        row["state_norm"], row["reference_norm"] = norms(self.learner, *self.probed)
        for name in self.evaluators:
            if not math.isfinite(row[f"{name}_loss"]):
                raise _DivergedError(self._at(self.epoch, 0, Place("head", f"{name}_loss")))
        return row

    def history(self) -> xr.Dataset:
        """Return the rows so far."""
        loaders = {"train": self.loader, **self.evaluators}
        return as_dataset(self.rows, probe=self.probe, examples={name: l.examples for name, l in loaders.items()})

    # --- ends ----------------------------------------------------------------------------------------------------

    def _finished(self) -> Result:
        self.journal.finished(self)
        return self._result("finished", {})

    def _diverged(self, where: dict[str, Any] | None) -> Result:
        """Say where, found by replay from the last checkpoint, which stays."""
        where = where or self._located()
        self._load(self._last)
        self.journal.diverged(self, where)
        return self._result("diverged", where)

    def _result(self, status: Outcome, detail: dict[str, Any], *, resumed: bool = False) -> Result:
        return Result(
            self.history(),
            self.learner,
            status,
            detail,
            self.journal.path,
            resumed,
            self.eager,
            monitor=self.monitor,
            _plan=self.plan,
            _initial=self.initial,
        )

    def _located(self) -> dict[str, Any]:
        """Repeat the steps since the last checkpoint and find the first tensor that is not finite."""
        self._load(self._last)
        self.learner.network.train()
        number = self.epoch + 1
        for x, y in self.loader.epoch(self.plan.seed, number, skip=self.batch):
            self.batch += 1
            found = self.stepper.first_broken(x, y)
            if found is not None:
                return self._at(number, self.batch, found)
        return self._at(number, self.batch, Place("unknown", "unknown: all was finite when it was repeated"))

    def _at(self, epoch: int, batch: int, place: Place) -> dict[str, Any]:
        step = (epoch - 1) * len(self.loader) + batch if batch else epoch * len(self.loader)
        return {"epoch": epoch, "step": step, **place._asdict()}

    # --- state ---------------------------------------------------------------------------------------------------

    def _anchor(self) -> None:
        """Keep the present state in memory: where a divergence is looked for from, and what it goes back to."""
        self._last = copy.deepcopy(self.state())

    def state(self) -> dict[str, Any]:
        """Return everything that the rest of the training depends on."""
        return {
            "learner": self.learner.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "noise": _noise(self.plan.device),
            "tally": dict(self.tally.sums),
            "progress": {"epoch": self.epoch, "batch": self.batch, "seconds": self.seconds, "rows": self.rows},
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.learner.load_state_dict(state["learner"])
        self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))
        tensor_rates(self.optimiser)
        self.schedule.load_state_dict(state["schedule"])
        _set_noise(state["noise"], self.plan.device)
        self.tally.load(state["tally"])
        progress = state["progress"]
        self.epoch, self.batch = progress["epoch"], progress["batch"]
        self.seconds, self.rows = progress["seconds"], copy.deepcopy(progress["rows"])

    def _resumed(self) -> Result | None:
        """Go on from the last checkpoint; of a run that has ended, return what it gave."""
        state = self.journal.last()
        if state is not None:
            self._load(state)
        status = self.journal.status
        if status is None or not status.ended:
            self.journal.goes_on(self)
            return None
        if status.state == "diverged":
            return self._result("diverged", {"epoch": status.epoch, **status.detail}, resumed=True)
        return self._result("finished", {}, resumed=True)


# --- after the training -----------------------------------------------------------------------------------------------


def _train_baselines(
    network: Any, plan: _Plan, out: str | Path | None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Train the matched baselines; return the accuracies, and why one has none."""
    accuracies, refused = {}, {}
    for name, rule in baselines_of(plan.rule).items():
        try:
            result = _train_baseline(network, plan, rule, None if out is None else Path(out) / "baselines" / name)
        except UsageError as error:
            refused[name] = str(error)
            continue
        accuracy = float(result.history["test_acc"][-1])
        if result.status == "finished" and math.isfinite(accuracy):
            accuracies[name] = [accuracy]
        else:
            refused[name] = f"{result.status} without an accuracy" if result.status == "finished" else result.status
    return accuracies, refused


def _train_baseline(network: Any, plan: _Plan, rule: Rule, out: Path | None) -> Result:
    attach: dict[str, Any] = plan.attach if rule.has_feedback else plan.attach | {"feedback": None}
    return fit(
        copy.deepcopy(network) if isinstance(network, nn.Module) else network,
        rule,
        plan.data,
        epochs=plan.epochs,
        seed=plan.seed,
        out=out,
        recipe=plan.recipe,
        device=plan.device,
        threads=plan.threads,
        graph=plan.graph,
        compile=plan.compile,
        evaluate_every=plan.evaluate_every,
        keep=("last",),
        probe=plan.probe,
        **attach,
    )


def _audited(result: Result, plan: _Plan) -> Audit:
    """Audit what a training gave, or read its audit; threads are the run's, since bits hang on them."""
    accuracy = float(result.history["test_acc"][-1])
    scope, scores = Scope(), Scores([accuracy] if math.isfinite(accuracy) else [], result.baselines)
    path = result.directory / "audit.nc" if result.directory else None
    found = stored_audit(path, scope, scores) if path else None
    if found is not None:
        return found
    about = about_training(plan.as_options(), plan.data, accuracy)
    with _global_settings(plan.device, plan.threads, derive(plan.seed, "noise")):
        found = audit_trained(Trained(result.learner, plan.data, result._initial, about), scope, scores)
    if path is not None:
        with RunDirectory.claim(path.parent, RunDirectory.open(path.parent).options):
            found.save(path)
    return found


def _check_outputs(network: nn.Module, x: Tensor, y: Tensor, data: Dataset, loss: LossFn) -> None:
    """A network for other inputs, another number of classes or another loss would fail late, or learn nothing."""
    with evaluating(network), undisturbed(network), torch.no_grad():
        output = _refused(f"the network does not take {data.name}'s examples of {data.shape}", call, network, x)
        output = pick_state(output, None, "the network's output")
    if output.ndim == 2 and output.shape[1] < data.classes:
        raise UsageError(f"the network has {output.shape[1]} outputs, but {data.name} has {data.classes} classes")
    _refused("the loss does not take the network's outputs", per_example, loss, output, y)


def _refused(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a function, and turn an error of torch's into a refusal of one line."""
    try:
        return function(*given)
    except (RuntimeError, IndexError) as error:
        raise UsageError(f"{what}: {str(error).splitlines()[0]}") from error


def _graph_obstacle(learner: Learner, plan: _Plan) -> str | None:
    """Return why no CUDA graph is tried; None where one is to be."""
    if plan.device.type != "cuda":
        return "no GPU"
    if plan.graph == "off":
        return "switched off"
    return learner.rule.capture_obstacle(learner.site)


def _noise(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_noise(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


class _Journal:
    """What a training writes into its folder; without a folder, nothing."""

    def __init__(self, run: RunDirectory | None, keep: Sequence[Keep]):
        self._run, self._keep = run, keep

    @property
    def path(self) -> Path | None:
        """The folder."""
        return self._run.path if self._run else None

    @property
    def status(self) -> Status | None:
        """How far the run on disk has come."""
        return self._run.status if self._run else None

    def last(self) -> dict[str, Any] | None:
        """Return the state that was saved last."""
        if self._run is None:
            return None
        saved = self._run.load_checkpoint("last")
        if saved is None and self._run.status.state == "finished":
            raise UsageError(f"{self.path} is finished, and its last checkpoint was not kept: there is nothing to load")
        self._drop_unwanted()
        return None if saved is None else unflatten(*saved)

    def _drop_unwanted(self) -> None:
        """Remove the last checkpoint where it is not to stay: only once the run says that it is finished."""
        if self._run is not None and "last" not in self._keep and self._run.status.state == "finished":
            self._run.delete_checkpoint("last")

    def goes_on(self, training: _Training) -> None:
        """Say from where a run is taken up."""
        if self._run is not None and training.rows:
            self._run.log(f"goes on after epoch {training.epoch}, batch {training.batch}")

    def epoch(self, training: _Training) -> None:
        """Save after an epoch. The checkpoint counts: what a kill leaves unwritten behind it is written again."""
        if self._run is None:
            return
        epoch = training.epoch
        if epoch in self._keep:
            kept = {"learner": training.learner.state_dict(), "epoch": epoch}
            self._run.save_checkpoint(f"epoch-{epoch:04d}", *flatten(kept))
        self._save(training)
        self._run.write_status("running", epoch=epoch)
        self._run.log(_line(training.rows[-1]))
        if epoch == 1 and training.plan.device.type == "cuda" and training.eager:
            self._run.log(f"steps are not replayed from a CUDA graph: {training.eager}")

    def _save(self, training: _Training) -> None:
        if self._run is not None:
            self._run.save_checkpoint("last", *flatten(training.state()))
            self._run.write_history(training.history())

    def interrupted(self, training: _Training) -> None:
        """Save between two steps."""
        if self._run is not None:
            self._save(training)
            self._run.write_status("interrupted", epoch=training.epoch, batch=training.batch)
            self._run.log(f"interrupted in epoch {training.epoch + 1}, after batch {training.batch}")

    def diverged(self, training: _Training, where: dict[str, Any]) -> None:
        """Record where; the last checkpoint stays."""
        if self._run is not None:
            self._run.write_history(training.history())
            self._run.write_status("diverged", **where)
            self._run.log(f"diverged: {where}")

    def finished(self, training: _Training) -> None:
        """Record the scores that the training ended with."""
        if self._run is not None:
            row = training.rows[-1]
            scores = {key: row[key] for key in row if isinstance(row[key], int | float) and key != "seconds"}
            self._run.write_history(training.history())
            self._run.write_status("finished", **scores)
            self._drop_unwanted()


def _line(row: dict[str, Any]) -> str:
    shown = {key: value for key, value in row.items() if isinstance(value, float) and key != "seconds"}
    return f"epoch {row['epoch']}: " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
