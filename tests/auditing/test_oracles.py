"""The figures of an audit against slow, obvious loops over examples."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import creditscope as cs
from creditscope.metrics.causal import directions
from creditscope.rng import stream
from tests.auditing import planted


def loss_from(net: Any, l: int, h: Tensor, label: int) -> float:
    """The loss of one example from one state on."""
    h = h[None]
    with torch.no_grad():
        for block in net.blocks[l:]:
            h = h + block(h)
        return float(F.cross_entropy(net.out_head(net.out_ln(h)), torch.tensor([label])))


@pytest.fixture(scope="module")
def measured() -> Any:
    net = planted.residual(3)
    x, y = (t[:40] for t in planted.task(3))
    credits = planted.changed(net, lambda g, r: [a + planted.noise_like(a, r) for a in g], 3)
    data = cs.audit(net, x, y, credits=credits, directions=3).data
    twin = planted.residual(3).double()
    given = [a.double() for a in credits(x, y)]
    rows = []
    for i in range(len(y)):
        logits, states = twin(x[i : i + 1].double(), return_hidden=True)
        gradients = torch.autograd.grad(F.cross_entropy(logits, y[i : i + 1]), states)
        rows.append([(h[0].detach(), g[0], a[i]) for h, g, a in zip(states, gradients, given, strict=True)])
    return data, twin, rows, y


def cosine(a: Tensor, g: Tensor) -> float:
    return sum(p * q for p, q in zip(a.tolist(), g.tolist(), strict=True)) / math.sqrt(
        sum(p * p for p in a.tolist()) * sum(q * q for q in g.tolist())
    )


def test_means_and_medians(measured: Any):
    data, _, rows, _ = measured
    for l in range(5):
        triples = [row[l] for row in rows]
        assert float(data.cosine[l]) == pytest.approx(statistics.mean(cosine(a, g) for _, g, a in triples), abs=1e-6)
        ratio = statistics.mean(float(a.norm() / g.norm()) for _, g, a in triples)
        assert float(data.norm_ratio[l]) == pytest.approx(ratio, rel=1e-5)
        agree = statistics.mean(float(((a > 0) == (g > 0)).double().mean()) for _, g, a in triples)
        assert float(data.sign_agreement[l]) == pytest.approx(agree, abs=1e-9)
        for name, place in (("state_norm", 0), ("reference_norm", 1), ("credit_norm", 2)):
            median = statistics.median_low([float(row[place].norm()) for row in triples])
            assert float(data[name][l]) == pytest.approx(median, rel=1e-5)
        top = sum(float(a @ g) for _, g, a in triples)
        below = math.sqrt(sum(float(a @ a) for *_, a in triples) * sum(float(g @ g) for _, g, _ in triples))
        assert float(data.rho_limit[l]) == pytest.approx(top / below, abs=1e-6)
    medians = [statistics.median_low([float(row[l][0].norm()) for row in rows]) for l in range(5)]
    np.testing.assert_allclose(data.growth, [b / a for a, b in pairwise(medians)], rtol=1e-5)


def test_rho_on_the_same_directions(measured: Any):
    data, net, rows, y = measured
    for l in range(5):
        drawn = directions((len(rows), planted.WIDTH), 3, stream(0, "audit", "directions", l))
        predicted, actual = [], []
        assert float(data.epsilon[l]) == 1e-3
        for v in drawn:
            for i, row in enumerate(rows):
                h, _, a = row[l]
                step = 1e-3 * v[i].double()
                predicted.append(float(a @ step))
                actual.append(loss_from(net, l, h + step, int(y[i])) - loss_from(net, l, h, int(y[i])))
        rho = np.corrcoef(predicted, actual)[0, 1]
        assert float(data.rho[l]) == pytest.approx(rho, abs=1e-4)


def test_nudging(measured: Any):
    data, net, rows, y = measured
    for l in (0, 2, 4):
        for k, eta in enumerate((0.001, 0.003, 0.01)):
            changes = []
            for i, row in enumerate(rows):
                h, _, a = row[l]
                rms = math.sqrt(statistics.mean(value * value for value in a.tolist()))
                changes.append(loss_from(net, l, h - eta * a / rms, int(y[i])) - loss_from(net, l, h, int(y[i])))
            assert float(data.nudging[l, k]) == pytest.approx(statistics.mean(changes), rel=1e-5)


def test_the_null_of_a_rule_is_that_of_fresh_matrices():
    """Its mean and spread against 1000 learners made anew."""
    net = planted.residual(0)
    x, y = planted.task(0)
    data = cs.audit(cs.rules.DFA().attach(net), x, y, nulls=400).data
    reference = planted.true_credits(net)(x, y)
    e = net(x).detach().softmax(1) - F.one_hot(y, planted.CLASSES)
    g = torch.Generator().manual_seed(8)
    for l in (1, 4):
        drawn = []
        for _ in range(1000):
            a = e @ torch.randn(planted.CLASSES, planted.WIDTH, generator=g)
            drawn.append(float(F.cosine_similarity(a, reference[l], eps=1e-30).mean()))
        spread = statistics.stdev(drawn)
        assert float(data.null_mean[l]) == pytest.approx(statistics.mean(drawn), abs=5 * spread / 400**0.5)
        assert float(data.null_sd[l]) == pytest.approx(spread, rel=0.2)
        assert data.null_mean.attrs["null"] == "fresh feedback matrices"


def test_credits_of_other_examples():
    net = planted.residual(0)
    x, y = (t[:30] for t in planted.task(0))
    g = planted.true_credits(net)(x, y)
    data = cs.audit(net, x, y, credits=planted.true_credits(net)).data
    for l in range(5):
        pairs = [cosine(g[l][i].double(), g[l][j].double()) for i in range(30) for j in range(30) if i != j]
        assert float(data.shuffled_mean[l]) == pytest.approx(statistics.mean(pairs), abs=1e-6)


def test_splitting_the_batch_changes_no_mean():
    net = planted.residual(0)
    x, y = planted.task(0)
    whole = cs.audit(net, x, y, credits=planted.true_credits(net), tier="quick").data
    halves = [
        cs.audit(net, x[part], y[part], credits=planted.true_credits(net), tier="quick").data
        for part in (slice(64), slice(64, None))
    ]
    for name in ("cosine", "norm_ratio", "sign_agreement"):
        np.testing.assert_allclose(whole[name], (halves[0][name] + halves[1][name]) / 2, atol=1e-9)


class SeedBlock(nn.Module):
    """The branch alone; its network adds the skip."""

    def __init__(self, d_hidden: int):
        super().__init__()
        self.ln, self.w1, self.w2 = nn.LayerNorm(d_hidden), nn.Linear(d_hidden, d_hidden), nn.Linear(d_hidden, d_hidden)
        nn.init.normal_(self.w2.weight, std=0.01)
        nn.init.zeros_(self.w2.bias)

    def forward(self, h: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(self.ln(h))))


class SeedMLP(nn.Module):
    """The source study's model class as its user would write it: skip outside, states on request."""

    def __init__(self, input_dim: int, d_hidden: int, num_classes: int, num_blocks: int):
        super().__init__()
        self.d_hidden, self.num_blocks = d_hidden, num_blocks
        self.embed = nn.Linear(input_dim, d_hidden)
        self.blocks = nn.ModuleList([SeedBlock(d_hidden) for _ in range(num_blocks)])
        self.out_ln, self.out_head = nn.LayerNorm(d_hidden), nn.Linear(d_hidden, num_classes)

    def forward(self, x: Tensor, return_hidden: bool = False) -> Any:
        h = self.embed(x)
        hiddens = [h]
        for block in self.blocks:
            h = h + block(h)
            hiddens.append(h)
        logits = self.out_head(self.out_ln(h))
        return (logits, hiddens) if return_hidden else logits


def test_the_studys_model_class_with_its_own_credit():
    model = SeedMLP(planted.INPUTS, 48, planted.CLASSES, 4)
    planted.trained(model, 0)
    x, y = planted.task(0)
    matrices = [torch.randn(48, planted.CLASSES) / planted.CLASSES**0.5 for _ in range(5)]

    def dfa(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.no_grad():
            logits = model(x)
            e = logits.softmax(-1)
            e[torch.arange(len(y)), y] -= 1
            return [e @ b.T for b in matrices]

    blocks = [f"blocks.{l}" for l in range(4)]
    audit = cs.audit(model, x, y, credits=dfa, blocks=blocks)
    assert audit.verdict.flags == ("null-credit",)
    logits, hiddens = model(x, return_hidden=True)
    gradients = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), hiddens)
    for l, (a, g) in enumerate(zip(dfa(x, y), gradients, strict=True)):
        assert float(audit.data.cosine[l]) == pytest.approx(
            float(F.cosine_similarity(a, g, eps=1e-30).mean()), abs=1e-5
        )
        assert float(audit.data.state_norm[l]) == pytest.approx(
            float(hiddens[l].detach().norm(dim=1).median()), rel=1e-5
        )
