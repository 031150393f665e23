"""What fit does beside the training itself: baselines, the audit, the monitor."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import creditscope as cs
from creditscope import config
from creditscope.auditing.monitor import ReferenceLostError
from creditscope.auditing.trained import Scope, Scores, audit_trained, restore, stored_audit
from creditscope.errors import UsageError
from creditscope.rules.baselines import baselines_of, is_baseline
from creditscope.runs import RunDirectory
from tests.fits import bits, files_of, net, options, task

pytestmark = pytest.mark.filterwarnings("ignore::creditscope.auditing.monitor.MonitorWarning")


def same_values(a, b):
    assert {*a.data_vars} == {*b.data_vars}
    for name in a.data_vars:
        if name != "seconds":
            np.testing.assert_array_equal(a[name].values, b[name].values, err_msg=str(name))


# --- baselines --------------------------------------------------------------------------------------------------------


def test_the_matched_baselines():
    rule = cs.rules.DFA(scale=2.0)
    assert baselines_of(rule) == {
        "frozen-bp": cs.rules.Frozen(stem="bp"),
        "frozen-rule": cs.rules.LastK(rule, 0),
        "shallow": cs.rules.Shallow(),
    }
    assert all(map(is_baseline, baselines_of(rule).values()))
    assert not any(map(is_baseline, [rule, cs.rules.BP(), cs.rules.LastK(rule, 1)]))


def test_baselines_are_trainings_of_the_same_seed_and_recipe(tmp_path):
    rule = cs.rules.DFA()
    found = cs.fit(net(), rule, task(), out=tmp_path / "run", baselines=True, clip=1.0, **options())
    assert [*found.baselines] == ["frozen-bp", "frozen-rule", "shallow"]
    assert found.refused == {}
    for name, baseline in baselines_of(rule).items():
        alone = cs.fit(net(), baseline, task(), clip=1.0, **options())
        assert found.baselines[name] == [float(alone.history.test_acc[-1])]
        recorded = RunDirectory.open(tmp_path / "run" / "baselines" / name).options
        own = RunDirectory.open(tmp_path / "run").options
        assert recorded["rule"] == config.to_dict(baseline)
        assert {k for k in own if own[k] != recorded[k]} == {"rule", "keep"}


def test_baselines_leave_the_run_as_it_is(tmp_path):
    cs.fit(net(), cs.rules.FA(), task(), out=tmp_path / "plain", **options())
    cs.fit(net(), cs.rules.FA(), task(), out=tmp_path / "with", baselines=True, **options())
    assert bits(tmp_path / "plain") == bits(tmp_path / "with")


def test_baselines_that_are_there_are_not_trained_again(tmp_path):
    first = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, baselines=True, **options())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, baselines=True, **options())
    assert again.baselines == first.baselines
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_module_begins_anew_for_each_baseline():
    torch.manual_seed(3)
    module = net()()
    start = {name: t.clone() for name, t in module.state_dict().items()}
    found = cs.fit(module, cs.rules.DFA(), task(), baselines=True, **options())
    fresh = net()()
    fresh.load_state_dict(start)
    alone = cs.fit(fresh, cs.rules.Shallow(), task(), **options())
    assert found.baselines["shallow"] == [float(alone.history.test_acc[-1])]


class Narrowing(nn.Module):
    """A block that changes the state's shape: there is no network without it."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(4, 3)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]
        )

    def forward(self, x):
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def test_a_refusal_is_recorded_and_the_others_go_on():
    blocks = {"blocks": ["layers.0", "layers.1"], "head": "head"}
    found = cs.fit(Narrowing, cs.rules.DFA(), task(), baselines=True, **blocks, **options())
    assert {*found.baselines} == {"frozen-bp", "frozen-rule"}
    assert found.refused == {"shallow": "without its blocks the network does not fit: h_0 is (8,), the head takes (4,)"}
    assert {key for key in found.audit.data.attrs if key.startswith("baseline_frozen")} == {
        "baseline_frozen-bp",
        "baseline_frozen-rule",
    }


def test_feedback_of_ones_own_goes_to_the_rule_alone():
    matrices = [torch.ones(8, 3)] * 3
    found = cs.fit(net(), cs.rules.DFA(), task(), baselines=True, feedback=matrices, **options())
    assert found.refused == {}
    assert len(found.baselines) == 3


# --- the audit --------------------------------------------------------------------------------------------------------


