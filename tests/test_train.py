"""``fit`` against a loop of one's own, and whatever can happen to a training."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import creditscope as cs
from creditscope import config, rng
from creditscope.data import Loader, from_tensors
from creditscope.errors import CreditscopeError, UsageError
from creditscope.runs import OptionsDifferError, RunBusyError, RunDirectory, StorageError, flatten
from tests import fits
from tests.fits import assert_same_run, bits, files_of, net, options, task
from tests.runs import disks
from tests.runs.workers import Worker
from tests.test_steps import Estimating


def fit(network=None, rule=None, data=None, **changes):
    return cs.fit(network or net(), rule or cs.rules.DFA(), data or task(), **options(**changes))


def same(one: nn.Module, other: nn.Module) -> bool:
    (ours, structure), (theirs, other_structure) = flatten(one.state_dict()), flatten(other.state_dict())
    return structure == other_structure and all(torch.equal(ours[name], theirs[name]) for name in ours)


def made(network=None, seed: int = 1) -> nn.Module:
    """Make a network as ``fit`` does."""
    torch.manual_seed(rng.derive(seed, "init"))
    return (network or net())()


def own_loop(network, rule, data, *, epochs=3, seed=1, batch=10, optimiser=None, drop_last=False):
    """What a user writes who has no use for ``fit``."""
    loader = Loader(data.train, dataset=data, batch=batch, drop_last=drop_last)
    learner = rule.attach(network, training_steps=epochs * len(loader), generator=rng.stream(seed, "rule"))
    optimiser = optimiser or functools.partial(torch.optim.AdamW, fused=True)
    optimiser = optimiser(learner.param_groups())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=epochs)
    for epoch in range(1, epochs + 1):
        for x, y in loader.epoch(seed, epoch):
            optimiser.zero_grad()
            learner.backward(x, y)
            optimiser.step()
        schedule.step()
        for group in optimiser.param_groups:
            group["lr"] = group["lr"] if group["scheduled"] else group["initial_lr"]
    return learner


RULES = {
    "bp": cs.rules.BP(penalty=0.01),
    "fa": cs.rules.FA(),
    "fa-block": cs.rules.FA.study(),
    "dfa": cs.rules.DFA(),
    "frozen": cs.rules.Frozen(),
    "shallow": cs.rules.Shallow(),
    "last-k": cs.rules.LastK(cs.rules.DFA(), 1),
    "blend": cs.rules.Blend(cs.rules.DFA(), cs.rules.BP(), 0.3),
    "handover": cs.rules.Handover(cs.rules.DFA(), cs.rules.FA(), at=0.5),
    "state-bridge": cs.rules.StateBridge(hidden=8),
    "credit-bridge": cs.rules.CreditBridge(hidden=8, warmup=0.3),
    "vector-field": cs.rules.VectorField(hidden=8),
}


# --- a loop of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_users_own_loop_gives_the_same_bits(name):
    learner = own_loop(made(), RULES[name], task())
    assert same(fit(rule=RULES[name]).learner, learner)


def test_the_rule_that_hands_over_does_so():
    data = task()
    handed, first = fit(rule=RULES["handover"], data=data), fit(data=data)
    assert not same(handed.network, first.network)
    alone = fit(rule=cs.rules.Handover(cs.rules.DFA(), cs.rules.FA(), at=1.0), data=data)
    assert same(alone.network, first.network)


def test_images_cropped_and_flipped_are_the_same_bits():
    digits = cs.data.load("digits")
    parts = digits.train[slice(50)], digits.test[slice(20)]
    data = from_tensors(*(t for part in parts for t in (part.x, part.y)), classes=10, augment="crop-flip")
    make = config.NetworkSpec("small-resnet", {}, data.shape, data.classes)
    learner = own_loop(made(make), cs.rules.DFA(), data)
    assert same(fit(make, cs.rules.DFA(), data).learner, learner)


class Dropping(nn.Module):
    """A foreign network that draws in its forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(fits.FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, fits.CLASSES)

    def forward(self, x):
        return self.c(F.dropout(torch.relu(self.b(torch.relu(self.a(x)))), 0.3, self.training))


def test_noise_comes_from_the_runs_own_stream():
    data = task()
    network = made(Dropping)
    torch.manual_seed(rng.derive(1, "noise"))
    loader = Loader(data.train, dataset=data, batch=10)
    learner = cs.rules.DFA().attach(network, blocks=["b"], example=data.train.x[:2], generator=rng.stream(1, "rule"))
    optimiser = torch.optim.AdamW(learner.param_groups(), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=3)
    for epoch in (1, 2, 3):
        for x, y in loader.epoch(1, epoch):
            optimiser.zero_grad()
            learner.backward(x, y)
            optimiser.step()
        schedule.step()
    torch.manual_seed(77)  # whatever the global stream holds
    assert same(fit(Dropping, data=data, blocks=["b"]).learner, learner)


