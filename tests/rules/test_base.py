"""The contract of a learner, for every rule: what backward adds and returns, what is saved, what is left alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from creditscope.errors import UsageError
from creditscope.rules import (
    BP,
    DFA,
    FA,
    Blend,
    CreditBridge,
    Frozen,
    Handover,
    LastK,
    LocalRule,
    Rule,
    Shallow,
    StateBridge,
    VectorField,
)
from tests.oracles import assert_close, assert_same, backprop, exact, left, loss_of, plain_output, untouched
from tests.rules.bench import CALM, SEVERAL, attached
from tests.zoo import BY_NAME, CASES, Outside, cast

RULES: dict[str, Rule] = {
    "bp": BP(),
    "bp-penalty": BP(penalty=0.1),
    "fa": FA(),
    "fa-block": FA(level="block"),
    "dfa": DFA(),
    "dfa-example": DFA(normalise="example", drive="input", penalty=0.1),
    "frozen": Frozen(),
    "frozen-bp": Frozen(stem="bp"),
    "frozen-none": Frozen(stem="none"),
    "shallow": Shallow(),
    "last-1": LastK(DFA(), 1),
    "last-0-fa": LastK(FA(), 0),
    "blend-local": Blend(DFA(), FA(level="block"), 0.3),
    "blend-passes": Blend(BP(), DFA(), 0.3),
    "blend-weights": Blend(FA(), LastK(DFA(), 1)),
    "handover": Handover(DFA(), BP(), 0.2),
    "handover-blend": Handover(LastK(Blend(BP(), FA()), 1), Handover(FA(level="block"), DFA(), 0.6), 0.2),
    "state-bridge": StateBridge(hidden=8),
    "credit-bridge": CreditBridge(hidden=8, warmup=0.4),
    "vector-field": VectorField(hidden=8, estimator_lr=0.03),
    "last-1-learned": LastK(StateBridge(hidden=8), 1),
    "blend-learned": Blend(DFA(), CreditBridge(hidden=8)),
    "handover-learned": Handover(StateBridge(hidden=8), Blend(BP(), VectorField(hidden=8)), 0.4),
}
NAMED = [pytest.param(rule, id=name) for name, rule in RULES.items()]
OUTSIDE = BY_NAME["outside"]


def several(*names):
    return [pytest.param(RULES[name], id=name) for name in names]


@pytest.mark.parametrize("rule", NAMED)
def test_backward_returns_the_unscaled_mean_loss_and_keeps_the_outputs(rule):
    learner, net, x, y = attached(rule, OUTSIDE)
    output = learner(x).detach()
    loss = learner.backward(x, y, scale=7.0)
    assert loss.shape == ()
    assert not loss.requires_grad
    assert not learner.outputs.requires_grad
    assert_close([loss, learner.outputs], [loss_of(net)(output, y).mean(), output])
    for value in learner.metrics().values():
        assert value.shape == ()
        assert not value.requires_grad


@pytest.mark.parametrize("rule", NAMED)
def test_what_was_there_before_is_added_to(rule):
    learner, net, x, y = attached(rule, OUTSIDE)
    learner.backward(x, y)
    once = left(net)
    trained = [name for name, g in once.items() if g is not None]
    for name, p in net.named_parameters():
        p.grad = torch.full_like(p, 5.0) if name in trained else None
    learner.backward(x, y)
    assert_same(left(net), {name: None if g is None else g + 5.0 for name, g in once.items()})


@pytest.mark.parametrize("scale", [3, 0.5, torch.tensor(0.5, dtype=torch.float64), torch.tensor(65536.0)])
@pytest.mark.parametrize("rule", NAMED)
def test_the_scale(rule, scale):
    learner, net, x, y = attached(rule, OUTSIDE)
    learner.backward(x, y)
    once = left(net)
    net.zero_grad()
    loss = learner.backward(x, y, scale=scale)
    tolerance = (
        1e-7 if isinstance(scale, Tensor) and scale.dtype == torch.float32 else 1e-9
    )  # the scale's own precision
    assert_same(left(net), {name: None if g is None else g * float(scale) for name, g in once.items()}, tolerance)
    assert float(loss) == pytest.approx(float(learner.backward(x, y)))


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("rule", NAMED)
def test_accumulated_parts_are_one_big_batch(rule, case):
    try:
        learner, net, x, y = attached(rule, case)
    except UsageError:
        return  # it is not defined there, and says so
    if case.name == "inner-skip" and "penalty=0.1" in repr(rule):
        return  # its branch is hidden
    learner.backward(x, y)
    whole = left(net)
    net.zero_grad()
    for part in range(3):
        learner.backward(x[2 * part : 2 * part + 2], y[2 * part : 2 * part + 2], scale=1 / 3)
    assert_same(left(net), whole)


@CALM
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "rule", [BP(), DFA(), FA(level="block"), FA(), Blend(BP(), DFA()), Frozen()], ids=lambda r: repr(r)[:12]
)
def test_looking_touches_nothing(rule, case):
    try:
        learner, net, x, y = attached(rule, case)
    except UsageError:
        return  # it is not defined there, and says so
    learner.generator.manual_seed(3)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    given = copy.deepcopy(x)
    if case.name == "reentrant-inside" and getattr(rule, "level", "") == "block":
        return  # its head is refused
    with untouched(net, learner.generator):
        credits, states = learner.credits(x, y), learner.states(x)
        learner.coverage(x, y)
    assert [a.shape for a in credits] == [h.shape for h in states]
    assert not any(t.requires_grad for t in (*credits, *states))
    assert all(a.dtype == torch.float64 for a in credits)
    if not case.name.startswith("writes"):  # whose own forward changes its input
        assert_close([given] if isinstance(x, Tensor) else [], [x] if isinstance(x, Tensor) else [])


@pytest.mark.parametrize("rule", NAMED)
def test_a_failing_forward_leaves_the_network_as_it_was(rule):
    learner, net, x, y = attached(rule, BY_NAME["outside"])
    learner.backward(x, y)

    def fails(*_):
        raise ZeroDivisionError

    for module in (net.blocks[1], net.head):
        handle = module.register_forward_hook(fails)
        with untouched(net, learner.generator):
            for call in (learner.backward, learner.credits, learner.coverage):
                if not (isinstance(rule, Shallow) and module is net.blocks[1] and call != learner.credits):
                    with pytest.raises(ZeroDivisionError):
                        call(x, y)
        handle.remove()
    loss = learner.backward(x, y)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("rule", NAMED)
def test_nothing_is_drawn_from_the_global_generator(rule, untouched_rng):
    learner, _, x, y = attached(rule, OUTSIDE, generator=None)
    learner.backward(x, y)
    learner.credits(x, y)
    learner.coverage()


@pytest.mark.parametrize("rule", NAMED)
def test_batch_statistics_move_once_a_backward(rule):
    case = BY_NAME["stages"]
    net = case.network().train()
    x, y = case.batch()
    twin = copy.deepcopy(net)
    plain_output(twin, x)
    try:
        learner = rule.attach(net, training_steps=10, **case.cut)
        learner.backward(x, y)
    except UsageError:
        return  # it is not defined there, and says so
    assert_close(net.buffers(), twin.buffers())


@pytest.mark.parametrize("rule", NAMED)
def test_eval_mode_stays_eval_mode(rule):
    case = BY_NAME["outside"]
    net = case.network().eval()
    x, y = case.batch()
    learner = rule.attach(net, training_steps=10, **case.cut).eval()
    learner.backward(x, y)
    learner.credits(x, y)
    assert not any(module.training for module in learner.modules())


# --- before and after the shapes are known ----------------------------------------------------------------------------


def test_before_the_first_call():
    learner = DFA().attach(OUTSIDE.network(), **OUTSIDE.cut)
    x, y = OUTSIDE.batch()
    with pytest.raises(
        UsageError, match=r"state_dict\(\) of DFA is known after the first call, or with example= given"
    ):
        learner.state_dict()
    with pytest.raises(UsageError, match="load_state_dict"):
        learner.load_state_dict({})
    for name in ("sections", "exact_states", "driving_states"):
        with pytest.raises(UsageError, match=name):
            getattr(learner, name)
    for look in (lambda: learner.outputs, learner.metrics):
        with pytest.raises(UsageError, match=r"there was no backward\(x, y\) yet"):
            look()
    with pytest.raises(UsageError, match=r"coverage\(\) without data measures the last backward: there was none yet"):
        learner.coverage()
    assert len([*learner.parameters()]) == len([*learner.network.parameters()])  # no estimators: known at once
    assert len(learner.param_groups()) == 1
    assert BP().attach(OUTSIDE.network(), **OUTSIDE.cut).state_dict()
    learner.backward(x, y)
    assert learner.sections["stem"] == ("embed.weight", "embed.bias")
    assert learner.driving_states == [1, 2]
    assert learner.exact_states == set()


def test_an_example_settles_all_at_once_and_gives_the_same():
    x, y = OUTSIDE.batch()
    later = DFA().attach(OUTSIDE.network(), **OUTSIDE.cut)
    now = DFA().attach(OUTSIDE.network(), **OUTSIDE.cut, example=x)
    later.backward(x, y)
    for a, b in zip(now.state_dict().values(), later.state_dict().values(), strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a, b)


def test_feedback_is_no_parameter_but_is_saved():
    learner, net, *_ = attached(DFA(), OUTSIDE)
    assert [*learner.parameters()] == [*net.parameters()]
    assert {"pathway.0", "pathway.1", "pathway.2"} <= learner.state_dict().keys()
    groups = learner.param_groups(lr=0.3, weight_decay=0.2)
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.3, 0.2)]
    assert groups[0]["params"] == [*net.parameters()]


# --- saving -----------------------------------------------------------------------------------------------------------


def trained(learner, optimiser, x, y, steps):
    for _ in range(steps):
        optimiser.zero_grad()
        learner.backward(x, y)
        optimiser.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rule", NAMED)
def test_a_saved_learner_goes_on_bit_for_bit(rule, fused):
    case = BY_NAME["dropout"]
    learner, _, x, y = attached(rule, case, training_steps=5)
    optimiser = torch.optim.Adam(learner.parameters(), lr=0.01, fused=fused)
    trained(learner, optimiser, x, y, 3)
    file = io.BytesIO()
    torch.save(
        {"learner": learner.state_dict(), "optimiser": optimiser.state_dict(), "rng": torch.get_rng_state()}, file
    )
    trained(learner, optimiser, x, y, 3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = rule.attach(
        case.network(seed=9).train(),
        training_steps=5,
        example=x,
        generator=torch.Generator().manual_seed(99),
        **case.cut,
    )
    again = torch.optim.Adam(other.parameters(), lr=0.01, fused=fused)
    other.load_state_dict(saved["learner"])
    again.load_state_dict(saved["optimiser"])
    torch.set_rng_state(saved["rng"])
    trained(other, again, x, y, 3)
    assert learner.site.step == other.site.step
    assert all(torch.equal(a, b) for a, b in zip(learner.parameters(), other.parameters(), strict=True))
    assert learner.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(learner.state_dict()["_extra_state"]["step"], other.state_dict()["_extra_state"]["step"])
    assert int(other.state_dict()["_extra_state"]["step"]) == 6


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("rule", NAMED)
def test_a_copy_goes_on_as_the_original_does(rule, how):
    learner, net, x, y = attached(rule, OUTSIDE, training_steps=5)
    optimiser = torch.optim.SGD(learner.parameters(), lr=0.1)
    trained(learner, optimiser, x, y, 2)
    for _ in range(2):  # after an update, and in the middle of an accumulation
        twin = copy.deepcopy(learner) if how == "deepcopy" else pickle.loads(pickle.dumps(learner))
        assert twin.network is not net
        assert [*twin.cut.blocks.values()] == [*twin.network.blocks]
        for one in (learner, twin):
            one.zero_grad()
            one.backward(x, y)
        assert_same(left(twin.network), left(net), 0.0)
        assert learner.site.step == twin.site.step == 2


def test_a_state_dict_of_another_rule_is_refused():
    learner, *_ = attached(DFA(), OUTSIDE)
    other, *_ = attached(FA(level="block"), OUTSIDE)
    with pytest.raises(RuntimeError, match="pathway"):
        other.load_state_dict(learner.state_dict())


# --- precisions and devices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", NAMED)
def test_a_learner_moves_like_a_module(rule, dtype):
    net = OUTSIDE.network(dtype=torch.float32)
    x, y = OUTSIDE.batch(dtype=torch.float32)
    learner = rule.attach(net, example=x, training_steps=10, **OUTSIDE.cut)
    learner.backward(x, y)
    expected = left(net)
    net.zero_grad()
    learner.to(dtype)
    assert {p.dtype for p in learner.parameters()} == {dtype}
    loss = learner.backward(cast(x, dtype), y)
    assert torch.isfinite(loss)
    assert {a.dtype for a in learner.credits(cast(x, dtype), y)} == {dtype}
    tolerance = 1e-5 if dtype == torch.float64 else 0.05
    assert_same({name: None if g is None else g.float() for name, g in left(net).items()}, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rule", NAMED)
def test_a_network_in_another_precision(rule, dtype):
    net = OUTSIDE.network(dtype=dtype)
    x, y = OUTSIDE.batch(dtype=dtype)
    learner = rule.attach(net, training_steps=10, **OUTSIDE.cut)
    learner.backward(x, y)
    assert {g.dtype for g in left(net).values() if g is not None} == {dtype}
    assert {b.dtype for b in learner.pathway.buffers()} <= {dtype}
    assert {a.dtype for a in learner.credits(x, y)} == {dtype}


@pytest.mark.parametrize("rule", NAMED)
def test_autocast(rule):
    net = OUTSIDE.network(dtype=torch.float32)
    x, y = OUTSIDE.batch(dtype=torch.float32)
    learner = rule.attach(net, training_steps=10, **OUTSIDE.cut)
    learner.backward(x, y)
    full = left(net)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = learner.backward(x, y)
    assert learner.outputs.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert {g.dtype for g in left(net).values() if g is not None} == {torch.float32}
    assert_same(left(net), full, 0.1)


@pytest.mark.parametrize("rule", NAMED)
def test_a_grad_scaler(rule):
    net = OUTSIDE.network(dtype=torch.float32)
    x, y = OUTSIDE.batch(dtype=torch.float32)
    learner = rule.attach(net, training_steps=10, **OUTSIDE.cut)
    learner.backward(x, y)
    expected = left(net)
    net.zero_grad()
    optimiser = torch.optim.SGD(learner.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = learner.backward(x, y, scale=scaler.scale(torch.ones(())))
    scaler.unscale_(optimiser)
    assert_same(left(net), expected, 1e-6)
    assert float(loss) < 10
    scaler.step(optimiser)
    scaler.update()
    optimiser.zero_grad()
    x[0] = float("inf")
    before = [p.detach().clone() for p in net.parameters()]
    learner.backward(x, y, scale=scaler.scale(torch.ones(())))
    scaler.step(optimiser)
    scaler.update()
    assert scaler.get_scale() == 512
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    learner.phase  # noqa: B018
    assert learner.site.step == 1  # the step that was left out is none


# --- a user's own loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("rule", [rule for rule in NAMED if rule.id not in ("frozen-none", "dfa-example")])
def test_a_users_own_loop_learns(rule, kind):
    learner, _, x, y = attached(rule, OUTSIDE, training_steps=60)
    optimiser = kind(learner.param_groups(lr=0.1 if kind is torch.optim.SGD else 0.02))
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        losses.append(float(learner.backward(x, y)))
        optimiser.step()
    assert losses[-1] < 0.6 * losses[0]


def test_bp_is_the_plain_loop_to_the_bit():
    case = BY_NAME["dropout"]
    learner, net, x, y = attached(BP(), case)
    plain = copy.deepcopy(net)
    optimisers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (net, plain)]
    torch.manual_seed(1)
    for _ in range(3):
        optimisers[0].zero_grad()
        learner.backward(x, y)
        optimisers[0].step()
    torch.manual_seed(1)
    for _ in range(3):
        optimisers[1].zero_grad()
        F.cross_entropy(plain(x), y, reduction="none").mean().backward()
        optimisers[1].step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("rule", NAMED)
def test_parameters_that_the_user_freezes_stay_without_a_gradient(rule):
    learner, net, x, y = attached(rule, BY_NAME["user-frozen"])
    learner.backward(x, y)
    for name in ("embed.weight", "embed.bias", "blocks.0.a.bias"):
        assert net.get_parameter(name).grad is None
        assert not net.get_parameter(name).requires_grad
    assert any(g is not None for g in left(net).values())


@pytest.mark.parametrize("rule", NAMED)
def test_not_a_number_is_no_crash(rule):
    learner, _, x, y = attached(rule, OUTSIDE)
    x[0, 0] = float("nan")
    assert learner.backward(x, y).isnan()
    learner.credits(x, y)
    learner.states(x)


def test_no_gradients_around_the_call():
    learner, net, x, y = attached(DFA(), OUTSIDE)
    learner.backward(x, y)
    expected = left(net)
    net.zero_grad()
    with torch.no_grad():
        learner.backward(x, y)
        learner.credits(x, y)
    assert_same(left(net), expected, 0.0)


def test_inputs_that_require_grad():
    learner, _, x, y = attached(BP(), OUTSIDE)
    learner.backward(x.requires_grad_(), y)
    assert x.grad is not None  # as loss.backward() would
    x.grad = None
    learner.credits(x, y)
    assert x.grad is None


# --- rules of one's own -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference(LocalRule):
    """Gives the exact credit, for want of a better."""

    def credit(self, site, pathway, tape) -> Sequence[Tensor]:
        return site.cut.exact(self.data[0], self.data[1]).gradients

    data: tuple = ()


@pytest.mark.parametrize("case", [case for case in CASES if not case.random and not case.batch_norm], ids=str)
def test_a_rule_whose_credit_is_exact_is_backprop(case):
    x, y = case.batch()
    learner, net, x, y = attached(Reference(data=(x, y)), case)
    expected = backprop(net, x, y)
    learner.backward(x, y)
    assert_same(left(net), expected)
    assert_close(learner.credits(x, y), exact(net, x, y)[1])


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (
            lambda states: states[:-1],
            "gave credits of shapes [(6, 4), (6, 4)]; the states have [(6, 4), (6, 4), (6, 4)]",
        ),
        (lambda states: [h.mT for h in states], "gave credits of shapes [(4, 6)"),
        (lambda states: [h[:, :1] for h in states], "gave credits of shapes [(6, 1)"),
        (lambda states: [None, *states[1:]], "gave NoneType for a credit"),
        (lambda states: states[0], "must give a list of 3 credits, not Tensor"),
        (lambda states: None, "must give a list of 3 credits, not NoneType"),
    ],
)
def test_credits_of_the_wrong_shape_are_refused(give, message):
    @dataclass(frozen=True)
    class Wrong(LocalRule):
        """Gives what it should not."""

        def credit(self, site, pathway, tape):
            return give(tape.states)

    learner, net, x, y = attached(Wrong(), OUTSIDE)
    with untouched(net), pytest.raises(UsageError) as caught:
        learner.backward(x, y)
    assert message in str(caught.value)
    with pytest.raises(UsageError):
        learner.credits(x, y)


def test_credits_of_a_rule_that_takes_its_own_step_are_checked_too():
    @dataclass(frozen=True)
    class Own(Rule):
        """Has a step of its own."""

        def credits(self, site, pathway, x, y):
            return [torch.ones(2, 2)]

    learner, _, x, y = attached(Own(), OUTSIDE)
    with pytest.raises(UsageError, match="Own gave 1 credits; there are 3 states"):
        learner.credits(x, y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DFA(normalise="exmaple"), "unknown rule.normalise 'exmaple': did you mean 'example'?"),
        (lambda: DFA(scale="2"), "rule.scale must be a finite number, not '2'"),
        (lambda: DFA(scale=float("nan")), "rule.scale must be a finite number, not nan"),
        (lambda: DFA(scale=True), "rule.scale must be a finite number, not True"),
        (lambda: DFA(penalty=-1.0), "rule.penalty must not be negative"),
        (lambda: BP(penalty=-1.0), "rule.penalty must not be negative"),
        (lambda: DFA(normalise_floor=-1.0), "rule.normalise_floor must not be negative"),
        (lambda: FA(level="blok"), "unknown rule.level 'blok': did you mean 'block'?"),
        (lambda: FA(level=["block"]), "unknown rule.level"),
        (lambda: LastK(DFA(), 1.0), "rule.k must be a whole number, not 1.0"),
        (lambda: LastK(DFA(), -1), "LastK.k must not be negative"),
        (lambda: LastK(DFA, 1), "LastK.rule must be a rule"),
        (lambda: Blend(DFA(), BP(), 1.5), "Blend.weight must lie between 0 and 1"),
        (lambda: Blend(DFA(), Shallow()), "Blend cannot hold Shallow"),
        (lambda: Handover(DFA(), LastK(Shallow(), 0)), "Handover cannot hold LastK"),
        (lambda: Handover(DFA(), BP(), -0.1), "Handover.at is a fraction"),
        (lambda: Handover(DFA(), "bp"), "Handover.second must be a rule"),
        (lambda: Frozen(stem="fa"), "unknown rule.stem 'fa'"),
    ],
)
def test_wrong_options(make, message):
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training_steps": 0}, "training_steps must be positive, not 0"),
        ({"training_steps": 1.5}, "training_steps must be a whole number"),
        ({"network": lambda x: x}, "network must be an nn.Module, not function"),
        ({"loss": "mse"}, "loss must be a function"),
        ({"state": 0}, "state must be a function"),
        ({"generator": 0}, "generator must be a torch.Generator, not int"),
    ],
)
def test_wrong_arguments_of_attach(options, message):
    options = {"network": Outside(), "blocks": ["blocks.0", "blocks.1"]} | options
    with pytest.raises(UsageError) as caught:
        DFA().attach(options.pop("network"), **options)
    assert message in str(caught.value)


# --- compiled blocks --------------------------------------------------------------------------------------------------


DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*should not be instantiated")


@DYNAMO
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "rule", [BP(), DFA(), FA(level="block"), FA(), Blend(BP(), DFA()), Shallow()], ids=lambda r: repr(r)[:16]
)
def test_compiled_blocks_give_the_same(rule, backend):
    for case in (BY_NAME["outside"], BY_NAME["mask-keyword"]):
        learner, net, x, y = attached(rule, case)
        learner.backward(x, y)
        expected = left(net)
        net.zero_grad()
        assert learner.compile(backend=backend) is learner
        with untouched(net, learner.generator):
            credits = learner.credits(x, y)
        learner.backward(x, y)
        assert_same(left(net), expected, 1e-9)
        assert [a.shape for a in credits] == [h.shape for h in learner.states(x)]
        assert_close([learner(x).detach()], [learner.outputs])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
@pytest.mark.slow
def test_compiled_blocks_by_inductor():
    learner, net, x, y = attached(DFA(), OUTSIDE)
    learner.backward(x, y)
    expected = left(net)
    net.zero_grad()
    learner.compile().backward(x, y)
    assert_same(left(net), expected, 1e-9)


@pytest.mark.parametrize("rule", NAMED)
def test_a_loss_that_is_not_per_example_is_refused(rule):
    learner, net, x, y = attached(rule, OUTSIDE, loss=F.cross_entropy)
    with untouched(net), pytest.raises(UsageError, match=r"one value per example, shape \(6,\); it gave shape \(\)"):
        learner.backward(x, y)


def test_one_example_is_a_batch():
    x, y = OUTSIDE.batch(1)
    for rule in RULES.values():
        learner = rule.attach(OUTSIDE.network(), training_steps=10, **OUTSIDE.cut)
        assert torch.isfinite(learner.backward(x, y))
