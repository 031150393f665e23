"""The frozen baseline: what trains the stem, and that the blocks do not move."""

from __future__ import annotations

import pytest
import torch

from creditscope.rules import DFA, Frozen
from tests.oracles import assert_same, backprop, left, local_step
from tests.rules.bench import CALM, DETERMINISTIC, attached, matrices
from tests.rules.test_dfa import by_hand


def only(gradients, names):
    """Keep the gradients of some parameters."""
    return {name: g if name in names else None for name, g in gradients.items()}


@CALM
@pytest.mark.parametrize("stem", ["dfa", "bp", "none"])
@pytest.mark.parametrize("case", [case for case in DETERMINISTIC if case.name != "tied"], ids=str)
def test_blocks_stay_and_the_head_learns_from_the_true_loss(case, stem):
    learner, net, x, y = attached(Frozen(stem=stem), case)
    sections = learner.sections
    whole = backprop(net, x, y)
    expected = only(whole, sections["head"])
    if stem == "bp":
        expected |= only(whole, sections["stem"] + sections["head"])
    if stem == "dfa":
        step = local_step(net, x, y, by_hand(matrices(learner)))
        expected |= {name: step[name] for name in sections["stem"]}
    between = {name for name in sections["head"] if whole[name] is not None}
    learner.backward(x, y)
    found = left(net)
    if case.name in ("post-norm", "several-consumers"):  # parameters beside the blocks are driven as the stem is
        beside = {name for name in between if name.startswith(("norms.0", "side"))}
        found, expected = ({n: g for n, g in one.items() if n not in beside} for one in (found, expected))
    assert_same(found, expected)
    assert all(p.grad is None for name in case.blocks for p in net.get_submodule(name).parameters())
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in case.network().parameters()]


def test_its_normalisation_is_dfas():
    case = next(case for case in DETERMINISTIC if case.name == "outside")
    learner, net, x, y = attached(Frozen(normalise="example", normalise_floor=0.1), case)
    step = local_step(net, x, y, by_hand(matrices(learner)), how="example", floor=0.1)
    learner.backward(x, y)
    assert_same(only(left(net), learner.sections["stem"]), only(step, learner.sections["stem"]))
    assert learner.rule.inner == DFA(normalise="example", normalise_floor=0.1)


@pytest.mark.parametrize("stem", ["dfa", "bp", "none"])
def test_training_moves_what_it_should(stem):
    case = next(case for case in DETERMINISTIC if case.name == "outside")
    learner, net, x, y = attached(Frozen(stem=stem), case)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimiser = torch.optim.AdamW(learner.param_groups(weight_decay=0.0))
    for _ in range(3):
        optimiser.zero_grad()
        learner.backward(x, y)
        optimiser.step()
    moved = {name.split(".")[0] for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head", "norm"} | (set() if stem == "none" else {"embed"})
