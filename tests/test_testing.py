"""The conformance suite passes every rule of ours, and catches the mistakes that rules are written with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import pytest
import torch
from torch import nn

from creditscope.errors import UsageError
from creditscope.nets import ResMLP
from creditscope.registry import Registry
from creditscope.rules import (
    BP,
    DFA,
    FA,
    REGISTRY,
    Blend,
    Frozen,
    Handover,
    LastK,
    LocalRule,
    Matrices,
    Rule,
    draw,
    given_list,
)
from creditscope.rules._base import Outcome
from creditscope.testing import NETWORKS, Report, check_network, check_rule
from tests.oracles import untouched
from tests.zoo import BY_NAME, CASES, Outside

SMALL = {"hidden": 8, "steps": 3}
"""Options that keep the rules with estimators or phases small."""


def instance(key):
    """Make a registered rule, with a rule for each of its fields that wants one."""
    kind = REGISTRY.load(key)
    options = {item.name: SMALL[item.name] for item in fields(kind) if item.name in SMALL}
    wanted = [i for i in fields(kind) if i.default is MISSING and i.default_factory is MISSING]
    return kind(**options, **{item.name: rule for item, rule in zip(wanted, (DFA(), BP()), strict=False)})


@pytest.mark.parametrize("key", [entry.key for entry in REGISTRY])
def test_every_registered_rule_conforms(key):
    report = check_rule(instance(key))
    assert "resmlp" in report.checked
    assert {*report.checked} | report.refused.keys() == NETWORKS.keys()


@pytest.mark.parametrize(
    "rule",
    [
        FA(level="block", normalise="example"),
        FA(penalty=0.1),
        DFA(normalise="batch", drive="input", penalty=0.1, tokens="shared", distribution="uniform"),
        Frozen(stem="none"),
        LastK(Blend(DFA(), Handover(DFA(), BP())), 1),
    ],
    ids=lambda rule: repr(rule)[:40],
)
def test_other_options_conform(rule):
    assert check_rule(rule).checked


def test_refusals_are_reported():
    report = check_rule(FA(level="block"))
    assert report.checked == ("resmlp", "mlp", "chain", "vit")
    assert "changes the state's shape" in report.refused["small-cnn"]


def test_a_rule_on_a_network_of_ones_own():
    case = BY_NAME["convolutional"]
    x, y = case.batch()
    net = case.network()
    with untouched(net):
        assert check_rule(DFA(), net, blocks=case.blocks, x=x, y=y) == Report(("Convolutional",))
    with pytest.raises(
        AssertionError, match=r"FA is not defined on any network: block 'conv1' changes the state's shape"
    ):
        check_rule(FA(level="block"), net, blocks=case.blocks, x=x, y=y)
    with pytest.raises(UsageError, match=r"Convolutional has no example\(\): pass x="):
        check_rule(DFA(), net, blocks=case.blocks)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signs(LocalRule):
    """a_l = B_l sign(e): right."""

    has_feedback = True

    def build(self, site, generator, feedback):
        shapes, outputs = site.topology.shapes, site.topology.output_shape.numel()
        if feedback is not None:
            return given_list(feedback, [(s.numel(), outputs) for s in shapes], site.factory, "Signs")
        options = {"scale": 1.0, "distribution": "normal", "generator": generator, "factory": site.factory}
        return Matrices({str(l): draw((s.numel(), outputs), outputs, **options) for l, s in enumerate(shapes)})

    def formula(self, states, outputs, errors, matrices, terminal) -> Sequence[torch.Tensor]:
        return [(errors.sign() @ B.mT).reshape(h.shape) for h, B in zip(states, matrices, strict=True)]


@dataclass(frozen=True)
class GlobalDraws(Signs):
    """Draws its matrices from the global generator."""

    def build(self, site, generator, feedback):
        torch.manual_seed(0)
        return Matrices({str(l): torch.randn(s.numel(), 3).double() for l, s in enumerate(site.topology.shapes)})


@dataclass(frozen=True)
class OwnSeed(Signs):
    """Ignores the generator that it is given."""

    def build(self, site, generator, feedback):
        return super().build(site, torch.Generator().manual_seed(3), feedback)


@dataclass(frozen=True)
class PassesOver(Signs):
    """Draws its own matrices where others are given."""

    def build(self, site, generator, feedback):
        return super().build(site, generator, None)


@dataclass(frozen=True)
class OneRun(Signs):
    """Takes the first axis for the batch."""

    def formula(self, states, outputs, errors, matrices, terminal):
        return [(errors.sign() @ B.mT).reshape(h.shape) - h.mean(0) for h, B in zip(states, matrices, strict=True)]


@dataclass(frozen=True)
class WrongShape(Signs):
    """Forgets the last state."""

    def formula(self, states, outputs, errors, matrices, terminal):
        return super().formula(states, outputs, errors, matrices, terminal)[:-1]


@dataclass(frozen=True)
class Noisy(Signs):
    """Adds noise from the global generator."""

    def credit(self, site, pathway, tape):
        return [a + torch.randn_like(a) for a in super().credit(site, pathway, tape)]


@dataclass(frozen=True)
class Infinite(Signs):
    """Divides by zero."""

    def formula(self, states, outputs, errors, matrices, terminal):
        return [a / 0 for a in super().formula(states, outputs, errors, matrices, terminal)]


@dataclass(frozen=True)
class Trains(Signs):
    """Changes the network while it looks."""

    def credit(self, site, pathway, tape):
        next(site.cut.network.parameters()).data.mul_(0.9)
        return super().credit(site, pathway, tape)


@dataclass(frozen=True)
class Accumulates(Signs):
    """Leaves gradients behind while it looks."""

    def credits(self, site, pathway, x, y):
        with site.cut.tape(x, y) as tape:
            tape.backward([None] * (site.cut.depth + 1), 1.0)
        return super().credits(site, pathway, x, y)


@dataclass(frozen=True)
class Switches(Signs):
    """Leaves the network in evaluation mode."""

    def credit(self, site, pathway, tape):
        site.cut.network.eval()
        return super().credit(site, pathway, tape)


@dataclass(frozen=True)
class LeavesHooks(Signs):
    """Leaves a hook behind."""

    def credit(self, site, pathway, tape):
        site.cut.network.register_forward_hook(lambda *_: None)
        return super().credit(site, pathway, tape)


@dataclass(frozen=True)
class ScaledLoss(Signs):
    """Returns the scaled loss."""

    def step(self, site, pathway, x, y, scale):
        outcome = super().step(site, pathway, x, y, scale)
        return type(outcome)(outcome.loss * 2, outcome.outputs, outcome.metrics)


@dataclass(frozen=True)
class Overwrites(Signs):
    """Puts its gradient in place of what was there."""

    def step(self, site, pathway, x, y, scale):
        site.cut.network.zero_grad()
        return super().step(site, pathway, x, y, scale)


@dataclass(frozen=True)
class Unscaled(Signs):
    """Forgets the scale."""

    def step(self, site, pathway, x, y, scale):
        return super().step(site, pathway, x, y, 1.0)


@dataclass(frozen=True)
class Remembers(Signs):
    """Keeps a count that is not saved."""

    seen: dict = field(default_factory=dict, compare=False)

    def credit(self, site, pathway, tape):
        if torch.is_grad_enabled():
            return super().credit(site, pathway, tape)
        self.seen[id(pathway)] = self.seen.get(id(pathway), 0) + 1
        return [a * self.seen[id(pathway)] for a in super().credit(site, pathway, tape)]


@dataclass(frozen=True)
class FrozenInName(Signs):
    """Says that it freezes the stem, and trains it."""

    def frozen(self, site):
        return {*site.topology.sections["stem"]}


@dataclass(frozen=True)
class Swallows(Signs):
    """Goes on where the network failed."""

    def step(self, site, pathway, x, y, scale):
        try:
            return super().step(site, pathway, x, y, scale)
        except ZeroDivisionError:
            return Outcome(torch.zeros(()), torch.zeros(1))


@dataclass(frozen=True)
class Undocumented(Signs):
    pass


class NoDataclass(Signs):
    """Has options that nobody can see."""


@dataclass(frozen=True)
class LateRefusal(Signs):
    """Refuses when it is too late."""

    def step(self, site, pathway, x, y, scale):
        raise UsageError("not today")


@dataclass(frozen=True)
class BadMetrics(Signs):
    """Gives numbers for tensors."""

    def step(self, site, pathway, x, y, scale):
        outcome = super().step(site, pathway, x, y, scale)
        return type(outcome)(outcome.loss, outcome.outputs, {"loss": float(outcome.loss)})


@dataclass(frozen=True)
class HalfAGroup(Signs):
    """Brings a parameter and hides it from the optimiser."""

    def build(self, site, generator, feedback):
        pathway = super().build(site, generator, feedback)
        pathway.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        return pathway

    def estimator_groups(self, pathway):
        return []


def test_the_right_rule_passes():
    assert check_rule(Signs()).checked == tuple(NETWORKS)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (GlobalDraws(), "attach draws from the global random generator"),
        (OwnSeed(), "another seed gives the same matrices"),
        (PassesOver(), "feedback= is passed over in silence"),
        (OneRun(), "formula() with one more axis in front is not what each run gives alone"),
        (WrongShape(), "gave credits of shapes"),
        (Noisy(), "backward() in evaluation mode changes the global random generator"),
        (Infinite(), "credit 0 is not finite"),
        (Trains(), "credits() changes parameter network."),
        (Accumulates(), ".grad"),
        (Switches(), "credits() changes the mode of 'network"),
        (LeavesHooks(), "credits() changes the hooks of 'network'"),
        (ScaledLoss(), "backward() does not return the mean loss"),
        (Overwrites(), "backward() does not add to the gradients that are there"),
        (Unscaled(), "backward(scale=0.25) is not a quarter of the gradient"),
        (Remembers(), "does not go on with the same bits"),
        (FrozenInName(), "is frozen and gets a gradient"),
        (Swallows(), "an exception in the network's forward was swallowed"),
        (Undocumented(), "Undocumented needs a docstring"),
        (NoDataclass(), "NoDataclass must be a dataclass itself"),
        (LateRefusal(), "it was attached, and refuses later: not today"),
        (BadMetrics(), "metrics()['loss'] must be a detached scalar tensor"),
        (HalfAGroup(), "param_groups() must hold every parameter once"),
        (DFA, "check_rule takes a rule, an instance of creditscope.rules.Rule"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_mistakes_are_caught_in_one_line(rule, message):
    with pytest.raises(AssertionError) as caught:
        check_rule(rule)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["chain", "outside", "stages", "tuple-input", "token-output", "checkpointed", "dropout"]
)
def test_networks_conform(name):
    case = BY_NAME[name]
    net = case.network(dtype=torch.float32).train()
    x, y = case.batch()
    with untouched(net):
        report = check_network(net, **{**case.cut, "blocks": case.blocks}, x=x, y=y)
    assert {"BP", "DFA"} <= {*report.checked}
    assert ("FA(level='weight')" in report.refused) == case.opaque
    assert len(report.checked) + len(report.refused) == 5


def test_a_network_that_names_its_blocks_needs_no_more():
    assert check_network(ResMLP(6, width=8, depth=2, classes=3)).refused == {}


def test_a_network_that_cannot_be_cut_is_refused():
    class Functional(Outside):
        def forward(self, x):
            h = self.embed(x)
            for block in self.blocks:
                h = h + block(h)
            return h.relu()[:, :3]

    x, y = CASES[0].batch()
    with pytest.raises(UsageError, match="cannot tell h_L"):
        check_network(Functional(), blocks=["blocks.0", "blocks.1"], x=x, y=y)


def test_a_network_whose_gradient_is_not_its_own_is_caught():
    """A layer with a backward of its own makes autograd's gradient something else than the loss's slope."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.clone()

        @staticmethod
        def backward(ctx, delta):
            return delta.flip(-1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, h):
            return Backward.apply(self.a(h))

    x, y = CASES[0].batch()
    with pytest.raises(AssertionError, match="along the exact credit of state 0"):
        check_network(Outside(Layer), blocks=["blocks.0", "blocks.1"], x=x, y=y)


