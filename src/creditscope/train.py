"""The one training loop: any network, any rule, any data set; resumable to the bit."""

from __future__ import annotations

import copy
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import xarray as xr
from torch import Tensor, nn

from creditscope import config, recipes
from creditscope.data import Dataset, Loader
from creditscope.errors import UsageError
from creditscope.evaluation import evaluate, norms
from creditscope.history import as_dataset
from creditscope.recipes import Recipe
from creditscope.rng import derive, stream
from creditscope.rules._base import Feedback, Learner, Rule
from creditscope.runs import RunDirectory, environment, flatten, unflatten
from creditscope.steps import Schedule, Stepper, Tally, make_optimiser
from creditscope.tape import LossFn, cross_entropy
from creditscope.topology import StateFn, call, first_tensor

EVALUATION_BATCH = 1000
POLL_EVERY = 32  # steps between looks at the flag that a GPU sets when the loss is no longer finite
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}

Outcome = Literal["finished", "diverged"]


@dataclass(frozen=True)
class EpochEnd:
    """What a callback is told after each epoch (0 is the initialisation)."""

    epoch: int
    epochs: int
    row: dict[str, Any]
    learner: Learner


@dataclass(frozen=True)
class Result:
    """What a training gave."""

    history: xr.Dataset
    """One row an epoch, epoch 0 being the initialisation; layers 0..L."""
    learner: Learner
    status: Outcome
    detail: dict[str, Any] = field(default_factory=dict)
    """Of a diverged run: the step, layer and tensor at which something was not finite."""
    directory: Path | None = None
    resumed: bool = False
    """Whether the run was finished before and only read."""

    @property
    def network(self) -> nn.Module:
        """The trained network."""
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
    compile: bool = False,  # noqa: A002 - torch's own word
    evaluate_every: int = 1,
    keep: Iterable[int | Literal["last"]] = (0, "last"),
    probe: int = 1024,
    callbacks: Sequence[Callable[[EpochEnd], Any]] = (),
    progress: Callable[[int, int, int], Any] | None = None,
    **changes: Any,
) -> Result:
    """Train a network by a rule.

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
        **changes: options of the recipe, e.g. ``lr=3e-4``.
    """
    _check(epochs=epochs, seed=seed, evaluate_every=evaluate_every, probe=probe, graph=graph, data=data, rule=rule)
    chosen = (recipe or recipes.default).with_(**changes)
    place = torch.device(device)
    kept = _kept(keep, epochs)
    with ExitStack() as stack:
        count = threads or _recorded_threads(out) or torch.get_num_threads()
        stack.enter_context(_global_settings(place, count, derive(seed, "noise")))
        made = _make(network, seed, place, DTYPES[chosen.precision])
        options = {
            "network": _described(network, made),
            "rule": config.to_dict(rule),
            "data": {"name": data.name, "options": data.options, "fingerprint": data.fingerprint()},
            "epochs": epochs,
            "seed": seed,
            "recipe": asdict(chosen),
            "attach": {"blocks": list(blocks) if blocks else None, "head": head, "loss": _name(loss or cross_entropy)},
            "device": place.type,
            "threads": count,
            "graph": graph,
            "compile": compile,
            "evaluate_every": evaluate_every,
            "keep": kept,
            "probe": probe,
        }
        run = None
        if out is not None:
            run = stack.enter_context(RunDirectory.claim(out, options, environment(device=str(place), threads=count)))
        attach = {"blocks": blocks, "head": head, "state": state, "loss": loss, "feedback": feedback}
        training = _Training(
            made, rule, data, epochs, seed, chosen, place, attach, graph, compile, evaluate_every, kept, probe, run
        )
        return training.run(callbacks, progress)


