"""A foreign client: networks of BioTorch (0.0.16), trained by its own code.

Its layers return the rule's signal from their own backward pass, so autograd through them is no gradient: an audit
says so, and audits the signal against a plain twin. What is left on backpropagation without a word is found where the
updates show it; where it is not, the tests say that too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import creditscope as cs
from creditscope.errors import UsageError
from creditscope.tape import Cut
from tests.auditing import planted

BioModule = pytest.importorskip("biotorch.module.biomodule").BioModule
BLOCKS = ["1", "2", "3"]
X, Y = planted.task(0)


def plain() -> nn.Sequential:
    hidden = [nn.Sequential(nn.Linear(planted.WIDTH, planted.WIDTH), nn.Tanh()) for _ in BLOCKS]
    return nn.Sequential(nn.Linear(planted.INPUTS, planted.WIDTH), *hidden, nn.Linear(planted.WIDTH, planted.CLASSES))


def converted(mode: str, net: nn.Module | None = None) -> Any:
    bio = BioModule(net or plain(), mode=mode, copy_weights=True, output_dim=planted.CLASSES)
    x, y = planted.task(0, 512)
    trained = [p for p in bio.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks of the old kind
        for _ in range(60):
            optimiser.zero_grad()
            F.cross_entropy(outputs(bio, x, y, "mean"), y).backward()
            optimiser.step()
    return bio


def outputs(bio: Any, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return bio(x, targets=y, loss_function=nn.CrossEntropyLoss(reduction=reduction)) if bio.mode == "dfa" else bio(x)


def twin(bio: Any) -> nn.Sequential:
    """The same weights in plain layers."""
    net = plain()
    own = dict(bio.module.named_parameters())
    net.load_state_dict({name: own[name].detach() for name, _ in net.named_parameters()})
    return net


def signal(bio: Any) -> Callable[[Any, Any], list[Tensor]]:
    """What BioTorch's backward pass hands to each block, of the summed loss."""

    def credits(x: Tensor, y: Tensor) -> list[Tensor]:
        states: list[Tensor] = []

        def keep(module: nn.Module, args: tuple) -> None:
            args[0].retain_grad()
            states.append(args[0])

        handles = [bio.module[k].register_forward_pre_hook(keep) for k in (1, 2, 3, 4)]
        was = bio.training
        bio.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.cross_entropy(outputs(bio, x, y, "sum"), y, reduction="sum").backward()
        bio.train(was)
        for handle in handles:
            handle.remove()
        return [h.grad for h in states]

    return credits


@pytest.mark.parametrize("mode", ["fa", "usf"])
def test_its_autograd_is_recognised_as_no_gradient(mode: str):
    bio = converted(mode)
    blocks = [f"module.{name}" for name in BLOCKS]
    cut = Cut.of(bio, blocks=blocks)
    audit = cs.audit(bio, X, Y, credits=lambda x, y: cut.exact(x, y).gradients, blocks=blocks)
    assert audit.verdict.status == "cannot judge"
    assert "autograd of this network is not its gradient" in audit.verdict.reasons["reference-validity"]
    assert "reference=fn" in audit.verdict.reasons["reference-validity"]
    exact = Cut.of(twin(bio), blocks=BLOCKS)
    told = cs.audit(
        bio,
        X,
        Y,
        credits=lambda x, y: cut.exact(x, y).gradients,
        reference=lambda x, y: exact.exact(x, y).gradients,
        blocks=blocks,
    )
    assert told.verdict.status != "cannot judge"


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_its_dfa_cannot_be_backpropagated_through_and_that_is_said():
    bio = converted("dfa")
    with pytest.raises(UsageError, match="cannot be backpropagated through") as raised:
        cs.audit(bio, X, Y, credits=signal(bio), blocks=[f"module.{name}" for name in BLOCKS])
    assert "plain twin" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mode", ["fa", "dfa", "usf"])
def test_its_signal_is_audited_against_a_plain_twin(mode: str):
    bio = converted(mode)
    net = twin(bio)
    audit = cs.audit(net, X, Y, credits=signal(bio), blocks=BLOCKS)
    assert audit.verdict.status != "cannot judge"
    assert not audit.verdict.hints
    gradients = Cut.of(net, blocks=BLOCKS).exact(X, Y).gradients
    for l, (a, g) in enumerate(zip(signal(bio)(X, Y), gradients, strict=True)):
        cosine = F.cosine_similarity(a, g, eps=1e-30).mean()
        assert float(audit.data.cosine[l]) == pytest.approx(float(cosine), abs=1e-5)
    if mode == "usf":  # the signs of the weights carry most of the direction
        assert audit.verdict.passed
        assert (audit.data.cosine > 0.4).all()


class Conv(nn.Module):
    """A one-dimensional convolution over the features."""

    def __init__(self, out: int = planted.WIDTH):
        super().__init__()
        self.conv, self.out = nn.Conv1d(1, 1, 3, padding=1), out

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.conv(h[:, None])[:, 0])[:, : self.out]


def updates_of(bio: Any) -> Callable[[Any, Any], dict[str, Tensor]]:
    """The descent direction that its own training would take."""

    def updates(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        bio.zero_grad()
        F.cross_entropy(bio(x), y).backward()
        return {n: -p.grad.clone() for n, p in bio.module.named_parameters() if p.grad is not None}

    return updates


def coverage(net: nn.Module, bio: Any, blocks: list[str]) -> tuple[dict[str, str], Any]:
    own = dict(bio.module.named_parameters())
    net.load_state_dict({name: own[name].detach() for name, _ in net.named_parameters()})
    audit = cs.audit(net, X, Y, updates=updates_of(bio), blocks=blocks)
    return dict(zip(audit.data.parameter.values.tolist(), audit.data.coverage.values.tolist(), strict=True)), audit


def test_silent_backprop_behind_the_last_converted_layer_is_found():
    width = planted.WIDTH
    net = nn.Sequential(
        nn.Linear(planted.INPUTS, width),
        nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        Conv(),
        Conv(planted.CLASSES),
    )
    bio = converted("fa", copy.deepcopy(net))
    found, audit = coverage(net, bio, ["1", "2"])
    assert found["2.conv.weight"] == "plain backprop"
    assert found["3.conv.weight"] == "true loss"
    assert found["0.weight"] == "rule"
    assert audit.verdict.flags == ("coverage",)
    assert "2.conv.weight is on plain backprop" in audit.verdict.reasons["coverage"]


def test_silent_backprop_below_a_converted_layer_is_not_found_by_updates():
    """Its own transpose carries a credit that is the rule's, so its update is not backpropagation's: a limit."""
    width = planted.WIDTH
    net = nn.Sequential(
        nn.Linear(planted.INPUTS, width),
        Conv(),
        nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        nn.Linear(width, planted.CLASSES),
    )
    found, audit = coverage(net, converted("fa", copy.deepcopy(net)), ["1", "2"])
    assert found["1.conv.weight"] == "rule"
    assert found["3.weight"] == "true loss"
    assert "coverage" not in audit.verdict.flags
