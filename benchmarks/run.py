"""The table of ``make bench``: speed as ratios of one interleaved run against plain PyTorch with fused AdamW.

``python benchmarks/run.py`` measures on the CPU with one thread, and on a GPU where there is one; ``--gpu`` only there.
``--out DIR`` writes the rows as JSON. A ratio is the median over rounds, with its quartiles.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_data
import torch
import torch.nn.functional as F
from measuring import Row, Spread, Time, Work, interleaved, load, ratio_row, save, table
from torch import Tensor, nn

import creditscope as cs
from creditscope.config import make_rule
from creditscope.data import Dataset, Loader, from_tensors
from creditscope.recipes import Recipe
from creditscope.rules import Rule
from creditscope.runs import environment, flatten
from creditscope.steps import SIDE_STEPS, Stepper, Tally, make_optimiser

BATCH = 128
Make = Callable[[], nn.Module]

# rule: (label, target on ResMLP(512, 12), target on MLP 3072-512×4-10)
TARGETS: list[tuple[str, Rule, float | None, float | None]] = [
    ("BP through the learner", cs.rules.BP(), 1.03, None),
    ("DFA", cs.rules.DFA(), 1.05, 0.95),
    ("FA, weight level", cs.rules.FA(), 1.2, None),
    ("FA, block level", cs.rules.FA(level="block"), 1.2, None),
]


def deep() -> nn.Module:
    return cs.nets.ResMLP(inputs=3072, width=512, depth=12)


def plain_mlp() -> nn.Module:
    return cs.nets.MLP(inputs=3072, width=512, depth=4)


def narrow() -> nn.Module:
    return cs.nets.ResMLP(inputs=3072, width=256, depth=4)


def batch(device: str, examples: int = BATCH) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(examples)
    x = torch.randn(examples, 3072, generator=draw)
    return x.to(device), torch.randint(0, 10, (examples,), generator=draw).to(device)


# --- steps ------------------------------------------------------------------------------------------------------------


def plain_step(make: Make, device: str) -> Work:
    net = make().to(device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=True, capturable=device == "cuda")
    x, y = batch(device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()
        optimiser.step()

    return step


def rule_step(make: Make, rule: Rule, device: str) -> Work:
    learner = rule.attach(make().to(device))
    optimiser = torch.optim.AdamW(learner.param_groups(), fused=True, capturable=device == "cuda")
    x, y = batch(device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        learner.backward(x, y)
        optimiser.step()

    return step


def captured(step: Work) -> Work:
    """Return a step replayed from a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(SIDE_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


NETS: list[tuple[str, Make, int]] = [("ResMLP(512, 12)", deep, 2), ("MLP 3072-512×4-10", plain_mlp, 3)]


def step_rows(rounds: int) -> Iterator[Row]:
    """Yield the rules' steps over those of plain PyTorch."""
    for name, make, column in NETS:
        wanted = {row[0]: row for row in TARGETS if row[column] is not None}
        steps = {"plain": plain_step(make, "cpu")}
        steps |= {label: rule_step(make, row[1], "cpu") for label, row in wanted.items()}
        times = interleaved(steps, rounds=rounds)
        for label, row in wanted.items():
            yield ratio_row(f"{label}, {name}", times[label], times["plain"], target=row[column])


def gpu_step_rows(rounds: int) -> Iterator[Row]:
    """Yield the rules' steps over those of plain PyTorch, both replayed from graphs, as ``fit`` does, and both eager.

    An eager step of these sizes waits for the host, which launches kernels and runs the rule's Python.
    """
    for name, make, column in NETS:
        wanted = {row[0]: row for row in TARGETS if row[column] is not None}
        for how in ("graphs", "eager"):
            steps = {"plain": plain_step(make, "cuda")}
            steps |= {label: rule_step(make, row[1], "cuda") for label, row in wanted.items()}
            if how == "graphs":
                steps = {label: captured(step) for label, step in steps.items()}
            times = interleaved(steps, rounds=rounds, device="cuda", together=40)
            for label, row in wanted.items():
                target = row[column] if how == "graphs" else None
                yield ratio_row(f"{label}, {name}, {how}", times[label], times["plain"], target=target, cpu=False)


# --- an epoch of fit --------------------------------------------------------------------------------------------------


class Epochs:
    """Takes a bare step after each step of ``fit``, and so splits its time: steps, bare steps, the end of an epoch."""

    def __init__(self, bare: Work, device: str):
        self.bare, self.device = bare, device
        self.fit: list[Time] = []
        self.steps: list[Time] = []
        self.ends: list[Time] = []
        self._left = self.now()
        self._pending: list[tuple[Time, Time]] = []

    def now(self) -> Time:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return Time.now()

    def progress(self, epoch: int, step: int, steps: int) -> None:
        arrived = self.now()
        self.bare()
        left = self.now()
        self._pending.append((arrived.since(self._left), left.since(arrived)))
        self._left = left

    def epoch(self, end: Any) -> None:
        if self._pending:
            self.ends.append(self.now().since(self._left))
            for total, part in ((self.fit, 0), (self.steps, 1)):
                total.append(Time(*(sum(side) for side in zip(*(pair[part] for pair in self._pending), strict=True))))
        self._pending = []
        self._left = self.now()


def images(steps: int) -> Dataset:
    data = bench_data.like_cifar10(steps * BATCH)
    test = data.train.x[:1000], data.train.y[:1000]
    return from_tensors(
        data.train.x, data.train.y, *test, mean=data.mean, std=data.std, augment=data.augment, classes=10, name="noise"
    )


def fit_rows(device: str, epochs: int, steps: int) -> Iterator[Row]:
    """Yield an epoch of ``fit`` by DFA over the bare steps that it contains, and its end over the same."""
    paired = Epochs(rule_step(deep, cs.rules.DFA(), device), device)
    with tempfile.TemporaryDirectory() as folder:
        cs.fit(
            deep,
            cs.rules.DFA(),
            images(steps),
            epochs=epochs + 1,
            out=Path(folder, "run"),
            device=device,
            graph="off",
            progress=paired.progress,
            callbacks=[paired.epoch],
        )
    fit, bare, ends = paired.fit[1:], paired.steps[1:], paired.ends[1:]  # the first one warms up
    cpu = device == "cpu"
    name = f"epoch of fit / its {steps} bare steps, DFA, ResMLP(512, 12)"
    yield ratio_row(name, fit, bare, target=1.12, cpu=cpu)
    note = "not in the epoch: 1,000 test images, 1,024 norms, one checkpoint"
    row = ratio_row(f"evaluation and checkpoint / those {steps} steps", ends, bare, target=None, cpu=cpu)
    yield Row(row.what, row.wall, row.cpu, note=note)


def loader_row(device: str) -> Row:
    row = bench_data.rows(device, threads=1)[0]
    half = row["spread"] / 2
    spread = Spread(row["ratio"], row["ratio"] - half, row["ratio"] + half)
    return Row(row["name"], spread, target=row["target"])


# --- imports ----------------------------------------------------------------------------------------------------------

USED = "import torch, creditscope as cs; cs.fit, cs.rules.DFA, cs.nets.ResMLP, cs.data.load"
HELP = """
import sys
from creditscope.cli import main
code = main(["--help"])
sys.exit(code or "torch" in sys.modules)
"""


def in_process(code: str) -> Callable[[], Time]:
    def run() -> Time:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), Time.now()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Time(Time.now().since(start).wall, cpu)

    return run


