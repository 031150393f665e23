"""One process of several: trains with every rule and saves what it found. Run by test_distributed.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from creditscope.rules import BP, DFA, FA, Blend, Frozen, Handover, LastK, Shallow
from tests.oracles import left
from tests.zoo import BY_NAME

RULES = {
    "bp": BP(),
    "bp-penalty": BP(penalty=0.1),
    "dfa": DFA(),
    "dfa-example": DFA(normalise="example", drive="input"),
    "dfa-batch": DFA(normalise="batch", normalise_floor=0.1, penalty=0.1),
    "fa": FA(),
    "fa-block-batch": FA(level="block", normalise="batch"),
    "frozen": Frozen(),
    "frozen-none": Frozen(stem="none"),
    "shallow": Shallow(),
    "last-1": LastK(DFA(normalise="batch"), 1),
    "blend": Blend(BP(), DFA(normalise="batch")),
    "handover": Handover(DFA(), LastK(BP(), 1), 0.5),
}
OUTSIDE, STAGES = BY_NAME["outside"], BY_NAME["stages"]


def attach(rule, case, wrapped):
    return rule.attach(wrapped, training_steps=4, **case.cut)


def steps(rule, x, y, wrap, *, parts=1):
    """Take four updates, each from ``parts`` accumulated calls, and return every gradient and the parameters."""
    net = OUTSIDE.network()
    wrapped = wrap(net)
    learner = attach(rule, OUTSIDE, wrapped)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        optimiser.zero_grad()
        for i, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            quiet = wrapped.no_sync() if wrapped is not net and i < parts - 1 else nullcontext()
            with quiet:
                learner.backward(a, b, scale=1 / parts)
        found.append(left(net))
        optimiser.step()
    return found, [p.detach() for p in net.parameters()]


def batch_norm(x, y):
    """Return gradients and buffers after two steps of BP by the learner, and by DistributedDataParallel itself."""
    found = []
    for by_learner in (True, False):
        net = STAGES.network().train()
        wrapped = DistributedDataParallel(net)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        learner = attach(BP(), STAGES, wrapped)
        for _ in range(2):
            optimiser.zero_grad()
            if by_learner:
                learner.backward(x, y)
            else:
                F.cross_entropy(wrapped(x), y).backward()
            optimiser.step()
        found.append((left(net), [p.detach() for p in net.parameters()], [b.clone() for b in net.buffers()]))
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x, y = OUTSIDE.batch(8)
    mine = slice(rank, None, 2)
    results = {name: steps(rule, x[mine], y[mine], DistributedDataParallel) for name, rule in RULES.items()}
    results |= {
        f"{name}-accumulated": steps(RULES[name], x[mine], y[mine], DistributedDataParallel, parts=2)
        for name in ("bp", "dfa", "fa", "frozen", "handover")
    }
    images, labels = STAGES.batch(8)
    results["batch-norm"] = batch_norm(images[mine], labels[mine])
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
