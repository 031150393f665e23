"""What an audit costs: beside the source study's own evaluation loops, by depth, and in memory.

The loops are the study's procedure in our words, in float32: for each credit and each state below the last, the clamped
cosine, ρ over 32 directions one after the other, and three nudges; every credit and every direction runs the rest of
the network anew. The audit's ``standard`` tier measures more (float64, nulls, certificate, calibration, intervals) on
the same network, examples and directions, four credits at once. Time is the process's own, one thread, the two
taking turns. ``python benchmarks/bench_audit.py`` prints the rows.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import creditscope as cs

EXAMPLES, DIRECTIONS, CREDITS = 1024, 32, 4
ROUNDS = 3
Credits = Callable[[Tensor, Tensor], list[Tensor]]


def problem(
    depth: int = 4, width: int = 256, device: str = "cpu", n: int = EXAMPLES
) -> tuple[Any, Tensor, Tensor, dict[str, Credits]]:
    """A ResMLP at its start, noise for images, and four DFA credits of different matrices."""
    torch.manual_seed(0)
    net = cs.nets.ResMLP(inputs=3072, width=width, depth=depth).to(device).eval()
    x, y = torch.randn(n, 3072, device=device), torch.randint(10, (n,), device=device)

    def credit(matrices: list[Tensor]) -> Credits:
        def credits(x: Tensor, y: Tensor) -> list[Tensor]:
            with torch.no_grad():
                e = net(x).softmax(1) - F.one_hot(y, 10)
                return [e @ b.T for b in matrices]

        return credits

    sets = [[torch.randn(width, 10, device=device) / 10**0.5 for _ in range(depth + 1)] for _ in range(CREDITS)]
    return net, x, y, {f"dfa {k}": credit(matrices) for k, matrices in enumerate(sets)}


def loops(net: Any, x: Tensor, y: Tensor, credits: dict[str, Credits]) -> dict[str, list[tuple[float, ...]]]:
    """Return (Γ, ρ, three nudges) for each credit and state, as the study's scripts find them."""
    logits, states = net(x, return_hidden=True)
    gradients = torch.autograd.grad(F.cross_entropy(logits, y), states)
    found: dict[str, list[tuple[float, ...]]] = {}
    for name, function in credits.items():
        given = function(x, y)
        found[name] = [one(net, y, l, states[l].detach(), given[l], gradients[l]) for l in range(len(net.blocks))]
    return found


@torch.no_grad()
def one(net: Any, y: Tensor, l: int, h: Tensor, a: Tensor, g: Tensor) -> tuple[float, ...]:
    def tail(h: Tensor) -> Tensor:
        for block in net.blocks[l:]:
            h = h + block(h)
        return F.cross_entropy(net.out_head(net.out_ln(h)), y, reduction="none")

    base, predicted, actual = tail(h), [], []
    for _ in range(DIRECTIONS):
        v = torch.randn_like(h)
        v = v / (v.norm(dim=-1, keepdim=True) + 1e-8)
        actual.append(tail(h + 1e-3 * v) - base)
        predicted.append((a * 1e-3 * v).sum(-1))
    rho = torch.corrcoef(torch.stack([torch.cat(predicted), torch.cat(actual)]))[0, 1]
    unit = a / (a.square().mean(-1, keepdim=True).sqrt() + 1e-8)
    nudges = [float((tail(h - eta * unit) - tail(h)).mean()) for eta in (0.001, 0.003, 0.01)]
    return float(F.cosine_similarity(a, g, dim=-1).mean()), float(rho), *nudges


def audit(tier: Literal["quick", "standard"], net: Any, x: Tensor, y: Tensor, credits: dict[str, Credits]) -> Any:
    return cs.audit(net, x, y, credits=credits, tier=tier, directions=DIRECTIONS)


def seconds(work: Callable[[], Any], device: str = "cpu") -> float:
    """Of the process on a CPU, which a busy machine does not add to; of the clock on a GPU."""
    clock = process_time if device == "cpu" else perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def turns(works: dict[str, Callable[[], Any]], device: str = "cpu", rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Let pieces of work take turns, after one turn to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            spent = seconds(work, device)
            if turn:
                taken[name].append(spent)
    return taken


def _row(name: str, found: list[float], target: str, met: bool) -> dict[str, Any]:
    return {
        "name": name,
        "ratio": statistics.median(found),
        "low": min(found),
        "high": max(found),
        "target": target,
        "met": met,
    }


def against_loops(device: str) -> list[dict[str, Any]]:
    given = problem(device=device)
    works: dict[str, Callable[[], Any]] = {
        "loops": lambda: loops(*given),
        "standard": lambda: audit("standard", *given),
        "quick": lambda: audit("quick", *given),
    }
    taken = turns(works, device)
    rows = []
    for tier, target in (("standard", 1.0 if device == "cpu" else 1 / 6), ("quick", 1 / 8)):
        found = [a / b for a, b in zip(taken[tier], taken["loops"], strict=True)]
        setting = f"{CREDITS} credits, n {EXAMPLES}, M {DIRECTIONS}, ResMLP(256, 4), {device}"
        name = f"audit {tier} / evaluation loops, {setting}"
        rows.append(_row(name, found, f"at most {target:.3g}", statistics.median(found) <= target))
    return rows


def by_depth(device: str) -> dict[str, Any]:
    """A block's share of a quick audit, from 4 to 16 blocks and from 16 to 64."""
    depths = (4, 16, 64)
    given = {depth: problem(depth, 64, device) for depth in depths}
    works = {str(depth): lambda depth=depth: audit("quick", *given[depth]) for depth in depths}
    taken = {int(k): statistics.median(v) for k, v in turns(works, device).items()}
    early, late = (taken[16] - taken[4]) / 12, (taken[64] - taken[16]) / 48
    name = f"audit quick: time per block, blocks 16 to 64 over blocks 4 to 16, width 64, {device}"
    return _row(name, [late / early], "0.85 to 1.15", 0.85 <= late / early <= 1.15)


def by_memory() -> dict[str, Any]:
    """Peak of the standard tier beyond network, states, references and credits, in processes of their own."""
    found = {depth: _beyond(depth) for depth in (8, 64)}
    name = "audit standard: peak memory beyond network, states, references and credits, 64 blocks over 8, cpu"
    ratio = found[64] / found[8]
    return _row(name, [ratio], "at most 2", ratio <= 2)


def _beyond(depth: int) -> float:
    code = f"from benchmarks.bench_audit import peak_beyond; print(peak_beyond({depth}))"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def peak_beyond(depth: int) -> float:
    """Return the peak in MiB over what was resident with network, states, references and credits held."""
    torch.set_num_threads(1)
    net, x, y, credits = problem(depth, width=128, n=256)
    cs.audit(net, x[:64], y[:64], credits=credits, directions=2)  # what is loaded at the first use
    cut = cs.rules.BP().attach(net).cut
    double = cut.astype(torch.float64)
    copies = [[p.detach().clone() for p in net.parameters()] for _ in range(2)]  # to tell what a callable changes
    held = [copies, [f(x, y) for f in credits.values()], cut.exact(x, y), double.exact(x.double(), y)]
    reached = _peak()
    del held, double, copies
    cs.audit(net, x, y, credits=credits, directions=8)
    return (_peak() - reached) / 1024 + 1


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rows(device: str = "cpu", threads: int = 1) -> list[dict[str, Any]]:
    """Return one row a bar: the ratio, its spread over rounds, the target, and whether it was met."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [*against_loops(device), by_depth(device), *([by_memory()] if device == "cpu" else [])]
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    for row in rows():
        print(row)
