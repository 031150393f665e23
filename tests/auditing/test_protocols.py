"""The study's protocols say of its own published figures what it says, and of ours what its procedure would."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr

import creditscope as cs
from creditscope.rng import stream
from tests.auditing import planted

NAN = math.nan


def published(
    growth: float, g_last: float, accuracy: float = NAN, baseline: float = NAN, batch: int = 128
) -> xr.Dataset:
    """A Dataset of one credit with the study's figures."""
    data = xr.Dataset(
        {
            "max_growth": ((), growth),
            "published_reference_norm": ("layer", [1.0, g_last], {"batch": batch}),
            "stability": ((), NAN),
        }
    )
    return data.assign_attrs({} if math.isnan(accuracy) else {"margin": accuracy - baseline})


FROZEN = 0.349
TABLE = {
    # method: growth, ‖g_L‖ at B = 128, accuracy, frozen baseline, released, April
    "BP": (1.1, 3.7e-4, 0.615, FROZEN, "PASS", "trustworthy"),
    "DFA": (1.9e3, 4.2e-9, 0.306, FROZEN, "FAIL(D1+D2+D3)", "needs walk-back"),
    "CB": (694.0, 4e-9, 0.289, FROZEN, "FAIL(D1+D2+D3)", "needs walk-back"),
    "SB": (2e3, 4e-9, 0.205, FROZEN, "FAIL(D1+D2+D3)", "needs walk-back"),
    "EP, no baseline applied": (11.0, 1e-4, NAN, NAN, "PASS", "trustworthy"),
    "random initialisation": (1.02, 8e-3, NAN, NAN, "PASS", "trustworthy"),
    "DFA, λ = 1e-2": (5.0, 1e-6, 0.363, FROZEN, "FAIL(D3)", "needs walk-back"),
    "DFA, λ = 1e-3": (5.0, 1e-6, 0.372, FROZEN, "PASS", "trustworthy"),
    "CNN, DFA": (237.0, 1e-5, NAN, NAN, "FAIL(D1)", "needs walk-back"),
    "no terminal norm, DFA": (1e3, 7e-4, NAN, NAN, "FAIL(D1)", "needs walk-back"),
    "CIFAR-100, FA": (20.0, 1e-6, 0.133, 0.178, "FAIL(D3)", "needs walk-back"),
}


@pytest.mark.parametrize("method", TABLE)
def test_published_figures_get_the_published_verdict(method: str):
    growth, g_last, accuracy, baseline, released, april = TABLE[method]
    data = published(growth, g_last, accuracy, baseline)
    assert cs.protocols.released.judge(data).verdict == released
    assert cs.protocols.april.judge(data).verdict == april


def test_fa_passes_the_reference_rule_and_its_depth():
    found = {f.name: f.fires for f in cs.protocols.released.judge(published(30.0, 8.9e-7, 0.401, FROZEN)).findings}
    assert found == {"D1": False, "D2": False, "D3": False}


def test_the_floor_is_that_of_its_batch_size():
    """The snapshot logs have B = 1024: the same network, an eighth of the norm."""
    at_128, at_1024 = published(1.0, 4.2e-9, batch=128), published(1.0, 4.2e-9 / 8, batch=1024)
    figures = [cs.protocols.released.judge(data).findings[1].figure for data in (at_128, at_1024)]
    assert figures[0] == pytest.approx(figures[1])


def test_what_was_not_measured_does_not_fire():
    judgement = cs.protocols.released.judge(xr.Dataset())
    assert [f.fires for f in judgement.findings] == [None, None, None]
    assert "not measured" in str(judgement)


def test_aggregates_name_their_sets():
    data = published(1.0, 1.0).assign(cosine_clamped=("layer2", [0.400, 0.001, -0.0004, -0.002, 0.5]))
    found = cs.protocols.released.judge(data).aggregates
    assert found["aggregate Γ over states 0..L−1"] == pytest.approx(0.0997, abs=1e-4)
    assert found["deep Γ over states 1..L−1"] == pytest.approx(np.mean([0.001, -0.0004, -0.002]))


# --- the published float32 procedure ----------------------------------------------------------------------------------


def test_the_published_probe_is_the_published_procedure():
    """ρ, nudging, Γ and ‖g‖ written once more, as the study describes them, on the audit's own directions."""
    net = planted.residual(0)
    x, y = planted.task(0)
    g = torch.Generator().manual_seed(0)
    matrices = [torch.randn(planted.WIDTH, planted.CLASSES, generator=g) / planted.CLASSES**0.5 for _ in range(5)]

    def dfa(x: Any, y: Any) -> list[torch.Tensor]:
        e = net(x).softmax(1) - F.one_hot(y, planted.CLASSES)
        return [(e @ b.T).detach() for b in matrices]

    data = cs.audit(net, x, y, credits=dfa, probe="published").data
    logits, states = net(x, return_hidden=True)
    gradients = torch.autograd.grad(F.cross_entropy(logits, y), states)
    base = F.cross_entropy(logits, y, reduction="none").detach()

    def forward(l: int, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in net.blocks[l:]:
                h = h + block(h)
            return F.cross_entropy(net.out_head(net.out_ln(h)), y, reduction="none")

    for l, a in enumerate(dfa(x, y)):
        h, grad = states[l].detach(), gradients[l]
        cosine = F.cosine_similarity(a, grad, dim=1).mean()
        assert float(data.cosine_clamped[l]) == pytest.approx(float(cosine), abs=1e-5)
        median = grad.norm(dim=1).median()
        assert float(data.published_reference_norm[l]) == pytest.approx(float(median) * len(y) / 128, rel=1e-4)

        directions = stream(0, "audit", "directions", l)
        predicted, actual = [], []
        for _ in range(32):
            v = torch.randn(h.shape, generator=directions)
            v = v / v.norm(dim=1, keepdim=True)
            predicted.append((a * 1e-3 * v).sum(1))
            actual.append(forward(l, h + 1e-3 * v) - base)
        p, q = torch.cat(predicted).double(), torch.cat(actual).double()
        rho = torch.corrcoef(torch.stack([p, q]))[0, 1]
        assert float(data.rho[l]) == pytest.approx(float(rho), abs=2e-3)
        for k, eta in enumerate((0.001, 0.003, 0.01)):
            step = eta * a / a.square().mean(1, keepdim=True).sqrt()
            nudged = (forward(l, h - step) - base).mean()
            assert float(data.nudging[l, k]) == pytest.approx(float(nudged), abs=3e-7)
    assert data.attrs["probe"] == "published"