def import_rows(rounds: int) -> Iterator[Row]:
    """Yield what importing all that a training needs costs, beside torch alone; and that ``--help`` does without it."""
    runs = {code: in_process(code) for code in ("import torch", "import creditscope", USED)}
    for run in runs.values():
        run()
    times: dict[str, list[Time]] = {code: [] for code in runs}
    for _ in range(rounds):
        for code, run in runs.items():
            times[code].append(run())
    for what, code in (("import creditscope", "import creditscope"), ("import torch and all that fit needs", USED)):
        yield ratio_row(f"{what} / import torch", times[code], times["import torch"], target=1.25)
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True)
    yield Row("creditscope --help loads no torch", holds=done.returncode == 0)


# --- graphs -----------------------------------------------------------------------------------------------------------

WRAPPED = {
    "last-k": {"rule": "dfa", "k": "2"},
    "blend": {"first": "bp", "second": "dfa"},
    "handover": {"first": "dfa", "second": "fa", "at": "0.5"},
}
STEPS = 24


def every_rule() -> dict[str, Rule]:
    found = {entry.key: make_rule(entry.key, WRAPPED.get(entry.key, {})) for entry in cs.rules.REGISTRY}
    return found | {"fa:block": cs.rules.FA(level="block"), "dfa:study": cs.rules.DFA.study()}


def stepper(rule: Rule, *, graph: bool, recipe: Recipe = cs.recipes.study) -> Stepper:
    torch.manual_seed(0)
    learner = rule.attach(narrow().cuda(), training_steps=STEPS)
    return Stepper(learner, make_optimiser(learner, recipe), recipe, Tally(torch.device("cuda")), graph=graph)


def state_of(taken: Stepper) -> dict[str, Tensor]:
    """Return all that steps change: parameters, moments, statistics, progress."""
    state = taken.learner.state_dict(), taken.optimiser.state_dict(), dict(taken.tally.sums)
    return flatten(list(state))[0]