@pytest.mark.parametrize(
    ("name", "optimiser"),
    [
        ("adam", functools.partial(torch.optim.Adam, fused=True)),
        ("sgd", functools.partial(torch.optim.SGD, momentum=0.9, fused=True)),
    ],
)
def test_other_optimisers(name, optimiser):
    learner = own_loop(made(), cs.rules.BP(), task(), optimiser=optimiser)
    assert same(fit(rule=cs.rules.BP(), optimiser=name).learner, learner)


def test_float64():
    result = fit(precision="float64")
    data = task()
    loader = Loader(data.train, dataset=data, batch=10, dtype=torch.float64)
    learner = cs.rules.DFA().attach(made().double(), generator=rng.stream(1, "rule"))
    optimiser = torch.optim.AdamW(learner.param_groups(), fused=True)
    for x, y in loader.epoch(1, 1):
        optimiser.zero_grad()
        learner.backward(x, y)
        optimiser.step()
    assert all(p.dtype == torch.float64 for p in result.network.parameters())
    assert same(fit(precision="float64", epochs=1, keep=()).learner, learner)


def test_bfloat16_is_autocast_over_float32():
    data = task()
    learner = cs.rules.DFA().attach(made(), generator=rng.stream(1, "rule"))
    optimiser = torch.optim.AdamW(learner.param_groups(), fused=True)
    for x, y in Loader(data.train, dataset=data, batch=10).epoch(1, 1):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            learner.backward(x, y)
        optimiser.step()
    assert learner.outputs.dtype == torch.bfloat16
    result = fit(precision="bfloat16", epochs=1, keep=())
    assert same(result.learner, learner)
    assert not same(result.learner, fit(epochs=1, keep=()).learner)


