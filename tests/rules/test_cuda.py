"""Every rule on a GPU: as on the CPU, and without a step that waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.oracles import assert_close, assert_same, left
from tests.rules.test_base import NAMED
from tests.zoo import BY_NAME

OUTSIDE = BY_NAME["outside"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
WAITS = {"ep", "ep-one", "blend-ep"}
"""Rules that look at how far they have come."""


def on_gpu(rule, **options):
    net = OUTSIDE.network()
    x, y = OUTSIDE.batch()
    learner = rule.attach(net, example=x, training_steps=10, **OUTSIDE.cut, **options)
    moved = copy.deepcopy(learner).to("cuda")
    return learner, moved, x, y


def to_cpu(gradients):
    return {name: None if g is None else g.cpu() for name, g in gradients.items()}


@pytest.mark.parametrize("rule", NAMED)
def test_moved_there_it_gives_the_same(rule):
    learner, moved, x, y = on_gpu(rule)
    assert {p.device.type for p in moved.parameters()} == {"cuda"}
    if learner.site.noise is not None:  # each device has noise of its own
        assert torch.isfinite(moved.backward(x.cuda(), y.cuda()))
        return
    learner.backward(x, y)
    moved.backward(x.cuda(), y.cuda())
    assert_same(to_cpu(left(moved.network)), left(learner.network), 1e-8)
    assert_close([a.cpu() for a in moved.credits(x.cuda(), y.cuda())], learner.credits(x, y), 1e-8)


@pytest.mark.parametrize("rule", NAMED)
def test_attached_there_it_draws_the_same(rule):
    x, y = OUTSIDE.batch()
    options = {"training_steps": 10, **OUTSIDE.cut}
    here = rule.attach(OUTSIDE.network(), example=x, **options)
    there = rule.attach(OUTSIDE.network().cuda(), example=x.cuda(), **options)
    for a, b in zip(there.pathway.state_dict().values(), here.pathway.state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b)
    assert torch.isfinite(there.backward(x.cuda(), y.cuda()))


@pytest.mark.parametrize("rule", NAMED)
def test_saved_there_it_is_loaded_here(rule):
    learner, moved, x, y = on_gpu(rule)
    moved.backward(x.cuda(), y.cuda())
    saved = moved.state_dict()
    learner.load_state_dict(saved)
    assert torch.isfinite(learner.backward(x, y))


@pytest.mark.parametrize("rule", [p for p in NAMED if p.id not in WAITS])
def test_a_step_waits_for_nothing(rule):
    _, moved, x, y = on_gpu(rule)
    x, y = x.cuda(), y.cuda()
    optimiser = torch.optim.AdamW(moved.param_groups(), fused=True)
    for _ in range(2):
        moved.backward(x, y)
        optimiser.step()
    scale = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for s in (1.0, 0.5, scale):
            optimiser.zero_grad()
            moved.backward(x, y, scale=s)
            optimiser.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", NAMED)
def test_a_grad_scaler(rule):
    _, moved, x, y = on_gpu(rule)
    x, y = x.cuda().float(), y.cuda()
    moved.float()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimiser = torch.optim.SGD(moved.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        loss = moved.backward(x, y, scale=scaler.scale(torch.ones((), device="cuda")))
    scaler.step(optimiser)
    scaler.update()
    assert float(loss) < 10
