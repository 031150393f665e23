"""An audit leaves everything as it was, also when something raises; a callable that trains is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import creditscope as cs
from creditscope.errors import UsageError
from tests.auditing import planted
from tests.oracles import untouched
from tests.zoo import BY_NAME

KINDS = ["outside", "stages", "dropout", "tied", "user-frozen", "two-names", "mask-positional", "writes-chain"]


def prepared(name: str) -> tuple[Any, nn.Module, Any, Tensor]:
    """A network of the zoo in train mode, one module in eval mode, with gradients on some parameters."""
    case = BY_NAME[name]
    net = case.make().train()
    next(iter(net.children())).eval()
    x, y = case.batch(40, dtype=torch.float32)
    for k, p in enumerate(net.parameters()):
        if k % 2:
            p.grad = torch.full_like(p, -0.0)
    return case, net, x, y


@pytest.mark.parametrize("rule", [cs.rules.BP(), cs.rules.DFA()], ids=["bp", "dfa"])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_changes(name: str, rule: Any):
    case, net, x, y = prepared(name)
    generator = torch.Generator().manual_seed(1)
    learner = rule.attach(net, example=x, generator=generator, **case.cut)
    grads = [p.grad for p in net.parameters()]
    state = {key: value for key, value in learner.state_dict().items() if isinstance(value, Tensor)}
    kept = {key: value.clone() for key, value in state.items()}
    site = dict(vars(learner.site))
    with untouched(net, generator):
        cs.audit(learner, x, y, tier="full", nulls=20)
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert all(torch.equal(learner.state_dict()[key], value) for key, value in kept.items())
    assert {key: value for key, value in vars(learner.site).items() if key != "cut"} == {
        key: value for key, value in site.items() if key != "cut"
    }


def credit_that(act: Callable[[nn.Module], None], net: nn.Module) -> Callable[[Any, Any], list[Tensor]]:
    exact = planted.true_credits(net)

    def credits(x: Any, y: Any) -> list[Tensor]:
        given = exact(x, y)
        act(net)
        return given

    return credits


def write_grad(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p)


def backward(net: nn.Module) -> None:
    x, y = planted.task(3)
    F.cross_entropy(net(x), y).backward()


def add_hooks(net: nn.Module) -> None:
    net.out_head.register_forward_hook(lambda module, args, output: output * 2)
    net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net.blocks[1].register_full_backward_hook(lambda *_: None)
    next(net.parameters()).register_hook(lambda g: g * 3)
    next(net.parameters()).register_post_accumulate_grad_hook(lambda p: None)


HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "draws": lambda net: torch.randn(3),
    "reseeds": lambda net: torch.manual_seed(99),
    "changes the mode": lambda net: net.train(),
    "writes .grad": write_grad,
    "calls backward": backward,
    "adds hooks": add_hooks,
    "switches requires_grad": lambda net: net.requires_grad_(False),
    "replaces a forward": lambda net: setattr(net.out_head, "forward", lambda h: h[:, :4] * 0),
    "replaces a module": lambda net: setattr(net, "out_head", nn.Linear(planted.WIDTH, planted.CLASSES)),
    "replaces a parameter": lambda net: setattr(
        net.out_head, "weight", nn.Parameter(torch.zeros(planted.CLASSES, planted.WIDTH))
    ),
    "sets an attribute": lambda net: setattr(net, "note", 1),
    "writes a buffer": lambda net: net.counter.add_(1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_callable_leaves_behind_is_put_back(name: str):
    net = planted.residual(0)
    net.register_buffer("counter", torch.tensor([0.0, 1.0]))
    keys = set(vars(net))
    head, weight = net.out_head, net.out_head.weight
    plain = cs.audit(net, *planted.task(0), credits=planted.true_credits(net), tier="quick")
    with untouched(net):
        audit = cs.audit(net, *planted.task(0), credits=credit_that(HARMLESS[name], net), tier="quick")
    assert set(vars(net)) == keys
    assert net.out_head is head
    assert head.weight is weight
    assert not next(net.parameters())._backward_hooks
    assert not next(net.parameters())._post_accumulate_grad_hooks
    assert audit.data.state_norm.equals(plain.data.state_norm), "measured as it was left"


def step(net: nn.Module) -> None:
    with torch.no_grad():
        net.out_head.weight += 1e-3


def step_to_nan(net: nn.Module) -> None:
    net.embed.bias.data[0] = float("nan")


def flip_a_zero(net: nn.Module) -> None:
    net.embed.bias.data.neg_()


@pytest.mark.parametrize("act", [step, step_to_nan, flip_a_zero])
@pytest.mark.parametrize("form", ["credits", "updates"])
def test_a_callable_that_trains_is_refused(act: Callable[[nn.Module], None], form: str):
    net = planted.residual(0)
    with torch.no_grad():
        net.embed.bias.zero_()
    fn = credit_that(act, net) if form == "credits" else lambda x, y: act(net) or {}
    with untouched(net), pytest.raises(UsageError, match="changed the network") as raised:
        cs.audit(net, *planted.task(0), **{form: fn})
    assert "\n" not in str(raised.value)


def test_a_callable_that_writes_into_its_inputs_is_refused():
    net = planted.residual(0)
    x, y = planted.task(0)
    before = x.clone()
    with pytest.raises(UsageError, match="changed its inputs"):
        cs.audit(net, x, y, credits=lambda x, y: [x.mul_(0)])
    assert torch.equal(x, before)


class OopsError(Exception):
    pass


def test_an_exception_of_the_callable_passes_through_and_all_is_put_back():
    net = planted.residual(0).train()

    def credits(x: Any, y: Any) -> list[Tensor]:
        step(net)
        write_grad(net)
        torch.manual_seed(5)
        net.eval()
        raise OopsError("mine")

    with untouched(net), pytest.raises(OopsError, match="mine"):
        cs.audit(net, *planted.task(0), credits=credits)


def test_an_audit_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    net = planted.residual(0).train()
    learner = cs.rules.DFA().attach(net, example=planted.task(0)[0])

    def fail(*_: Any) -> None:
        raise OopsError

    for place in ("measure_scale", "measure_rho", "measure_null"):
        with monkeypatch.context() as patch:
            patch.setattr(f"creditscope.auditing.measure.{place}", fail)
            with untouched(net), pytest.raises(OopsError):
                cs.audit(learner, *planted.task(0))


def test_a_callable_is_called_once_with_what_was_given_in_eval_mode_with_gradients():
    net = planted.residual(0).train()
    x, y = planted.task(0)
    exact = planted.true_credits(net)
    calls = []

    def credits(given_x: Any, given_y: Any) -> list[Tensor]:
        calls.append((given_x is x, given_y is y, net.training, torch.is_grad_enabled()))
        return exact(given_x, given_y)

    with torch.no_grad():
        cs.audit(net, x, y, credits={"a": credits}, tier="full")
    assert calls == [(True, True, False, True)]