@pytest.mark.parametrize("by", ["all", "block"])
def test_clipping_reaches_the_step(by):
    recipe = {"clip": 0.05, "clip_by": by, "optimiser": "sgd", "schedule": "constant", "weight_decay": 0.0, "epochs": 1}
    found = fit(rule=cs.rules.BP(), **recipe, keep=()).network
    data, network = task(), made()
    momentum = {p: torch.zeros_like(p) for p in network.parameters()}
    groups = [[*network.parameters()]]
    if by == "block":
        head = [*network.out_ln.parameters(), *network.out_head.parameters()]
        groups = [[*network.embed.parameters()], *([*block.parameters()] for block in network.blocks), head]
    for x, y in Loader(data.train, dataset=data, batch=10).epoch(1, 1):
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        for group in groups:
            norm = torch.cat([p.grad.flatten() for p in group]).norm()
            for p in group:
                momentum[p] = 0.9 * momentum[p] + p.grad * min(1.0, 0.05 / float(norm + 1e-6))
                p.data -= 1e-3 * momentum[p]
    for p, q in zip(found.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


# --- the history ------------------------------------------------------------------------------------------------------


def test_the_history_has_what_is_promised():
    history = fit(data=task(validation=10), epochs=3, keep=()).history
    named = {"train_loss", "train_acc", "test_loss", "test_acc", "val_loss", "val_acc", "lr", "seconds"}
    assert set(history.data_vars) == named | {"state_norm", "reference_norm"}
    assert history.epoch.values.tolist() == [0, 1, 2, 3]
    assert history.state_norm.dims == ("epoch", "layer")
    assert history.layer.values.tolist() == [0, 1, 2]
    assert "summed loss" in history.reference_norm.attrs["reduction"]
    assert history.val_loss.attrs["n"] == 10
    assert history.train_loss.attrs["n"] == 34
    for name, variable in history.items():
        assert np.isfinite(variable.values[1:]).all(), name
    assert not {"val_loss", "val_acc"} & set(fit().history.data_vars)


def test_epoch_0_is_the_initialisation():
    data = task()
    history = fit(data=data).history
    network = made().eval()
    with torch.no_grad():
        output = network(data.test.x)
        norm = network.embed(data.test.x).norm(dim=1).median()
    assert float(history.test_loss[0]) == pytest.approx(float(F.cross_entropy(output, data.test.y)), rel=1e-5)
    assert float(history.state_norm[0, 0]) == pytest.approx(float(norm), rel=1e-5)
    assert np.isnan(history.train_loss[0])
    assert np.isnan(history.lr[0])


def test_training_scores_are_those_before_each_step():
    data = task()
    loss, right = 0.0, 0
    loader = Loader(data.train, dataset=data, batch=10)
    learner = cs.rules.DFA().attach(made(), generator=rng.stream(1, "rule"))
    optimiser = torch.optim.AdamW(learner.param_groups(), fused=True)
    for x, y in loader.epoch(1, 1):
        with torch.no_grad():
            output = learner.network(x)
        loss += float(F.cross_entropy(output, y, reduction="sum"))
        right += int((output.argmax(1) == y).sum())
        optimiser.zero_grad()
        learner.backward(x, y)
        optimiser.step()
    history = fit(data=data).history
    assert float(history.train_loss[1]) == pytest.approx(loss / 44, rel=1e-5)
    assert float(history.train_acc[1]) == right / 44


def test_rates_are_those_of_the_epochs():
    cosine = fit(epochs=4, keep=()).history.lr.values[1:]
    assert cosine == pytest.approx([1e-3 * (1 + math.cos(math.pi * e / 4)) / 2 for e in range(4)])
    assert fit(schedule="constant").history.lr.values[1:].tolist() == [1e-3] * 3


def test_epochs_between_evaluations_have_no_test_scores():
    every = fit(epochs=5, keep=()).history
    some = fit(epochs=5, keep=(), evaluate_every=3).history
    evaluated = np.isfinite(some.test_loss.values)
    assert evaluated.tolist() == [True, False, False, True, False, True]
    assert np.isfinite(some.state_norm.values).all(axis=1).tolist() == evaluated.tolist()
    assert np.array_equal(some.train_loss, every.train_loss, equal_nan=True)  # looking changes nothing
    assert np.array_equal(some.test_loss[evaluated], every.test_loss[evaluated])


def test_validation_examples_are_not_trained_on():
    data = task(validation=10)
    seen = []

    class Listening(Dropping):
        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                seen.append(x.detach())
            return super().forward(x)

    fit(Listening, data=data, blocks=["b"])
    trained = {tuple(row) for x in seen for row in x.tolist()}
    assert trained >= {tuple(row) for row in data.train.x.tolist()}
    assert not trained & {tuple(row) for row in data.validation.x.tolist()}


def test_the_last_partial_batch_is_kept_or_dropped():
    taken = []
    fit(progress=lambda epoch, step, steps: taken.append((epoch, step, steps)))
    assert taken == [(epoch, step, 5) for epoch in (1, 2, 3) for step in (1, 2, 3, 4, 5)]
    taken.clear()
    result = fit(drop_last=True, progress=lambda *at: taken.append(at))
    assert taken[-1] == (3, 4, 4)
    assert result.history.train_loss.attrs["n"] == 40
    learner = own_loop(made(), cs.rules.DFA(), task(), drop_last=True)
    assert same(result.learner, learner)


def test_callbacks_are_told_after_each_epoch():
    told = []
    result = fit(callbacks=[lambda end: told.append((end.epoch, end.epochs, end.row)), lambda end: end.learner.states])
    assert [(epoch, epochs) for epoch, epochs, _ in told] == [(e, 3) for e in range(4)]
    for epoch, _, row in told:
        assert row["test_loss"] == float(result.history.test_loss[epoch])
        assert row["seconds"] > 0


def test_metrics_of_the_rule_are_in_the_history():
    history = fit(rule=cs.rules.DFA(penalty=0.1)).history
    assert np.isnan(history.penalty[0])
    assert (history.penalty[1:] > 0).all()


def test_a_metric_of_one_phase_is_nan_in_the_others():
    rule = cs.rules.Handover(cs.rules.DFA(penalty=0.1), cs.rules.BP(), at=0.5)  # within the second of three epochs
    penalty = fit(rule=rule, epochs=3).history.penalty.values
    assert np.isfinite(penalty).tolist() == [False, True, True, False]


def test_no_accuracy_without_classes():
    result = fit(loss=lambda output, y: (output.flatten(1).mean(1) - y).square(), network=Sequences, blocks=["b"])
    assert result.status == "finished"
    assert np.isnan(result.history.train_acc).all()
    assert np.isnan(result.history.test_acc).all()
    assert "classes" in result.history.test_acc.attrs["why_nan"]


class Sequences(Dropping):
    def forward(self, x):
        return super().forward(x).unsqueeze(1).repeat(1, 2, 1)


# --- estimators -------------------------------------------------------------------------------------------------------


def test_estimators_train_at_their_own_rate_and_are_saved(tmp_path):
    rates = []
    rule = Estimating()
    watch = [lambda end: rates.append(end.learner.param_groups()[1]["lr"])]
    whole = fit(rule=rule, out=tmp_path / "whole", callbacks=watch)
    errors = whole.history.state_error.values
    assert errors[3] < errors[1]
    with pytest.raises(KeyboardInterrupt):
        fit(rule=rule, out=tmp_path / "run", progress=at_step(8, raise_signal))
    again = fit(rule=rule, out=tmp_path / "run")
    assert same(again.learner, whole.learner)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# --- any rule, any network --------------------------------------------------------------------------------------------


WRAPPED = {
    "last-k": {"rule": "dfa", "k": 1},
    "blend": {"first": "bp", "second": "dfa"},
    "handover": {"first": "dfa", "second": "bp", "at": 0.5},
}


@functools.cache
def few_digits():
    digits = cs.data.load("digits")
    train, test = digits.train[slice(40)], digits.test[slice(20)]
    return from_tensors(train.x, train.y, test.x, test.y, classes=10, mean=digits.mean, std=digits.std)


@pytest.mark.parametrize("network", [entry.key for entry in cs.nets.REGISTRY])
@pytest.mark.parametrize("rule", [entry.key for entry in cs.rules.REGISTRY])
def test_every_rule_trains_every_network_that_it_is_defined_on(rule, network):
    data = few_digits()
    make = config.NetworkSpec(network, config.network_options(network), data.shape, data.classes)
    chosen = config.make_rule(rule, WRAPPED.get(rule, {}))
    try:
        chosen.attach(make(), training_steps=6)
    except UsageError as refusal:
        with pytest.raises(UsageError, match=re.escape(str(refusal))):
            fit(make, chosen, data, epochs=2, batch=16)
        return
    result = fit(make, chosen, data, epochs=2, batch=16)
    assert result.status == "finished"
    assert np.isfinite(result.history.test_loss).all()
    assert not same(result.network, made(make))


def test_networks_may_be_modules_callables_or_specifications():
    expected = fit(net()).network
    module = made()
    assert same(fit(module).network, expected)
    assert same(fit(lambda: cs.nets.ResMLP(fits.FEATURES, 8, 2, fits.CLASSES)).network, expected)
    assert same(module, expected)  # a module is trained as it is


def test_a_foreign_module_with_a_tuple_as_output():
    class Pair(Dropping):
        def forward(self, x):
            h = torch.relu(self.b(torch.relu(self.a(x))))
            return self.c(h), h

    assert fit(Pair, cs.rules.FA(), blocks=["b"]).status == "finished"


def test_the_network_is_left_in_train_mode():
    assert all(module.training for module in fit(Dropping, blocks=["b"]).network.modules())


def test_the_blocks_can_be_compiled():
    pytest.importorskip("torch._dynamo")
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: compiled(function, **options))
        assert same(fit(compile=True).learner, fit().learner)
    torch._dynamo.reset()