def graph_rows(rounds: int) -> Iterator[Row]:
    """Yield what a captured step takes beside an eager one, and whether they agree to the bit."""
    batches = [batch("cuda", BATCH + i % 5 // 4 * -28) for i in range(STEPS)]  # every fifth one is a smaller, last one
    x, y = batch("cuda")
    for name, rule in every_rule().items():
        pair = {kind: stepper(rule, graph=kind == "graph") for kind in ("eager", "graph")}
        for taken in pair.values():
            for given in batches:
                taken.step(*given)
        states = [state_of(taken) for taken in pair.values()]
        equal = all(torch.equal(t, states[1][key]) for key, t in states[0].items())
        obstacle = rule.capture_obstacle(pair["graph"].learner.site) or pair["graph"].obstacle
        yield Row(f"{name}: graph and eager agree to the bit", holds=equal, note=obstacle or "")
        if obstacle:
            continue
        steps = {kind: lambda taken=taken: taken.step(x, y) for kind, taken in pair.items()}
        times = interleaved(steps, rounds=rounds, device="cuda", together=20 + SIDE_STEPS)
        target = 0.5 if name == "dfa" else None
        yield ratio_row(
            f"{name}: graph / eager, ResMLP(256, 4)", times["graph"], times["eager"], target=target, cpu=False
        )


def waiting_rows() -> Iterator[Row]:
    """Yield whether a step of each rule, with its batch and statistics, waits for the device."""
    data = images(4)
    batches = Loader(data.train, dataset=data, batch=BATCH, device="cuda").epoch(0, 0)
    x, y = next(batches)
    for name, rule in every_rule().items():
        taken = stepper(rule, graph=False)
        taken.step(x, y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        note = ""
        try:
            taken.step(x, y)
        except RuntimeError as error:
            note = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield Row(f"{name}: a step waits for nothing", holds=not note, note=note)


def whole_rows() -> Iterator[Row]:
    """Yield whether whole trainings agree, captured and eager, interrupted by a divergence or not."""
    data = cs.data.load("digits")
    for name, rule in (("dfa:study", cs.rules.DFA.study()), ("handover", every_rule()["handover"])):
        results = [_train(rule, data, graph, 1e-3) for graph in ("auto", "off")]
        states = [flatten(result.learner.state_dict())[0] for result in results]
        equal = all(torch.equal(t, states[1][key]) for key, t in states[0].items())
        histories = [result.history.drop_vars("seconds") for result in results]
        yield Row(f"fit, {name}: graph and eager agree to the bit", holds=equal and histories[0].equals(histories[1]))
    broken = [_train(cs.rules.BP(), data, graph, 1e30) for graph in ("auto", "off")]
    agree = broken[0].status == "diverged" and broken[0].detail == broken[1].detail
    yield Row(
        "fit, lr=1e30: a divergence is seen and found, the same either way", holds=agree, note=str(broken[0].detail)
    )


def _train(rule: Rule, data: Dataset, graph: Any, lr: float) -> Any:
    def make() -> nn.Module:
        return cs.nets.ResMLP(inputs=64, width=64, depth=3)

    return cs.fit(make, rule, data, epochs=4, device="cuda", graph=graph, recipe=cs.recipes.study, lr=lr)


# --- all of it --------------------------------------------------------------------------------------------------------


def on_cpu(rounds: int) -> Iterator[Row]:
    yield from step_rows(rounds)
    yield from fit_rows("cpu", epochs=max(4, rounds // 8), steps=30)
    yield loader_row("cpu")
    yield from import_rows(max(4, rounds // 4))


def on_gpu(rounds: int) -> Iterator[Row]:
    yield from gpu_step_rows(rounds)
    yield from graph_rows(rounds)
    yield from waiting_rows()
    yield from whole_rows()
    yield from fit_rows("cuda", epochs=max(4, rounds // 8), steps=100)
    yield loader_row("cuda")


def report(name: str, rows: Iterator[Row], device: str, threads: int, out: Path | None) -> None:
    before = load()
    found = []
    for row in rows:
        print(f"  {row.what}: {row.judged or ''} {'' if row.ok is None else 'ok' if row.ok else 'NOT MET'}", flush=True)
        found.append(row)
    print(f"\n{name}; before: {before}; after: {load()}\n{table(found)}\n", flush=True)
    if out is not None:
        about = {"before": before, "after": load(), "environment": environment(device=device, threads=threads)}
        save(out, name.split()[0].lower(), found, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="only what a GPU is needed for")
    parser.add_argument("--rounds", type=int, default=32, help="rounds behind each median (default: 32)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1 makes CPU time comparable (default: 1)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON into this folder")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.gpu and not torch.cuda.is_available():
        parser.error("there is no GPU")
    if not given.gpu:
        report(f"CPU, {given.threads} thread(s)", on_cpu(given.rounds), "cpu", given.threads, given.out)
    if torch.cuda.is_available():
        report(f"GPU {torch.cuda.get_device_name()}", on_gpu(given.rounds), "cuda", given.threads, given.out)


if __name__ == "__main__":
    main()