def test_the_audit_knows_drift_accuracy_and_baselines():
    found = cs.fit(net(), cs.rules.DFA(), task(test=60), baselines=True, **options())
    data = found.audit.data
    assert data.attrs["n"] == 60
    assert data.attrs["accuracies"] == [float(found.history.test_acc[-1])]
    assert data.attrs["baseline_shallow"] == found.baselines["shallow"]
    made = cs.fit(net(), cs.rules.DFA(), task(test=60), **options(epochs=1, keep=(0,)))
    start = made._initial
    assert start is not None
    name = "blocks.0.w1.weight" if "blocks.0.w1.weight" in start else next(n for n in start if n.endswith("weight"))
    now = dict(found.network.named_parameters())[name].detach().double()
    drift = float((now - start[name].double()).norm() / start[name].double().norm())
    assert float(data.drift.sel(parameter=name)) == pytest.approx(drift)
    assert found.audit is found.audit


def test_without_baselines_depth_is_unmeasured_and_the_accuracy_is_told():
    found = cs.fit(net(), cs.rules.BP(), task(), **options())
    assert "depth-utility" in found.audit.verdict.unmeasured
    assert f"accuracy: {float(found.history.test_acc[-1]):.3f} (n = 1 seed)" in found.audit.to_markdown()


def test_the_audit_is_kept_with_the_run_and_read_again(tmp_path):
    first = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, audit=True, **options())
    assert "audit.nc" in files_of(tmp_path)
    before = (tmp_path / "audit.nc").stat().st_mtime_ns
    again = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, audit=True, **options())
    assert again.resumed
    assert (tmp_path / "audit.nc").stat().st_mtime_ns == before
    same_values(first.audit.data, again.audit.data)
    assert again.audit.verdict == first.audit.verdict


def test_an_audit_of_another_question_or_an_older_version_is_made_again(tmp_path):
    result = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, audit=True, **options())
    scores = Scores([float(result.history.test_acc[-1])], {})
    path = tmp_path / "audit.nc"
    assert stored_audit(path, Scope(), scores) is not None
    assert stored_audit(path, Scope(tier="full"), scores) is None
    assert stored_audit(path, Scope(), Scores([0.5], {"shallow": [0.5]})) is None
    result.audit.data.attrs["version"] = 0
    result.audit.save(path)
    assert stored_audit(path, Scope(), scores) is None
    cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, audit=True, **options())
    assert stored_audit(path, Scope(), scores) is not None


def test_the_audit_changes_no_bit_of_the_training(tmp_path):
    result = cs.fit(net(), cs.rules.DFA(), task(), **options())
    before = {name: t.clone() for name, t in result.learner.state_dict().items() if isinstance(t, torch.Tensor)}
    _ = result.audit
    after = result.learner.state_dict()
    assert all(torch.equal(t, after[name]) for name, t in before.items())


def test_a_run_is_put_together_again_from_its_folder(tmp_path):
    data = cs.data.load("digits")
    network = config.NetworkSpec("resmlp", {"width": 8, "depth": 2}, data.shape, data.classes)
    for rule in (cs.rules.DFA(), cs.rules.Handover(cs.rules.DFA(), cs.rules.FA(), at=0.5)):
        out = tmp_path / type(rule).__name__
        result = cs.fit(network, rule, data, out=out, epochs=1, threads=1, batch=256)
        trained = restore(RunDirectory.open(out))
        own, again = result.learner.state_dict(), trained.learner.state_dict()
        assert {*own} == {*again}
        assert all(torch.equal(t, again[name]) for name, t in own.items() if isinstance(t, torch.Tensor))
        scores = Scores([float(result.history.test_acc[-1])])
        same_values(audit_trained(trained, Scope(tier="quick"), scores).data, _quick(result))
        first = restore(RunDirectory.open(out), 0)
        assert trained.initial is not None
        for name, t in first.learner.network.state_dict().items():
            assert torch.equal(t, trained.initial[name])


def _quick(result):
    from creditscope.auditing.trained import Trained

    assert result._plan is not None
    trained = Trained(result.learner, result._plan.data, result._initial, {})
    return audit_trained(trained, Scope(tier="quick"), Scores([float(result.history.test_acc[-1])])).data


def test_what_cannot_be_put_together_again_says_what_to_do(tmp_path):
    cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path / "data", **options())
    with pytest.raises(UsageError, match=r"'clusters', which is no data set .* as fit\(...\).audit"):
        restore(RunDirectory.open(tmp_path / "data"))
    data = cs.data.load("digits")
    given = {"epochs": 1, "threads": 1, "batch": 256}
    cs.fit(lambda: cs.nets.ResMLP(inputs=64, width=8, depth=2), cs.rules.DFA(), data, out=tmp_path / "net", **given)
    with pytest.raises(UsageError, match="did not record how to make it: pass --module"):
        restore(RunDirectory.open(tmp_path / "net"))
    restore(RunDirectory.open(tmp_path / "net"), make=lambda: cs.nets.ResMLP(inputs=64, width=8, depth=2))
    with pytest.raises(UsageError, match="has no checkpoint of epoch 7; there are epoch-0000, last"):
        restore(RunDirectory.open(tmp_path / "net"), 7, make=lambda: cs.nets.ResMLP(inputs=64, width=8, depth=2))