def test_a_learner_goes_on_after_fit():
    result = fit()
    before = [p.clone() for p in result.network.parameters()]
    x, y = task().train.x, task().train.y
    result.learner.backward(x, y)
    assert all(p.grad is not None for p in result.network.parameters())
    assert all(torch.equal(p, q) for p, q in zip(result.network.parameters(), before, strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"epochs": 2.0}, "epochs"),
        ({"epochs": True}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"probe": 0}, "probe"),
        ({"threads": 0}, "threads must be a whole number of at least 1, not 0"),
        ({"graph": "on"}, "graph must be 'auto' or 'off'"),
        ({"keep": (0, 9)}, "keep holds epochs from 0 to 3 and 'last', not 9"),
        ({"keep": "first"}, "keep holds"),
        ({"batch": 45}, "a batch of 45 is larger than the set of 44 examples"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"recipe": "study"}, "recipe must be a Recipe"),
        ({"learning_rate": 1}, "unknown option of fit 'learning_rate'"),
        ({"optimiser": "adamww"}, "did you mean 'adamw'"),
        ({"data": "digits"}, "data must be a Dataset"),
        ({"rule": "dfa"}, "rule must be a rule"),
        ({"rule": cs.rules.DFA}, "rule must be a rule"),
        ({"network": 3}, "network must be a module or a callable that makes one, not int"),
        ({"network": lambda: 3}, "network must be a module or a callable that makes one, not int"),
        ({"network": Dropping}, "does not name its blocks"),
        ({"network": Dropping, "blocks": []}, "blocks is empty"),
        ({"network": Dropping, "blocks": "b"}, "blocks must be a list of module names"),
        ({"network": Dropping, "blocks": ["d"]}, "unknown block 'd'"),
        ({"network": lambda: nn.Linear(5, 3), "blocks": [""]}, "does not take clusters's examples of (6,)"),
        ({"network": lambda: cs.nets.ResMLP(6, 8, 2, 2)}, "the network has 2 outputs, but clusters has 3 classes"),
        ({"network": lambda: cs.nets.ResMLP(5, 8, 2, 3)}, "6"),
        ({"rule": cs.rules.LastK(cs.rules.DFA(), 7)}, "LastK.k is 7"),
        ({"loss": F.cross_entropy}, "one value per example"),
        ({"feedback": [torch.zeros(1)]}, "feedback="),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, changes, said):
    with pytest.raises(UsageError) as refused:
        fit(**{"out": tmp_path / "run"} | changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="device 'cuda' cannot be used"):
        fit(device="cuda")


# --- nothing global changes -------------------------------------------------------------------------------------------


def surroundings():
    return {
        "threads": torch.get_num_threads(),
        "cudnn": [
            getattr(torch.backends.cudnn, flag) for flag in ("enabled", "deterministic", "benchmark", "allow_tf32")
        ],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "stream": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002 - that is the point
    }


@pytest.mark.parametrize("ends", ["finished", "diverged", "error", "interrupted"])
def test_nothing_global_is_changed_however_it_ends(ends):
    def fail(*_):
        raise ZeroDivisionError

    before = surroundings()
    network = made_quietly(Dropping)
    if ends == "error":
        with pytest.raises(ZeroDivisionError):
            fit(network, blocks=["b"], threads=2, callbacks=[fail])
    elif ends == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            fit(network, blocks=["b"], threads=2, progress=at_step(2, raise_signal))
    else:
        result = fit(network, blocks=["b"], threads=2, lr=1e30 if ends == "diverged" else 1e-3)
        assert result.status == ends
    assert surroundings() == before


def made_quietly(network):
    with torch.random.fork_rng():
        return network()


def test_it_runs_beside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(fit()))
    thread.start()
    thread.join()
    assert same(results[0].learner, fit().learner)


