"""Two processes over gloo fill the same gradients as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.oracles import assert_close, assert_same
from tests.rules.processes import OUTSIDE, RULES, steps

ROOT = Path(__file__).resolve().parents[2]
ACCUMULATED = ["bp", "dfa", "fa", "frozen", "handover"]
pytestmark = pytest.mark.slow  # two more interpreters, which import torch each


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what each of two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-W", "error", "-m", "tests.rules.processes"]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    running = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, env=quiet, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def whole(rule, parts=1):
    """Take the same steps in one process on the whole batch; halves are dealt out in turn."""
    x, y = OUTSIDE.batch(8)
    dealt = [i for part in range(parts) for i in range(8) if (i // 2) * parts // 4 == part]
    return steps(rule, x[dealt], y[dealt], lambda net: net, parts=parts)


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_those_of_one_process(found, name):
    gradients, parameters = whole(RULES[name])
    for process in found:
        for step, expected in zip(process[name][0], gradients, strict=True):
            assert_same(step, expected)
        assert_close(process[name][1], parameters)
    assert all(torch.equal(a, b) for a, b in zip(found[0][name][1], found[1][name][1], strict=True))


@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulation_without_synchronisation_in_between(found, name):
    gradients, parameters = whole(RULES[name], parts=2)
    for process in found:
        for step, expected in zip(process[f"{name}-accumulated"][0], gradients, strict=True):
            assert_same(step, expected)
        assert_close(process[f"{name}-accumulated"][1], parameters)


def test_batch_statistics_are_handled_as_torch_does(found):
    for process in found:
        mine, torchs = process["batch-norm"]
        assert_same(mine[0], torchs[0])
        assert_close(mine[1], torchs[1])
    for a, b in zip(found[0]["batch-norm"][0][2], found[0]["batch-norm"][1][2], strict=True):
        assert torch.allclose(a.double(), b.double())  # the buffers of the first process, which are the ones kept
