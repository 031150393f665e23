"""Optimisers, schedule, clipping, statistics and the step, each against a few obvious lines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import creditscope as cs
from creditscope.recipes import Recipe
from creditscope.rules._base import Learner, LocalRule
from creditscope.steps import Schedule, Stepper, Tally, Watch, all_finite, clip, clip_groups, make_optimiser
from tests import fits

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Estimating(LocalRule):
    """A rule with estimators: a linear guess of each state from the error, trained beside the network."""

    estimator_lr: float = 0.05
    has_estimators = True

    def build(self, site, generator, feedback):
        outputs = site.topology.output_shape.numel()
        guesses = nn.ModuleList(nn.Linear(outputs, shape.numel()) for shape in site.topology.shapes)
        with torch.no_grad():
            for p in guesses.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 10)
        return guesses

    def credit(self, site, pathway, tape):
        return [guess(tape.errors) for guess in pathway]

    def step(self, site, pathway, x, y, scale):
        outcome = super().step(site, pathway, x, y, scale)
        with site.cut.tape(x, y) as tape:
            states, errors = tape.states, tape.errors
        misses = [(guess(errors) - h).square().mean() for guess, h in zip(pathway, states, strict=True)]
        miss = torch.stack(misses).mean()
        (miss * scale).backward()
        outcome.metrics["state_error"] = miss.detach()
        return outcome


def learner(rule=None, **options) -> Learner:
    torch.manual_seed(0)
    return (rule or cs.rules.BP()).attach(fits.net(**options)())


def batch(n: int = 10):
    data = fits.task()
    return data.train.x[:n], data.train.y[:n]


# --- the optimiser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "extra"),
    [
        ("adamw", torch.optim.AdamW, {}),
        ("adam", torch.optim.Adam, {}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_each_optimiser_is_torchs(name, kind, extra):
    ours, theirs = learner(), learner()
    optimiser = make_optimiser(ours, Recipe(optimiser=name, lr=0.02, weight_decay=0.3))
    plain = kind(theirs.network.parameters(), lr=0.02, weight_decay=0.3, foreach=False, fused=False, **extra)
    assert type(optimiser) is kind
    x, y = batch()
    for _ in range(4):
        for one, of in ((optimiser, ours), (plain, theirs)):
            one.zero_grad()
            of.backward(x, y)
            one.step()
    for p, q in zip(ours.network.parameters(), theirs.network.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_estimators_have_a_group_at_their_own_rate_undecayed():
    attached = learner(Estimating())
    optimiser = make_optimiser(attached, Recipe(lr=0.02, weight_decay=0.3))
    network, estimators = optimiser.param_groups
    assert (network["lr"], network["weight_decay"]) == (0.02, 0.3)
    assert (estimators["lr"], estimators["weight_decay"]) == (0.05, 0.0)
    assert len(network["params"]) + len(estimators["params"]) == len([*attached.parameters()])


# --- the schedule -----------------------------------------------------------------------------------------------------


def rates(schedule: Schedule, epochs: int) -> list[float]:
    found = []
    for _ in range(epochs):
        found.append(schedule.lr)
        schedule.optimiser.step()
        schedule.step()
    return [*found, schedule.lr]


def test_cosine_goes_to_zero_over_the_epochs():
    recipe = Recipe(lr=0.4)
    schedule = Schedule(make_optimiser(learner(), recipe), recipe, 8)
    expected = [0.4 * (1 + math.cos(math.pi * e / 8)) / 2 for e in range(9)]
    assert rates(schedule, 8) == pytest.approx(expected, abs=1e-12)


def test_constant_stays():
    recipe = Recipe(lr=0.4, schedule="constant")
    schedule = Schedule(make_optimiser(learner(), recipe), recipe, 8)
    assert rates(schedule, 8) == [0.4] * 9
    assert schedule.state_dict() == {}


def test_unscheduled_groups_keep_their_rate():
    recipe = Recipe(lr=0.4)
    schedule = Schedule(make_optimiser(learner(Estimating()), recipe), recipe, 4)
    for epoch in range(4):
        assert schedule.optimiser.param_groups[1]["lr"] == 0.05, epoch
        schedule.optimiser.step()
        schedule.step()
    assert schedule.lr == pytest.approx(0)


def test_a_schedule_goes_on_where_it_was_saved():
    recipe = Recipe(lr=0.4)
    whole = Schedule(make_optimiser(learner(), recipe), recipe, 6)
    expected = rates(whole, 6)
    first = Schedule(make_optimiser(learner(), recipe), recipe, 6)
    rates(first, 2)
    optimiser = make_optimiser(learner(), recipe)
    second = Schedule(optimiser, recipe, 6)
    optimiser.load_state_dict(first.optimiser.state_dict())
    second.load_state_dict(first.state_dict())
    found = []
    for _ in range(4):  # the scheduler steps first here, as after an interruption between two epochs
        found.append(second.lr)
        second.step()
    assert [*found, second.lr] == expected[2:]


# --- clipping ---------------------------------------------------------------------------------------------------------


def fill_gradients(attached: Learner, scale: float) -> None:
    draw = torch.Generator().manual_seed(3)
    for p in attached.parameters():
        p.grad = scale * torch.randn(p.shape, generator=draw)


@pytest.mark.parametrize("by", ["all", "block"])
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_clipping_against_its_formula(by, scale):
    attached = learner(Estimating(), depth=3)
    fill_gradients(attached, scale)
    named = dict(attached.network.named_parameters())
    groups = [list(named)] if by == "all" else [[*names] for names in attached.sections.values()]
    assert by == "all" or len(groups) == 5  # stem, three blocks, head
    assert sorted(name for group in groups for name in group) == sorted(named)
    expected = {}
    for group in groups:
        norm = math.sqrt(sum(float((named[name].grad.double() ** 2).sum()) for name in group))
        expected |= {name: named[name].grad * min(1.0, 0.7 / norm) for name in group}
    before = [p.grad.clone() for p in attached.pathway.parameters()]
    clip(clip_groups(attached, Recipe(clip=0.7, clip_by=by)), 0.7)
    for name, p in named.items():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-7)
    assert all(torch.equal(p.grad, g) for p, g in zip(attached.pathway.parameters(), before, strict=True))


def test_nothing_is_clipped_without_clip():
    assert clip_groups(learner(), Recipe()) == []


def test_clipping_leaves_what_has_no_gradient():
    attached = learner(cs.rules.Frozen())
    attached.backward(*batch())
    clip(clip_groups(attached, Recipe(clip=1e-6, clip_by="block")), 1e-6)
    assert all(p.grad is None for p in attached.network.blocks.parameters())


# --- statistics -------------------------------------------------------------------------------------------------------


def test_means_over_examples_of_unequal_batches():
    tally = Tally(CPU)
    parts = [(0.5, 7, {}), (1.5, 4, {"late": torch.tensor(2.0)}), (9.0, 1, {"late": torch.tensor(8.0)})]
    right = 0
    for loss, n, metrics in parts:
        outputs, y = torch.randn(n, 3), torch.randint(0, 3, (n,))
        right += int((outputs.argmax(1) == y).sum())
        tally.add(torch.tensor(loss), outputs, y, metrics)
    means = tally.means()
    assert means["train_loss"] == pytest.approx((0.5 * 7 + 1.5 * 4 + 9) / 12)
    assert means["train_acc"] == right / 12
    assert means["late"] == pytest.approx((2 * 4 + 8) / 5)  # over the examples for which it was measured


def test_a_metric_that_is_gone_is_nan_and_not_zero():
    tally = Tally(CPU)
    tally.add(torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(2).long(), {"early": torch.tensor(1.0)})
    tally.reset()
    tally.add(torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(2).long(), {})
    assert math.isnan(tally.means()["early"])
    assert tally.means()["train_loss"] == 1


@pytest.mark.parametrize(
    ("outputs", "y"), [(torch.zeros(4, 3), torch.zeros(4)), (torch.zeros(4, 5, 3), torch.zeros(4).long())]
)
def test_no_accuracy_where_there_are_no_classes(outputs, y):
    tally = Tally(CPU)
    tally.add(torch.tensor(1.0), outputs, y, {})
    assert math.isnan(tally.means()["train_acc"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_loss_is_remembered(bad):
    tally = Tally(CPU)
    watch = Watch(tally.finite)
    for loss in (1.0, bad, 1.0):
        tally.add(torch.tensor(loss), torch.zeros(1, 2), torch.zeros(1).long(), {})
    assert not watch()
    tally.reset()
    assert not watch()  # until a state is loaded
    tally.load({})
    assert watch()


def test_a_tally_goes_on_where_it_was_saved():
    tally, other = Tally(CPU), Tally(CPU)
    tally.add(torch.tensor(1.0), torch.zeros(3, 2), torch.zeros(3).long(), {"m": torch.tensor(4.0)})
    other.add(torch.tensor(7.0), torch.zeros(3, 2), torch.ones(3).long(), {"n": torch.tensor(4.0)})
    other.load({name: both.clone() for name, both in tally.sums.items()})
    assert {name: mean for name, mean in other.means().items() if name != "n"} == tally.means()
    assert math.isnan(other.means()["n"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_all_finite_sees_one_entry(bad):
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    assert all_finite(tensors)
    tensors[1][1, 0] = bad
    assert not all_finite(tensors)


# --- the step ---------------------------------------------------------------------------------------------------------


def test_looking_at_each_tensor_changes_no_bit():
    steppers = []
    for _ in range(2):
        attached = learner(Estimating())
        recipe = Recipe(clip=0.1, clip_by="block")
        steppers.append(Stepper(attached, make_optimiser(attached, recipe), recipe, Tally(CPU)))
    x, y = batch()
    for _ in range(3):
        steppers[0].step(x, y)
        assert steppers[1].first_broken(x, y) is None
    for p, q in zip(*(stepper.learner.parameters() for stepper in steppers), strict=True):
        assert torch.equal(p, q)


def test_the_rule_hands_over_under_the_fused_optimiser():
    """torch's fused optimisers change parameters without a change of their version."""
    attached = cs.rules.Handover(cs.rules.DFA(), cs.rules.BP(), at=0.5).attach(fits.net()(), training_steps=6)
    recipe = Recipe()
    stepper = Stepper(attached, make_optimiser(attached, recipe), recipe, Tally(CPU))
    active = []
    for _ in range(6):
        stepper.step(*batch())
        active.append(attached.rule.active(attached.site)[0])
    assert active == ["first"] * 3 + ["second"] * 3


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_are_one_update(fused, set_to_none):
    attached = learner(cs.rules.DFA())
    optimiser = torch.optim.AdamW(attached.parameters(), fused=fused)
    for update in range(4):
        for _ in range(3):
            attached.backward(*batch(), scale=1 / 3)
            assert attached.site.step == update
        optimiser.step()
        optimiser.zero_grad(set_to_none=set_to_none)
        assert int(attached.state_dict()["_extra_state"]["step"]) == update + 1