def test_the_thread_count_is_recorded_and_taken_up_again(tmp_path):
    fit(out=tmp_path / "run", threads=2, epochs=1, keep=("last",))
    assert RunDirectory.open(tmp_path / "run").options["threads"] == 2
    assert fit(out=tmp_path / "run", threads=None, epochs=1, keep=("last",)).resumed
    with pytest.raises(OptionsDifferError, match="threads: 2 there, 1 given"):
        fit(out=tmp_path / "run", threads=1, epochs=1, keep=("last",))
    assert torch.get_num_threads() == 1


# --- the run directory ------------------------------------------------------------------------------------------------


FILES = ["checkpoints", "environment.json", "history.nc", "log.txt", "options.json", "status.json"]


@pytest.mark.parametrize("keep", [(), (0,), ("last",), (0, 2), (1, 3, "last"), [3, 3, "last"]])
def test_keep_says_which_checkpoints_stay(tmp_path, keep):
    fit(out=tmp_path / "run", keep=keep)
    tags = {"last" if item == "last" else f"epoch-{item:04d}" for item in keep}
    assert set(RunDirectory.open(tmp_path / "run").checkpoints()) == tags
    assert [name for name in files_of(tmp_path / "run") if "/" not in name] == FILES


def test_kept_checkpoints_hold_the_learner_of_that_epoch(tmp_path):
    fit(out=tmp_path / "run", keep=(0, 2))
    run = RunDirectory.open(tmp_path / "run")
    found = []
    fit(
        keep=(),
        callbacks=[lambda end: found.append({n: t.clone() for n, t in end.learner.network.state_dict().items()})],
    )
    for epoch in (0, 2):
        tensors, _ = run.load_checkpoint(f"epoch-{epoch:04d}")
        for name, tensor in found[epoch].items():
            assert torch.equal(tensors[f"learner.network.{name}"], tensor)


