"""What the loader costs beside a training step: CIFAR's crop, flip and normalisation, as a share of the step.

Loader and step take turns in one process, a few at a time, and each round gives one ratio; noise of the machine so
falls on both. ``python benchmarks/bench_data.py`` prints the rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

import creditscope as cs
from creditscope.data import Dataset, Loader, from_tensors
from creditscope.data.cifar import CIFAR10

BATCH = 128
ROUNDS = 11
TOGETHER = 32  # batches, and steps, a round: as many as the loader makes at once on a GPU
TARGET = 0.10


def like_cifar10(examples: int = 50_000) -> Dataset:
    """Noise of CIFAR-10's size: what is in the pixels does not matter, that they do not fit the cache does."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (examples,), generator=generator)
    return from_tensors(x, y, x[:BATCH], y[:BATCH], mean=CIFAR10.mean, std=CIFAR10.std, augment="crop-flip")


def bp_step(device: str) -> Callable[[], None]:
    """Return a step of plain PyTorch on one batch that stays: ResMLP(256, 4), fused AdamW."""
    torch.manual_seed(0)
    net = cs.nets.ResMLP(inputs=3072, width=256, depth=4).to(device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    x, y = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(0, 10, (BATCH,), device=device)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()

    return step


def seconds(work: Callable[[], Any], device: str) -> float:
    start = perf_counter()
    for _ in range(TOGETHER):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


def ratios(device: str) -> list[float]:
    step = bp_step(device)
    data = like_cifar10()
    loader = Loader(data.train, dataset=data, batch=BATCH, device=device)
    batches = loader.epoch(0, 0)
    rounds = min(ROUNDS, len(loader) // TOGETHER - 1)
    for _ in range(TOGETHER):  # to warm up
        step()
        next(batches)
    return [seconds(lambda: next(batches), device) / seconds(step, device) for _ in range(rounds)]


def rows(device: str = "cpu", threads: int = 2) -> list[dict[str, Any]]:
    """Return one row: the loader's time over that of a step, the median of the rounds, and their spread."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = ratios(device)
    finally:
        torch.set_num_threads(before)
    low, _, high = statistics.quantiles(found, n=4)
    name = f"loader (crop, flip, normalise) / BP step, ResMLP(256, 4), batch {BATCH}, {device}"
    return [{"name": name, "ratio": statistics.median(found), "spread": high - low, "target": TARGET}]


if __name__ == "__main__":
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for row in rows(device):
            print(f"{row['name']}: {row['ratio']:.3f} (spread {row['spread']:.3f}, target {row['target']:.2f})")
