"""What cannot be audited is refused in one line that says what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import creditscope as cs
from creditscope.errors import MissingError, UsageError
from tests.auditing import planted


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return planted.residual(0)


X, Y = planted.task(0)


def refusal(net: Any, x: Any = X, y: Any = Y, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        cs.audit(net, x, y, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def given(net: nn.Module, change: Any) -> Any:
    exact = planted.true_credits(net)
    return lambda x, y: change(exact(x, y))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g[:-1], "one tensor a state h_0..h_L, 5 in all; there are 4"),
        (lambda g: [*g, g[0]], "there are 6"),
        (lambda g: g[0], "must be a list of 5 tensors"),
        (lambda g: None, "must be a list of 5 tensors"),
        (lambda g: [*g[:3], g[3][:, :4], g[4]], r"[3] must have the state's shape (128, 32); it has (128, 4)"),
        (lambda g: [*g[:3], g[3].mean(0), g[4]], "it has (32,)"),
        (lambda g: [g[0].long(), *g[1:]], "[0] must be a floating-point tensor, not torch.int64"),
        (lambda g: [g[0].numpy(), *g[1:]], "not ndarray"),
        (lambda g: [g[0].to("meta"), *g[1:]], "is on meta, the states are on cpu"),
        (lambda g: [None] * 5, "nothing to audit"),
    ],
)
def test_credits(net: nn.Module, change: Any, words: str):
    assert words in refusal(net, credits=given(net, change))


def test_data(net: nn.Module):
    credits = planted.true_credits(net)
    assert "evaluation set is empty" in refusal(net, X[:0], Y[:0], credits=credits)
    assert "128 examples and 100 labels" in refusal(net, X, Y[:100], credits=credits)
    assert "labels run from 0 to 7, but the network has 4 outputs" in refusal(net, X, Y + (Y == 3) * 4, credits=credits)
    assert "labels" in refusal(net, X, F.one_hot(Y, 4), credits=credits)
    assert "labels" in refusal(net, X, Y.float(), credits=credits)
    assert "labels" in refusal(net, X, Y.tolist(), credits=credits)


def test_what_is_audited(net: nn.Module):
    assert "pass credits=function, updates=function, or a learner" in refusal(net)
    assert "a learner or an nn.Module, not function" in refusal(lambda x: x)
    assert "a learner knows its blocks" in refusal(cs.rules.BP().attach(net), blocks=["blocks.0"])
    assert "a learner knows its loss" in refusal(cs.rules.BP().attach(net), loss=lambda o, y: o.sum(1))
    assert "credits must be a function" in refusal(net, credits=[1, 2])
    assert "no credits were given" in refusal(net, credits={})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": ["bloks.0"]}, "did you mean 'blocks.0'"),
        ({"tier": "standart"}, "did you mean 'standard'"),
        ({"probe": "float32"}, "float64"),
        ({"directions": 1}, "directions must be a whole number of at least 2, not 1"),
        ({"nulls": 2.5}, "nulls must be a whole number"),
        ({"epsilon": -1}, "epsilon must be a positive number"),
        ({"epsilon": "small"}, "epsilon must be a positive number"),
        ({"accuracies": 0.5, "baselines": {"shallow": [0.4]}}, "accuracies must be a list"),
        ({"accuracies": [50.0], "baselines": {"shallow": [0.4]}}, "shares between 0 and 1, not 50.0"),
        ({"accuracies": [0.5], "baselines": {"shalow": [0.4]}}, "did you mean 'shallow'"),
        ({"baselines": {"shallow": [0.4]}}, "needs both"),
        ({"initial": {"embed.weight": torch.zeros(3)}}, "initial['embed.weight'] has the shape (3,)"),
        ({"initial": {"wrong": torch.zeros(3)}}, "holds no parameter of the network"),
        ({"reference": lambda x, y: [torch.zeros(2)]}, "one tensor a state"),
    ],
)
def test_options(net: nn.Module, options: dict[str, Any], words: str):
    assert words in refusal(net, credits=planted.true_credits(net), **options)


def test_updates(net: nn.Module):
    assert "must be a dict" in refusal(net, updates=lambda x, y: [1])
    assert "did you mean 'embed.weight'" in refusal(net, updates=lambda x, y: {"embed.wight": torch.zeros(1)})
    assert "must have the shape (32,)" in refusal(net, updates=lambda x, y: {"embed.bias": torch.zeros(1)})


def test_convention():
    with pytest.raises(UsageError, match="mean"):
        cs.Convention(reduction="men")
    with pytest.raises(UsageError, match="sign"):
        cs.Convention(sign=2)


def test_missing_thresholds(net: nn.Module):
    with pytest.raises(MissingError, match=r"nowhere\.toml"):
        cs.audit(net, X, Y, credits=planted.true_credits(net), thresholds="nowhere.toml")


class Drops(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, training=True)


def test_a_network_that_is_random_in_eval_mode():
    net = nn.Sequential(nn.Linear(planted.INPUTS, 8), Drops(), nn.Linear(8, 4))
    assert "another output each time" in refusal(net, blocks=["1"], credits=lambda x, y: [torch.ones(len(x), 8)] * 2)


def test_one_class_alone_is_measured(net: nn.Module):
    x = torch.cat([X[Y == 1]] * 2)[:64]
    audit = cs.audit(net, x, torch.ones(len(x), dtype=torch.long), credits=planted.true_credits(net))
    assert audit.verdict.status == "passed"
    assert "one class" in audit.verdict.unmeasured["classes"]


@pytest.mark.parametrize("tier", ["quick", "standard", "full"])
def test_one_example_is_too_few(net: nn.Module, tier: Any):
    audit = cs.audit(net, X[:1], Y[:1], credits=planted.true_credits(net), tier=tier)
    assert audit.verdict.status == "cannot judge"
    assert "too-few-examples" in audit.verdict.flags