def test_a_finished_run_is_read_and_nothing_is_done(tmp_path):
    first = fit(out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    def fail(*_):
        raise AssertionError("something was done")

    again = fit(out=tmp_path / "run", callbacks=[fail], progress=fail)
    assert again.resumed
    assert not first.resumed
    assert again.status == "finished"
    assert same(again.learner, first.learner)
    assert again.history.identical(first.history)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_finished_run_without_its_last_checkpoint_says_so(tmp_path):
    fit(out=tmp_path / "run", keep=())
    with pytest.raises(UsageError, match="is finished, and its last checkpoint was not kept"):
        fit(out=tmp_path / "run", keep=())


def test_the_run_on_disk_is_the_result(tmp_path):
    result = fit(out=tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    assert result.directory == tmp_path / "run"
    assert run.status.state == "finished"
    assert run.status.epoch == 3
    assert run.status.detail["test_loss"] == float(result.history.test_loss[-1])
    assert run.history().equals(result.history)
    assert same(fit().learner, result.learner)  # writing changes no bit


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epochs": 4}, "epochs: 3 there, 4 given"),
        ({"seed": 2}, "seed: 1 there, 2 given"),
        ({"lr": 2e-3}, "recipe.lr: 0.001 there, 0.002 given"),
        ({"recipe": cs.recipes.study}, "recipe.clip"),
        ({"rule": cs.rules.DFA(scale=2.0)}, "rule.scale: 1.0 there, 2.0 given"),
        ({"rule": cs.rules.BP()}, 'rule.name: "dfa" there, "bp" given'),
        ({"network": net(depth=3)}, "network.options.depth: 2 there, 3 given"),
        ({"data": task(seed=5)}, "data.fingerprint"),
        ({"data": task(mean=(0.0,) * 6, std=(2.0,) * 6)}, "data.normalise"),
        ({"keep": ("last",)}, "keep"),
        ({"evaluate_every": 2}, "evaluate_every: 1 there, 2 given"),
        ({"probe": 5}, "probe: 1024 there, 5 given"),
        ({"precision": "float64"}, "recipe.precision"),
        ({"loss": lambda output, y: F.cross_entropy(output, y, reduction="none")}, "attach.loss"),
        ({"feedback": [torch.ones(8, 3)] * 3}, "attach.feedback"),
        ({"compile": True}, "compile"),
    ],
)
def test_other_options_are_refused_by_name(tmp_path, changes, named, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # importing all that it needs takes seconds
    fit(out=tmp_path / "run")
    before = bits(tmp_path / "run")
    with pytest.raises(OptionsDifferError) as refused:
        fit(**changes, out=tmp_path / "run")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    assert bits(tmp_path / "run") == before


def test_other_feedback_is_other_options(tmp_path):
    for value in (1.0, 1.0, 2.0):
        given = {"out": tmp_path / "run", "feedback": [torch.full((8, 3), value)] * 3}
        if value == 2.0:
            with pytest.raises(OptionsDifferError, match=r"attach\.feedback"):
                fit(**given)
        else:
            fit(**given)


def test_a_module_is_known_by_the_bits_that_it_starts_from(tmp_path):
    fit(made(Dropping), blocks=["b"], out=tmp_path / "run")
    assert fit(made(Dropping), blocks=["b"], out=tmp_path / "run").resumed
    with pytest.raises(OptionsDifferError, match=r"network\.fingerprint"):
        fit(made(Dropping, seed=2), blocks=["b"], out=tmp_path / "run")


def test_a_run_that_another_process_has_is_left_alone(tmp_path):
    worker = Worker(fits.small, tmp_path / "run", 0.05)
    assert worker.receive() == (1, 1)
    with pytest.raises(RunBusyError, match=f"process {worker.process.pid}"):
        fit(out=tmp_path / "run")
    assert worker.received()[-1] == "finished"
    assert fit(out=tmp_path / "run").resumed


# --- interruptions ----------------------------------------------------------------------------------------------------


def at_step(number: int, action):
    """Make a progress function that acts at the n-th step that is taken."""
    left = [number]

    def progress(*_):
        left[0] -= 1
        if left[0] == 0:
            action()

    return progress


def raise_signal(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)  # in this thread, and so before the next line of Python


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    fit(out=folder)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 3, 5, 6, 14, 15])  # of three epochs with five each
def test_interrupted_between_two_steps(tmp_path, undisturbed, number, step):
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", progress=at_step(step, lambda: raise_signal(number)))
    run = RunDirectory.open(tmp_path / "run")
    assert run.status.state == "interrupted"
    assert (run.status.epoch, run.status.detail["batch"]) == ((step - 1) // 5, (step - 1) % 5 + 1)
    taken = []
    fit(out=tmp_path / "run", progress=lambda *at: taken.append(at))
    assert len(taken) == 15 - step
    assert_same_run(tmp_path / "run", undisturbed)


def test_interrupted_at_every_step(tmp_path, undisturbed):
    interrupted = 0
    while True:
        try:
            fit(out=tmp_path / "run", progress=at_step(1, raise_signal))
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 15
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("name", ["state-bridge", "credit-bridge", "vector-field"])
def test_estimators_go_on_where_they_were(tmp_path, name):
    """Their noise, their average and the network's warm-up among it."""
    fit(rule=RULES[name], out=tmp_path / "whole")
    for step in (2, 4, 5):  # in the warm-up, across its end, at the end of an epoch
        with pytest.raises(KeyboardInterrupt):
            fit(rule=RULES[name], out=tmp_path / "run", progress=at_step(step, raise_signal))
    result = fit(rule=RULES[name], out=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert {"estimator_loss"} <= {str(key) for key in result.history}


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_interrupted_at_the_end_of_an_epoch(tmp_path, undisturbed, epoch):
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", callbacks=[lambda end: end.epoch == epoch and raise_signal()])
    assert RunDirectory.open(tmp_path / "run").status.epoch == epoch
    fit(out=tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


def test_an_interruption_that_comes_too_late_is_not_lost(tmp_path, undisturbed):
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", callbacks=[lambda end: end.epoch == 3 and raise_signal()])
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("step", [2, 7])
def test_a_second_ctrl_c_in_the_middle_of_a_step_saves_nothing_that_is_half_done(tmp_path, step):
    angry = []

    def vent(*_):
        while angry:
            raise_signal(angry.pop())

    def make():
        network = net()()
        network.out_ln.register_full_backward_hook(vent)
        return network

    def progress(*_):
        taken.append(1)
        angry.extend([signal.SIGINT] * 2 if len(taken) == step - 1 else [])

    taken = []
    with pytest.raises(KeyboardInterrupt):
        fit(make, rule=cs.rules.BP(), out=tmp_path / "run", progress=progress)
    assert len(taken) == step - 1
    run = RunDirectory.open(tmp_path / "run")
    assert (run.status.state, run.status.epoch) == ("interrupted", (step - 1) // 5)
    fit(make, rule=cs.rules.BP(), out=tmp_path / "run")
    fit(make, rule=cs.rules.BP(), out=tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_failing_callback_leaves_a_run_that_goes_on(tmp_path, undisturbed):
    def fail(end):
        if end.epoch == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(out=tmp_path / "run", callbacks=[fail])
    fit(out=tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


def test_noise_goes_on_where_it_was(tmp_path):
    whole = fit(Dropping, blocks=["b"])
    with pytest.raises(KeyboardInterrupt):
        fit(Dropping, blocks=["b"], out=tmp_path / "run", progress=at_step(8, raise_signal))
    torch.manual_seed(5)
    assert same(fit(Dropping, blocks=["b"], out=tmp_path / "run").learner, whole.learner)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_another_process_gives_the_same_bits_also_when_it_is_stopped(tmp_path, undisturbed, number):
    worker = Worker(fits.small, tmp_path / "run", 0.02)
    for _ in range(7):
        worker.receive()
    os.kill(worker.process.pid, number)
    said = worker.received()
    worker.join()
    if number == signal.SIGKILL:
        assert worker.process.exitcode == -number
    else:
        assert said[-1] == "interrupted"
    again = Worker(fits.small, tmp_path / "run", 0)
    assert again.received()[-1] == "finished"
    assert_same_run(tmp_path / "run", undisturbed)


def kill(folder: Path, *, kills: int, epochs: int, depth: int, seed: int) -> None:
    """Kill a run at random moments, so many times; in the end it is the undisturbed one."""
    draw = random.Random(seed)
    whole, path = folder / "whole", folder / "run"
    worker = Worker(fits.long, whole, epochs, depth)
    worker.receive()  # at the first step
    started = time.monotonic()
    assert worker.received()[-1] == epochs
    seconds = time.monotonic() - started
    assert worker.join() == 0
    for _ in range(kills):
        worker = Worker(fits.long, path, epochs, depth)
        worker.receive()
        worker.process.join(draw.uniform(0, seconds / kills / 2))  # on a machine twice as fast, still within the run
        worker.kill()
        assert worker.process.exitcode == -signal.SIGKILL
    last = Worker(fits.long, path, epochs, depth)
    last.received()
    assert last.join() == 0
    assert_same_run(path, whole)


def test_killed_at_random_moments(tmp_path):
    kill(tmp_path, kills=3, epochs=10, depth=2, seed=0)


@pytest.mark.slow
def test_a_run_of_two_minutes_killed_twenty_times(tmp_path):
    kill(tmp_path, kills=20, epochs=220, depth=8, seed=1)  # two minutes or so with one thread


# --- divergence -------------------------------------------------------------------------------------------------------


class Poison(nn.Module):
    """Pass on what comes, until the n-th training step: then NaN, forwards or backwards."""

    def __init__(self, step: int, *, backwards: bool = False):
        super().__init__()
        self.step, self.backwards = step, backwards
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def forward(self, h):
        if not self.training:
            return h
        self.taken += 1
        bad = torch.where(self.taken == self.step, math.nan, 1.0)
        return Backwards.apply(h, bad) if self.backwards else h * bad


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bad):
        ctx.save_for_backward(bad)
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def poisoned(step: int, *, backwards: bool = False, block: int = 1):
    def make():
        network = net(depth=3)()
        poison = Poison(step, backwards=backwards)
        network.blocks[block] = nn.Sequential(network.blocks[block], poison)
        return network

    return make


@pytest.mark.parametrize("rule", [cs.rules.BP(), cs.rules.DFA(), cs.rules.FA()], ids=["bp", "dfa", "fa"])
@pytest.mark.parametrize("step", [1, 8, 15])
def test_the_step_layer_and_tensor_of_a_divergence(tmp_path, rule, step):
    result = fit(poisoned(step), rule, out=tmp_path / "run")
    assert result.status == "diverged"
    epoch = (step - 1) // 5 + 1
    assert result.detail == {"epoch": epoch, "step": step, "layer": "blocks.1", "tensor": "state 2"}
    run = RunDirectory.open(tmp_path / "run")
    assert run.status.state == "diverged"
    assert {"epoch": run.status.epoch, **run.status.detail} == result.detail
    assert result.history.epoch.values.tolist() == list(range(epoch))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_is_found_where_it_broke(clip):
    result = fit(poisoned(8, backwards=True), cs.rules.BP(), clip=clip)
    # the head, the last block and its input are fine; the block's own last parameter is the first to be met
    assert result.detail == {"epoch": 2, "step": 8, "layer": "blocks.1", "tensor": "gradient of blocks.1.0.w2.bias"}


@pytest.mark.parametrize("evaluate_every", [1, 10])
def test_parameters_that_break_in_the_last_step_of_an_epoch_are_not_kept(tmp_path, evaluate_every):
    result = fit(poisoned(10, backwards=True), cs.rules.BP(), out=tmp_path / "run", evaluate_every=evaluate_every)
    assert result.status == "diverged"
    assert (result.detail["epoch"], result.detail["step"]) == (2, 10)
    tensors, _ = RunDirectory.open(tmp_path / "run").load_checkpoint("last")
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_the_last_good_checkpoint_stays(tmp_path):
    fit(poisoned(13), out=tmp_path / "run", keep=(0, "last"))
    good = fit(poisoned(-1), out=tmp_path / "good", keep=(2, "last"))
    last, _ = RunDirectory.open(tmp_path / "run").load_checkpoint("last")
    second, _ = RunDirectory.open(tmp_path / "good").load_checkpoint("epoch-0002")
    assert good.status == "finished"
    assert len(second) > 10
    for name, tensor in second.items():
        assert torch.equal(tensor, last[name]), name


def test_the_learner_goes_back_to_the_last_good_state():
    result = fit(poisoned(13))
    kept = []
    fit(poisoned(-1), callbacks=[lambda end: kept.append([p.clone() for p in end.learner.network.parameters()])])
    assert all(torch.equal(p, q) for p, q in zip(result.network.parameters(), kept[2], strict=True))


def test_a_second_call_says_that_it_diverged(tmp_path):
    first = fit(poisoned(8), out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = fit(poisoned(8), out=tmp_path / "run")
    assert again.resumed
    assert (again.status, again.detail) == ("diverged", first.detail)
    assert again.history.identical(first.history)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_divergence_after_an_interruption_is_the_same(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(poisoned(8), out=tmp_path / "run", progress=at_step(7, raise_signal))
    assert fit(poisoned(8), out=tmp_path / "run").detail == fit(poisoned(8)).detail


@pytest.mark.parametrize("rule", [cs.rules.BP(), cs.rules.DFA()], ids=["bp", "dfa"])
def test_a_rate_that_is_far_too_high(rule):
    """The oracle takes the same steps and looks at every tensor, in the order in which they come about."""

    def first_bad():
        data = task()
        learner = rule.attach(made(), generator=rng.stream(1, "rule"))
        optimiser = torch.optim.AdamW(learner.param_groups(lr=1e30), fused=True)
        names = ["stem", "blocks.0", "blocks.1", "head"]
        step = 0
        for epoch in (1, 2, 3):
            for x, y in Loader(data.train, dataset=data, batch=10).epoch(1, epoch):
                step += 1
                h = learner.network.embed(x)
                for l in range(3):
                    if not h.isfinite().all():
                        return {"epoch": epoch, "step": step, "layer": names[l], "tensor": f"state {l}"}
                    h = h + learner.network.blocks[l](h) if l < 2 else h
                optimiser.zero_grad()
                loss = learner.backward(x, y)
                if not learner.outputs.isfinite().all():
                    return {"epoch": epoch, "step": step, "layer": "head", "tensor": "outputs"}
                if not loss.isfinite():
                    return {"epoch": epoch, "step": step, "layer": "head", "tensor": "loss"}
                for name, p in reversed([*learner.network.named_parameters()]):
                    if not p.grad.isfinite().all():
                        layer = "stem" if name.startswith("embed") else "head" if name.startswith("out") else name[:8]
                        return {"epoch": epoch, "step": step, "layer": layer, "tensor": f"gradient of {name}"}
                optimiser.step()
        raise AssertionError

    result = fit(rule=rule, lr=1e30, schedule="constant")
    assert result.status == "diverged"
    assert result.detail == first_bad()


def test_a_network_that_is_broken_from_the_beginning(tmp_path):
    def broken():
        network = net()()
        with torch.no_grad():
            network.blocks[1].w1.weight[0, 0] = math.nan
        return network

    result = fit(broken, out=tmp_path / "run")
    assert (result.status, result.detail["layer"], result.detail["tensor"]) == ("diverged", "blocks.1", "state 2")
    assert result.history.sizes["epoch"] == 0
    assert fit(broken, out=tmp_path / "run").detail == result.detail


def test_a_test_loss_that_is_not_finite_is_a_divergence():
    class Cold(Dropping):
        def forward(self, x):
            output = super().forward(x)
            return output if self.training else output * math.inf

    result = fit(Cold, blocks=["b"])
    assert result.status == "diverged"
    assert result.detail == {"epoch": 0, "step": 0, "layer": "head", "tensor": "test_loss"}


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path, undisturbed):
    path = tmp_path / "run"
    epoch_1 = {}

    def remember(end):
        if end.epoch == 1:
            epoch_1.update({file: file.read_bytes() for file in path.rglob("*.safetensors")})

    def fill(epoch, step, steps):
        if epoch == 2 and step == steps:
            limit.enter_context(disks.longest_file(1000))

    with contextlib.ExitStack() as limit, pytest.raises(StorageError) as refused:
        fit(out=path, progress=fill, callbacks=[remember])
    assert "cannot be written" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert RunDirectory.open(path).status.state == "interrupted"
    assert {file: file.read_bytes() for file in path.rglob("*.safetensors")} == epoch_1
    fit(out=path)
    assert_same_run(path, undisturbed)


def test_a_small_disk(tmp_path, undisturbed):
    folder = tmp_path / "disk"
    folder.mkdir()
    with disks.small_disk(folder, "512k"):
        filler = folder / "filler"
        with pytest.raises(StorageError, match="the disk is full"):
            fit(out=folder / "run", callbacks=[lambda end: end.epoch == 1 and fill_disk(filler)])
        assert RunDirectory.open(folder / "run").load_checkpoint("last")[1]
        filler.unlink()
        fit(out=folder / "run")
        assert_same_run(folder / "run", undisturbed)


def fill_disk(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def test_a_read_only_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with disks.read_only(folder), pytest.raises(StorageError) as refused:
        fit(out=folder / "run")
    assert "\n" not in str(refused.value)
    assert not list(folder.iterdir())


def test_a_disk_that_becomes_read_only(tmp_path, undisturbed):

    path = tmp_path / "run"
    with contextlib.ExitStack() as mounted, pytest.raises(StorageError):
        fit(out=path, callbacks=[lambda end: end.epoch == 1 and mounted.enter_context(disks.read_only(path))])
    assert RunDirectory.open(path).load_checkpoint("last")[1]
    fit(out=path)
    assert_same_run(path, undisturbed)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CreditscopeError, match="is a file where a folder should be"):
        fit(out=tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("damage", ["cut", "foreign", "flipped"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", progress=at_step(8, raise_signal))
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    whole = last.read_bytes()
    broken = {"cut": whole[:-10], "foreign": b"PK" + whole, "flipped": whole[:-1] + bytes([whole[-1] ^ 1])}[damage]
    last.write_bytes(broken)
    with pytest.raises(UsageError, match=r"last\.safetensors"):
        fit(out=tmp_path / "run")
    assert last.read_bytes() == broken
