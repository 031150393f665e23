"""What trains each parameter, by what a step does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from creditscope.rules import BP, DFA, FA, Blend, Frozen, Handover, LastK, LocalRule, Shallow
from tests.oracles import left, untouched
from tests.rules.bench import CALM, attached
from tests.zoo import BY_NAME, CASES

OUTSIDE = BY_NAME["outside"]
VALUES = {"rule", "local backprop", "plain backprop", "true loss", "nothing"}
HEAD = dict.fromkeys(["head.weight", "head.bias", "norm.weight", "norm.bias"], "true loss")


def of(prefix, value):
    return {f"{prefix}.weight": value, f"{prefix}.bias": value}


def blocks(inner, last, first=0):
    """Name what trains the first and the last map of each block."""
    return {k: v for l in range(first, 2) for k, v in (of(f"blocks.{l}.a", inner) | of(f"blocks.{l}.b", last)).items()}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (BP(), of("embed", "plain backprop") | blocks("plain backprop", "plain backprop") | HEAD),
        (DFA(), of("embed", "rule") | blocks("local backprop", "rule") | HEAD),
        (DFA(normalise="example"), of("embed", "rule") | blocks("local backprop", "rule") | HEAD),
        (
            FA(level="block"),
            of("embed", "rule") | blocks("local backprop", "rule") | blocks(*["plain backprop"] * 2, 1),
        ),
        (FA(), of("embed", "rule") | blocks("rule", "rule") | {"head.weight": "true loss", "head.bias": "true loss"}),
        (Frozen(), of("embed", "rule") | blocks("nothing", "nothing") | HEAD),
        (Frozen(stem="bp"), of("embed", "plain backprop") | blocks("nothing", "nothing") | HEAD),
        (Frozen(stem="none"), of("embed", "nothing") | blocks("nothing", "nothing") | HEAD),
        (
            LastK(DFA(), 1),
            of("embed", "rule") | blocks("nothing", "nothing") | blocks("local backprop", "rule", 1) | HEAD,
        ),
        (Shallow(), blocks("nothing", "nothing")),
        (Handover(DFA(), BP(), 0.5), of("embed", "rule") | blocks("local backprop", "rule") | HEAD),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, dict) else "",
)
def test_what_trains_what(rule, expected):
    learner, net, x, y = attached(rule, OUTSIDE)
    with untouched(net, learner.generator):
        found = learner.coverage(x, y)
    assert list(found) == [name for name, _ in net.named_parameters()]
    assert found | expected == found, {k: (v, found[k]) for k, v in expected.items() if found[k] != v}


def test_without_data_it_measures_the_last_backward():
    learner, *_, x, y = attached(DFA(), OUTSIDE)
    learner.backward(x, y)
    assert learner.coverage() == learner.coverage(x, y)


@CALM
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_every_network(case):
    learner, net, x, y = attached(DFA(), case)
    found = learner.coverage(x, y)
    assert found.keys() == dict(net.named_parameters()).keys()
    assert set(found.values()) <= VALUES
    learner.backward(x, y)
    for name, gradient in left(net).items():
        assert (found[name] == "nothing") == (gradient is None or not gradient.any()), name
    if not case.random:
        backprop = attached(BP(), case)[0].coverage(x, y)
        assert set(backprop.values()) <= {"plain backprop", "true loss", "nothing"}


def test_feedback_of_the_networks_own_weights_is_unmasked():
    own = {n: p.detach() for n, p in OUTSIDE.network().named_parameters() if p.ndim > 1}
    learner, *_, x, y = attached(FA(), OUTSIDE, feedback=own)
    assert set(learner.coverage(x, y).values()) == {"plain backprop", "true loss"}


def test_a_rule_that_is_backprop_in_disguise_is_unmasked():
    @dataclass(frozen=True)
    class Disguised(LocalRule):
        """Claims to be local, and asks autograd for everything."""

        def credit(self, site, pathway, tape) -> Sequence[torch.Tensor]:
            return site.cut.exact(tape.x, tape.y).gradients

    learner, *_, x, y = attached(Disguised(), OUTSIDE)
    assert set(learner.coverage(x, y).values()) == {"plain backprop", "true loss"}


def test_a_network_of_single_maps_is_trained_by_the_rule_alone():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 5)

        def forward(self, h):
            return torch.tanh(self.a(h))

    net = nn.Sequential(nn.Linear(7, 5), Block(), Block(), nn.Linear(5, 3)).double()
    x, y = OUTSIDE.batch()
    found = DFA().attach(net, blocks=["1", "2"], example=x).coverage(x, y)
    assert {name: value for name, value in found.items() if not name.startswith("3")} == dict.fromkeys(
        [
            f"{l}.{p}"
            for l, p in (("0", "weight"), ("0", "bias"), *((f"{l}.a", p) for l in (1, 2) for p in ("weight", "bias")))
        ],
        "rule",
    )


def test_parameters_that_take_no_part_or_are_frozen_get_nothing():
    net = OUTSIDE.network()
    net.spare = nn.Linear(2, 2).double()
    net.blocks[0].a.weight.requires_grad_(False)
    x, y = OUTSIDE.batch()
    found = DFA().attach(net, example=x, **OUTSIDE.cut).coverage(x, y)
    assert {name for name, value in found.items() if value == "nothing"} == {
        "spare.weight",
        "spare.bias",
        "blocks.0.a.weight",
    }
    assert found["blocks.0.a.bias"] == "local backprop"


def test_a_blend_of_backprop_and_feedback_is_the_rules():
    learner, *_, x, y = attached(Blend(BP(), DFA()), OUTSIDE)
    found = learner.coverage(x, y)
    assert found["head.weight"] == "true loss"
    assert found["embed.weight"] in ("rule", "local backprop")
    assert found["blocks.1.a.weight"] in ("rule", "local backprop")


def test_an_optimiser_inside_the_backward_is_left_out():
    learner, net, x, y = attached(DFA(), OUTSIDE)
    stepped = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(stepped.append)
    with untouched(net, learner.generator):
        learner.coverage(x, y)
    assert not stepped
    learner.backward(x, y)
    assert len(stepped) == len([*net.parameters()])


def test_dropout_is_drawn_alike_in_every_pass():
    case = BY_NAME["dropout"]
    learner, _, x, y = attached(BP(), case)
    learner.train()
    assert set(learner.coverage(x, y).values()) <= {"plain backprop", "true loss"}