def _check(*, epochs: int, seed: int, evaluate_every: int, probe: int, graph: str, data: Any, rule: Any) -> None:
    for name, value, low in (
        ("epochs", epochs, 1),
        ("seed", seed, 0),
        ("evaluate_every", evaluate_every, 1),
        ("probe", probe, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise UsageError(f"{name} must be a whole number of at least {low}, not {value!r}")
    if graph not in ("auto", "off"):
        raise UsageError(f"graph must be 'auto' or 'off', not {graph!r}")
    if not isinstance(data, Dataset):
        raise UsageError(f"data must be a Dataset, as cs.data.load(name) gives it, not {type(data).__name__}")
    if not isinstance(rule, Rule):
        raise UsageError(f"rule must be a rule, as cs.rules.DFA() makes it, not {rule!r}")


def _kept(keep: Iterable[int | str], epochs: int) -> list[int | str]:
    kept = list(dict.fromkeys(keep))
    for item in kept:
        if item != "last" and not (isinstance(item, int) and 0 <= item <= epochs):
            raise UsageError(f"keep holds epochs from 0 to {epochs} and 'last', not {item!r}")
    return kept


def _recorded_threads(out: str | Path | None) -> int | None:
    """Return the thread count that a run was begun with: the same bits want the same count."""
    if out is None or not (Path(out) / "options.json").is_file():
        return None
    return RunDirectory.open(out).options.get("threads")


def _described(network: Any, made: nn.Module) -> dict[str, Any]:
    """Return what a run records of its network: name and options, or name and the bits that it starts from."""
    if isinstance(network, config.NetworkSpec):
        return {"name": network.name, "options": network.options}
    digest = hashlib.sha256()
    for name, tensor in made.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"name": _name(type(made)), "fingerprint": digest.hexdigest()[:16]}


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _make(network: Any, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the network: as it is, or made under the stream (seed, "init")."""
    if not isinstance(network, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(seed, "init"))
            network = network()
        if not isinstance(network, nn.Module):
            raise UsageError(f"network must be a module or a callable that makes one; it made {type(network).__name__}")
    return network.to(device=device, dtype=dtype)


@contextmanager
def _global_settings(device: torch.device, threads: int, noise: int) -> Iterator[None]:
    """Set threads, determinism and the noise stream for the training, and put everything back."""
    before = torch.get_num_threads()
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False))
        torch.default_generator.manual_seed(noise)
        if devices:
            torch.cuda.manual_seed(noise)
        if threads != before:
            torch.set_num_threads(threads)
            stack.callback(torch.set_num_threads, before)
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


class _LossIsFinite:
    """Looks at the device's flag without waiting for it."""

    def __init__(self, flag: Tensor):
        self._flag, self._steps = flag, 0
        self._on_gpu = flag.device.type == "cuda"
        self._host = torch.ones((), dtype=torch.bool, pin_memory=True) if self._on_gpu else flag
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._pending = False

    def __call__(self) -> bool:
        if self._copied is None:
            return bool(self._flag)
        self._steps += 1
        if self._pending and self._copied.query():
            self._pending = False
            if not bool(self._host):
                return False
        if not self._pending and self._steps % POLL_EVERY == 0:
            self._host.copy_(self._flag, non_blocking=True)
            self._copied.record()
            self._pending = True
        return True


class _DivergedError(Exception):
    """The loss is no longer finite."""


class _Training:
    """The state of one training, and its loop."""

    def __init__(
        self,
        network: nn.Module,
        rule: Rule,
        data: Dataset,
        epochs: int,
        seed: int,
        recipe: Recipe,
        device: torch.device,
        attach: dict[str, Any],
        graph: str,
        compiled: bool,
        evaluate_every: int,
        keep: list[int | str],
        probe: int,
        run: RunDirectory | None,
    ):
        self.data, self.epochs, self.seed, self.recipe, self.run_directory = data, epochs, seed, recipe, run
        self.evaluate_every, self.keep = evaluate_every, keep
        dtype = DTYPES[recipe.precision]
        options = {"dataset": data, "device": device, "dtype": dtype}
        self.loader = Loader(data.train, batch=recipe.batch, drop_last=recipe.drop_last, **options)
        self.evaluators = {
            name: Loader(part, batch=min(EVALUATION_BATCH, len(part)), augment="none", **options)
            for name, part in (("test", data.test), ("val", data.validation))
            if part is not None
        }
        self.probe = min(probe, len(data.test))
        self.probed = next(iter(Loader(data.test, batch=self.probe, augment="none", **options).ordered()))
        _check_outputs(network, self.probed[0][:2], data)
        self.learner = rule.attach(
            network,
            **attach,
            training_steps=epochs * len(self.loader),
            example=self.probed[0][:2],
            generator=stream(seed, "rule"),
        )
        if compiled:
            self.learner.compile()
        network.train()
        self.optimiser = make_optimiser(self.learner, recipe)
        self.schedule = Schedule(self.optimiser, recipe, epochs)
        self.tally = Tally.zero(device)
        obstacle = _graph_obstacle(self.learner, device, graph)
        self.stepper = Stepper(self.learner, self.optimiser, recipe, self.tally, graph=obstacle is None)
        self.obstacle = obstacle
        self.is_finite = _LossIsFinite(self.tally.finite)
        self.device = device
        self.rows: list[dict[str, Any]] = []
        self.epoch = self.batch = 0
        self.seconds = 0.0
        self.anchor: dict[str, Any] | None = None

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self, callbacks: Sequence[Callable[[EpochEnd], Any]], progress: Callable[[int, int, int], Any] | None) -> Result:
        """Train from where the run stands to its end."""
        if self.run_directory is not None:
            finished = self._resume(self.run_directory)
            if finished is not None:
                return finished
        self.anchor = copy.deepcopy(self._state())
        with _Signals() as signals:
            try:
                if not self.rows:
                    self._end_epoch({"epoch": 0}, time.perf_counter(), callbacks)
                while self.epoch < self.epochs:
                    self._one_epoch(signals, callbacks, progress)
            except _DivergedError:
                return self._diverged()
            except KeyboardInterrupt:
                self._interrupted()
                raise
        return self._finished()

    def _one_epoch(self, signals: _Signals, callbacks: Any, progress: Any) -> None:
        started = time.perf_counter()
        number, steps = self.epoch + 1, len(self.loader)
        if self.batch == 0:
            self.tally.reset()
        self.learner.network.train()
        for x, y in self.loader.epoch(self.seed, number, skip=self.batch):
            self.stepper.step(x, y)
            self.batch += 1
            if progress is not None:
                progress(number, self.batch, steps)
            if not self.is_finite():
                raise _DivergedError
            if signals.requested:
                self.seconds += time.perf_counter() - started
                raise KeyboardInterrupt
        if not bool(self.tally.finite):
            raise _DivergedError
        lr = self.schedule.lr
        self.schedule.step()
        self.epoch, self.batch = number, 0
        self._end_epoch({"epoch": number, "lr": lr, **self._training_scores()}, started, callbacks)

    def _training_scores(self) -> dict[str, float]:
        means = self.tally.means()
        if not _is_classified(self.data):
            means.pop("train_acc")
        return means

    def _end_epoch(self, row: dict[str, Any], started: float, callbacks: Sequence[Callable[[EpochEnd], Any]]) -> None:
        """Evaluate where it is due, write down, save."""
        epoch = self.epoch
        if epoch % self.evaluate_every == 0 or epoch == self.epochs:
            row |= self._evaluation()
        row["seconds"] = self.seconds + time.perf_counter() - started
        self.seconds = 0.0
        self.rows.append(row)
        if any(value != value or abs(value) == float("inf") for key, value in row.items() if key.endswith("_loss")):
            self.rows.pop()
            raise _DivergedError
        state = self._state()
        if self.run_directory is not None:
            if epoch in self.keep:
                flat, meta = flatten({"learner": self.learner.state_dict(), "epoch": epoch})
                self.run_directory.save_checkpoint(f"epoch-{epoch:04d}", flat, meta)
            self.run_directory.save_checkpoint("last", *flatten(state))
            self.run_directory.write_history(self.history())
            self.run_directory.write_status("running", epoch=epoch)
            self.run_directory.log(_line(row))
        self.anchor = copy.deepcopy(state)
        for callback in callbacks:
            callback(EpochEnd(epoch, self.epochs, row, self.learner))

    def _evaluation(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, loader in self.evaluators.items():
            scores = evaluate(self.learner, loader.ordered(), autocast=self.recipe.precision == "bfloat16")
            row[f"{name}_loss"] = scores.loss
            if _is_classified(self.data):
                row[f"{name}_acc"] = scores.accuracy
        row["state_norm"], row["reference_norm"] = norms(self.learner, *self.probed)
        return row

    def history(self) -> xr.Dataset:
        """Return the rows so far."""
        splits = {"train": self.loader.examples, **{n: len(e._y) for n, e in self.evaluators.items()}}
        return as_dataset(self.rows, probe=self.probe, examples=splits)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _finished(self) -> Result:
        detail = {key: value for key, value in self.rows[-1].items() if isinstance(value, int | float) and key != "seconds"}
        if self.run_directory is not None:
            self.run_directory.write_history(self.history())
            if "last" not in self.keep:
                self.run_directory.delete_checkpoint("last")
            self.run_directory.write_status("finished", **detail)
        return self._result("finished", {})

    def _interrupted(self) -> None:
        if self.run_directory is not None and self.rows:
            self.run_directory.save_checkpoint("last", *flatten(self._state()))
            self.run_directory.write_history(self.history())
            self.run_directory.write_status("interrupted", epoch=self.epoch, batch=self.batch)
            self.run_directory.log(f"interrupted in epoch {self.epoch + 1}, after batch {self.batch}")

    def _diverged(self) -> Result:
        """Find the place by replay from the last checkpoint, which stays."""
        where = self._locate()
        assert self.anchor is not None
        self._load(self.anchor)
        if self.run_directory is not None:
            if self.rows:
                self.run_directory.write_history(self.history())
            self.run_directory.write_status("diverged", **where)
            self.run_directory.log(f"diverged: {where}")
        return self._result("diverged", where)

    def _result(self, status: Outcome, detail: dict[str, Any], *, resumed: bool = False) -> Result:
        directory = self.run_directory.path if self.run_directory is not None else None
        return Result(self.history(), self.learner, status, detail, directory, resumed)

    def _locate(self) -> dict[str, Any]:
        """Repeat the steps from the last checkpoint and name the first tensor that is not finite."""
        assert self.anchor is not None
        self._load(self.anchor)
        self.stepper.obstacle = "looked at step by step"
        number = self.epoch + 1
        self.learner.network.train()
        for x, y in self.loader.epoch(self.seed, number, skip=self.batch) if number <= self.epochs else ():
            found = self._broken(x, y)
            if found is not None:
                step = self.epoch * len(self.loader) + self.batch + 1
                return {"epoch": number, "step": step, "layer": found[0], "tensor": found[1]}
            self.batch += 1
        return {"epoch": number, "step": number * len(self.loader), "layer": "evaluation", "tensor": "loss"}

    def _broken(self, x: Any, y: Any) -> tuple[str, str] | None:
        """Take one step and return the layer and name of the first tensor in it that is not finite."""
        sections = self.learner.sections
        owner = {name: section for section, names in sections.items() for name in names}
        states = self.learner.states(x)
        named = [*self.learner.network.named_parameters()]
        names = [*self.learner.cut.blocks, "head"]
        for l, h in enumerate(states):
            if not bool(torch.isfinite(h).all()):
                return names[l], f"state {l}"
        self.stepper._work(x, y)
        checks: list[tuple[str, str, Tensor | None]] = [("head", "outputs", self.learner.outputs)]
        checks += [(owner[name], f"gradient of {name}", p.grad) for name, p in named]
        checks += [(owner[name], name, p) for name, p in named]
        for layer, name, tensor in checks:
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                return layer, name
        return None if bool(self.tally.finite) else ("head", "loss")

    # --- state ---------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on."""
        tally = self.tally
        return {
            "learner": self.learner.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "noise": _noise(self.device),
            "tally": {
                "loss": tally.loss,
                "correct": tally.correct,
                "examples": tally.examples,
                "metrics": dict(tally.metrics),
            },
            "progress": {"epoch": self.epoch, "batch": self.batch, "seconds": self.seconds, "rows": self.rows},
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.learner.load_state_dict(state["learner"])
        self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))
        if self.device.type == "cuda":
            for group in self.optimiser.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
        self.schedule.load_state_dict(state["schedule"])
        _set_noise(state["noise"], self.device)
        tally, saved = self.tally, state["tally"]
        tally.loss.copy_(saved["loss"])
        tally.correct.copy_(saved["correct"])
        tally.examples = int(saved["examples"])
        for name, value in saved["metrics"].items():
            tally.metrics.setdefault(name, torch.zeros_like(tally.loss)).copy_(value)
        tally.finite.fill_(True)
        progress = state["progress"]
        self.epoch, self.batch = int(progress["epoch"]), int(progress["batch"])
        self.seconds, self.rows = float(progress["seconds"]), copy.deepcopy(progress["rows"])

    def _resume(self, run: RunDirectory) -> Result | None:
        """Go on from the last checkpoint; of a run that has ended, return what it gave."""
        saved = run.load_checkpoint("last")
        if saved is not None:
            self._load(unflatten(*saved))
        elif run.status.state == "finished":
            raise UsageError(f"{run.path} is finished, and its last checkpoint was not kept: there is nothing to load")
        if run.status.state == "finished":
            return self._result("finished", {}, resumed=True)
        if run.status.state == "diverged":
            return self._result("diverged", {"epoch": run.status.epoch, **run.status.detail}, resumed=True)
        if saved is not None:
            run.log(f"goes on after epoch {self.epoch}, batch {self.batch}")
        return None


def _check_outputs(network: nn.Module, x: Tensor, data: Dataset) -> None:
    """A network for another number of classes would fail late, or learn nothing."""
    before = network.training
    network.eval()
    with torch.no_grad():
        output = first_tensor(call(network, x))
    network.train(before)
    if _is_classified(data) and output is not None and output.ndim == 2 and output.shape[1] < data.classes:
        raise UsageError(f"the network has {output.shape[1]} outputs, but {data.name} has {data.classes} classes")


def _is_classified(data: Dataset) -> bool:
    return not data.train.y.is_floating_point()


def _graph_obstacle(learner: Learner, device: torch.device, graph: str) -> str | None:
    """Return why the step is not captured in a CUDA graph; None where it is to be."""
    if device.type != "cuda":
        return "no GPU"
    if graph == "off":
        return "switched off"
    return learner.rule.capture_obstacle(learner.site)


def _noise(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_noise(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _line(row: dict[str, Any]) -> str:
    shown = {key: value for key, value in row.items() if isinstance(value, float) and key != "seconds"}
    return f"epoch {row['epoch']}: " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
