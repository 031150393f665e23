import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import creditscope as cs
from creditscope.auditing import monitor as monitoring
from creditscope.auditing.monitor import Monitor, MonitorWarning, ReferenceLostError
from creditscope.errors import MissingError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::creditscope.auditing.monitor.MonitorWarning")


def examples(n=40, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


class Training:
    """A loop of one's own."""

    def __init__(self, rule=None, lr=0.1):
        torch.manual_seed(0)
        self.learner = (rule or cs.rules.DFA()).attach(cs.nets.ResMLP(inputs=6, width=8, depth=3, classes=3))
        self.optimiser = torch.optim.SGD(self.learner.parameters(), lr)

    def step(self):
        self.optimiser.zero_grad()
        self.learner.backward(*examples())
        self.optimiser.step()


def monitored(training, steps, *, start=0, **options):
    with Monitor(training.learner, *examples(48, 2), **options) as monitor:
        if start == 0:
            monitor(0)
        for step in range(start + 1, steps + 1):
            training.step()
            monitor(step)
    return monitor


# --- the schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "due"), [("log", [0, 1, 2, 4, 8]), (3, [0, 3, 6, 9]), (1, [*range(11)])])
def test_moments_are_due_by_their_number(every, due):
    assert [at for at in range(11) if Monitor.is_due(SimpleNamespace(every=every), at)] == due


def test_records_are_quick_audits_at_those_moments():
    training = Training()
    found = monitored(training, 4).data
    assert [*found.step.values] == [0, 1, 2, 4]
    now = cs.audit(training.learner, *examples(48, 2), tier="quick").data
    for name in ("cosine", "state_norm", "growth", "cosine_mean", "best_share"):
        np.testing.assert_array_equal(found[name].isel(step=-1), now[name])
        assert found[name].attrs["long_name"] == now[name].attrs["long_name"]


def test_moments_are_counted_where_no_number_is_given():
    training = Training()
    monitor = Monitor(training.learner, *examples(), every=2, unit="epoch")
    for _ in range(5):
        monitor()
    assert [*monitor.data.epoch.values] == [2, 4]


def test_the_training_is_the_same_to_the_bit_and_so_is_the_global_stream(untouched_rng):
    torch.set_rng_state(state := torch.get_rng_state())
    plain = Training(cs.rules.FA())
    watched = Training(cs.rules.FA())
    torch.set_rng_state(state)
    for _ in range(5):
        plain.step()
    monitored(watched, 5, every=1)
    for a, b in zip(plain.learner.parameters(), watched.learner.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)
    states = [training.learner.get_extra_state() for training in (plain, watched)]
    assert torch.equal(states[0]["generator"], states[1]["generator"])
    assert states[0]["step"] == states[1]["step"]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_says_what_the_monitor_says(tmp_path):
    path = tmp_path / "new" / "m.jsonl"
    monitor = monitored(Training(), 4, out=path)
    assert cs.load_monitor(path).identical(monitor.data)
    lines = path.read_text("utf-8").splitlines()
    assert json.loads(lines[0])["format"] == "creditscope.monitor"
    assert [json.loads(line)["at"] for line in lines[1:]] == [0, 1, 2, 4]


def test_each_record_is_on_disk_when_it_is_made(tmp_path):
    training, path = Training(), tmp_path / "m.jsonl"
    monitor = Monitor(training.learner, *examples(), every=1, out=path)
    for step in range(3):
        monitor(step)
        assert cs.load_monitor(path).sizes["step"] == step + 1


def test_a_line_that_a_kill_cut_short_does_not_count_and_is_mended(tmp_path):
    path = tmp_path / "m.jsonl"
    training = Training()
    monitored(training, 3, every=1, out=path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [*cs.load_monitor(path).step.values] == [0, 1, 2]
    monitor = Monitor(training.learner, *examples(48, 2), every=1, out=path)
    monitor(3)
    assert [*cs.load_monitor(path).step.values] == [0, 1, 2, 3]
    xr_equal(cs.load_monitor(path), monitor.data)


def xr_equal(a, b):
    assert a.drop_vars("seconds").identical(b.drop_vars("seconds"))


def test_a_loop_that_goes_back_writes_what_comes_after_anew(tmp_path):
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    whole = monitored(Training(), 8, every=1, out=one)
    monitored(Training(), 6, every=1, out=other)
    resumed = Training()  # as from a checkpoint at step 4
    for _ in range(4):
        resumed.step()
    again = monitored(resumed, 8, start=4, every=1, out=other)
    xr_equal(again.data, whole.data)
    xr_equal(cs.load_monitor(other), cs.load_monitor(one))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json\n", "is corrupt or no monitor's"),
        (b'{"format": "creditscope.run", "version": 1}\n', "is not from creditscope"),
        (b'{"format": "creditscope.monitor", "version": 99}\n', "newer creditscope"),
    ],
)
def test_files_that_are_not_a_monitors_are_refused(content, message, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        cs.load_monitor(path)


def test_files_of_another_monitor_are_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    monitored(Training(), 1, out=path)
    training = Training()
    with pytest.raises(UsageError, match="counts steps, and this monitor epochs"):
        Monitor(training.learner, *examples(), unit="epoch", out=path)
    torch.manual_seed(0)
    other = cs.rules.DFA().attach(cs.nets.ResMLP(inputs=6, width=8, depth=2, classes=3))
    with pytest.raises(UsageError, match="of another network"):
        Monitor(other, *examples(), out=path)(2)
    with pytest.raises(MissingError):
        cs.load_monitor(tmp_path / "none")


# --- what it finds ----------------------------------------------------------------------------------------------------


def test_the_moment_at_which_a_flag_first_fired_is_kept():
    training = Training()
    monitor = Monitor(training.learner, *examples(), every=1)
    monitor(0)
    assert monitor.first_fired == {}
    block = training.learner.network.blocks[1]
    with torch.no_grad():
        [*block.parameters()][-2].mul_(1e6)
    monitor(1)
    monitor(2)
    assert monitor.first_fired["scale-stability"] == 1
    assert re.search("grows by .* over block 1", monitor.records[1].flags["scale-stability"])
    assert json.loads(monitor.data.attrs["first_fired"]) == monitor.first_fired


def test_a_lost_reference_stops_where_that_was_asked_for():
    training = Training()
    with torch.no_grad():
        next(training.learner.network.parameters()).fill_(float("nan"))
    patient = Monitor(training.learner, *examples())
    verdict = patient(1)
    assert verdict is not None
    assert verdict.status == "cannot judge"
    assert patient.first_fired["reference-validity"] == 1
    with pytest.raises(ReferenceLostError, match="stopped at step 1: states or reference are not finite"):
        Monitor(training.learner, *examples(), stop_on_lost_reference=True)(1)


# --- what it costs ----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only our own steps move; an audit takes ``audit`` seconds."""

    def __init__(self, monkeypatch, audit):
        self.now = 0.0
        real = monitoring.audit

        def slow(*args, **options):
            self.now += audit
            return real(*args, **options)

        monkeypatch.setattr(monitoring, "audit", slow)
        monkeypatch.setattr(monitoring.time, "perf_counter", lambda: self.now)


@pytest.mark.filterwarnings("error")
def test_a_dear_monitor_warns_and_once(monkeypatch):
    clock = Clock(monkeypatch, audit=1.0)
    monitor = Monitor(Training().learner, *examples(), every=1)
    for at in range(2):
        clock.now += 9
        monitor(at)
    clock.now += 9
    with pytest.warns(MonitorWarning, match="the monitor took 10% of the time"):
        monitor(2)
    assert monitor.share == pytest.approx(0.1)
    clock.now += 9
    monitor(3)
    monitor.close()


@pytest.mark.filterwarnings("error")
def test_a_logarithmic_schedule_is_judged_at_its_end(monkeypatch):
    clock = Clock(monkeypatch, audit=1.0)
    with Monitor(Training().learner, *examples()) as monitor:
        for at in (0, 1, 2, 4, 8):
            monitor(at)
        clock.now += 1000
    assert monitor.share < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be 'log' or a whole number"),
        ({"every": "lin"}, "every must be 'log' or a whole number"),
        ({"every": True}, "every must be 'log' or a whole number"),
        ({"unit": "second"}, "unknown unit 'second'"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Monitor(Training().learner, *examples(), **options)


def test_a_bare_network_is_refused():
    with pytest.raises(UsageError, match="a monitor takes a learner"):
        Monitor(torch.nn.Linear(2, 2), *examples())


def test_nothing_measured_is_nothing_to_show():
    with pytest.raises(UsageError, match="not measured anything"):
        _ = Monitor(Training().learner, *examples()).data