# --- rules of other packages ------------------------------------------------------------------------------------------

MINE = '''
"""A rule of another package."""
from dataclasses import dataclass
from creditscope.rules import DFA

@dataclass(frozen=True)
class Mine(DFA):
    """a_l = 2 B_l e."""

    def formula(self, *operands):
        return [2 * a for a in super().formula(*operands)]
'''


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Install a package beside ours, by hand."""
    (tmp_path / "elsewhere.py").write_text(MINE)
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    broken = "broken = nowhere:Missing\n"
    (info / "entry_points.txt").write_text(f"[creditscope.rules]\nmine = elsewhere:Mine\n{broken}bp = elsewhere:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("elsewhere", None)


def test_a_rule_of_another_package_is_registered_and_conforms(elsewhere):
    registry = Registry("rule", [*REGISTRY._own.values()])
    assert registry["mine"].summary == "from elsewhere"
    rule = registry.load("mine")()
    assert check_rule(rule).checked == tuple(NETWORKS)
    assert registry.load("bp") is BP  # ours come first
    with pytest.raises(UsageError, match=r"'broken' \(nowhere:Missing\) cannot be loaded: No module named 'nowhere'"):
        registry.load("broken")


def test_a_rule_of_another_package_is_on_the_command_line(elsewhere):
    env = {"PYTHONPATH": str(elsewhere), "PATH": "/usr/bin:/bin", "HOME": str(elsewhere)}
    command = str(Path(sys.executable).with_name("creditscope"))
    listed = subprocess.run([command, "list", "rules"], capture_output=True, text=True, env=env)
    assert listed.returncode == 0, listed.stderr
    assert "mine" in listed.stdout
    dry = [
        command,
        "train",
        "--rule",
        "mine",
        "--net",
        "resmlp",
        "--data",
        "digits",
        "--dry-run",
        "--set",
        "rule.scale=2",
    ]
    done = subprocess.run(dry, capture_output=True, text=True, env=env, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