def test_other_data_than_the_recorded_is_refused(tmp_path):
    data = cs.data.load("digits")
    network = config.NetworkSpec("resmlp", {"width": 8, "depth": 2}, data.shape, data.classes)
    cs.fit(network, cs.rules.DFA(), data, out=tmp_path, epochs=1, threads=1, batch=256)
    path = tmp_path / "options.json"
    path.write_text(path.read_text().replace(data.fingerprint(), "0" * 16))
    with pytest.raises(UsageError, match="other data than the digits that is here now"):
        restore(RunDirectory.open(tmp_path))


# --- the monitor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [cs.rules.FA(), cs.rules.DFA(normalise="example")])
@pytest.mark.parametrize("given", [True, {"every": 2}, {"every": 1, "unit": "epoch"}])
def test_a_monitor_changes_no_bit(rule, given, tmp_path):
    cs.fit(net(), rule, task(), out=tmp_path / "plain", **options())
    found = cs.fit(net(), rule, task(), out=tmp_path / "watched", monitor=given, **options())
    assert bits(tmp_path / "plain") == bits(tmp_path / "watched")
    assert {*files_of(tmp_path / "watched")} - {*files_of(tmp_path / "plain")} == {"monitor.jsonl"}
    assert found.monitor is not None
    assert cs.load_monitor(tmp_path / "watched" / "monitor.jsonl").identical(found.monitor.data)


def test_its_moments_count_through_the_training(tmp_path):
    found = cs.fit(net(), cs.rules.DFA(), task(train=50), monitor=True, **options())
    assert found.monitor is not None
    assert [*found.monitor.data.step.values] == [0, 1, 2, 4, 8]  # 3 epochs of 5 steps
    found = cs.fit(net(), cs.rules.DFA(), task(train=50), monitor={"every": 1, "unit": "epoch"}, **options())
    assert found.monitor is not None
    assert [*found.monitor.data.epoch.values] == [0, 1, 2, 3]
    np.testing.assert_allclose(found.monitor.data.state_norm, found.history.state_norm, rtol=1e-5)


def test_an_interrupted_run_has_the_records_of_a_whole_one(tmp_path):
    whole = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path / "whole", monitor={"every": 1}, **options())

    class EnoughError(Exception):
        pass

    def stop(epoch, step, steps):
        if (epoch, step) == (2, 3):
            raise EnoughError

    with pytest.raises(EnoughError):
        cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path / "cut", monitor={"every": 1}, progress=stop, **options())
    again = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path / "cut", monitor={"every": 1}, **options())
    assert again.monitor is not None
    assert whole.monitor is not None
    assert again.monitor.data.drop_vars("seconds").identical(whole.monitor.data.drop_vars("seconds"))


def test_a_finished_run_still_knows_when_flags_fired(tmp_path):
    first = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, monitor=True, **options())
    again = cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, monitor=True, **options())
    assert first.monitor is not None
    assert again.monitor is not None
    assert again.monitor.first_fired == first.monitor.first_fired
    assert again.monitor.data.identical(first.monitor.data)


def test_a_lost_reference_ends_the_training_where_it_can_go_on(tmp_path):
    recipe = {"optimiser": "sgd", "lr": 1e30}
    given = {"monitor": {"every": 1, "stop_on_lost_reference": True}} | recipe
    with pytest.raises(ReferenceLostError, match="stopped at step"):
        cs.fit(net(), cs.rules.DFA(), task(), out=tmp_path, **given, **options())
    run = RunDirectory.open(tmp_path)
    assert run.status.state == "interrupted"
    fired = json.loads(cs.load_monitor(tmp_path / "monitor.jsonl").attrs["first_fired"])
    assert fired["reference-validity"] >= 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("log", "monitor must be True, or a dict"),
        ({"evry": 1}, "unknown option 'monitor.evry': did you mean 'monitor.every'"),
        ({"every": -1}, "every must be 'log' or a whole number"),
    ],
)
def test_a_bad_monitor_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        cs.fit(net(), cs.rules.DFA(), task(), monitor=given, **options())


def test_a_diverged_run_has_no_accuracy_to_compare():
    found = cs.fit(net(), cs.rules.DFA(), task(), optimiser="sgd", lr=1e38, baselines=True, **options())
    assert found.status == "diverged"
    assert not any(map(math.isnan, (value for values in found.baselines.values() for value in values)))
    assert all(reason == "diverged" for reason in found.refused.values())
