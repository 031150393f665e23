import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import creditscope as cs
from creditscope.cli import Exit, main
from creditscope.cli.audit import find_runs, read_convention
from creditscope.cli.foreign import match_blocks
from creditscope.config import NetworkSpec
from creditscope.errors import MissingError, UsageError
from creditscope.runs import RunDirectory
from tests.fits import net, options, task

QUICK = ["--tier", "quick", "--n", "64"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Runs of DFA and BP with baselines among them, as a study has, and one run with its own baselines."""
    data = cs.data.load("digits")
    network = NetworkSpec("resmlp", {"width": 8, "depth": 2}, data.shape, data.classes)
    place = tmp_path_factory.mktemp("study")
    given = {"epochs": 1, "threads": 1, "batch": 256, "keep": (0, 1, "last")}
    rules = {"dfa": cs.rules.DFA(), "bp": cs.rules.BP(), "shallow": cs.rules.Shallow()}
    rules["frozen"] = cs.rules.LastK(cs.rules.DFA(), 0)
    for name, rule in rules.items():
        for seed in (2, 1):
            cs.fit(network, rule, data, seed=seed, out=place / "runs" / "s" / f"{name}-{seed}", **given)
    return place


@pytest.fixture
def place(study, tmp_path, monkeypatch):
    shutil.copytree(study, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "s"


def accuracy(run: Path) -> float:
    history = RunDirectory.open(run).history()
    assert history is not None
    return float(history.test_acc[-1])


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_is_audited_and_the_audit_is_in_its_folder(place, capsys):
    code = main(["audit", str(place / "dfa-1"), "--n", "64"])
    out = capsys.readouterr().out
    audit = cs.load_audit(place / "dfa-1" / "audit.nc")
    assert code == {"passed": 0, "flagged": 3, "cannot judge": 4}[audit.verdict.status]
    assert audit.data.attrs["n"] == 64
    assert f"dfa: {audit.verdict.status}" in out
    assert out.splitlines()[-1] == f"{audit.verdict.status}: {place / 'dfa-1' / 'audit.html'}"
    assert (place / "dfa-1" / "audit.md").read_text("utf-8") == audit.to_markdown()
    weights = [name for name in audit.data.parameter.values if name.endswith("w1.weight")]
    assert bool((audit.data.drift.sel(parameter=weights) > 0).all())
    assert "seeds: 1; " in audit.to_markdown()


def test_an_audit_of_this_version_is_read_and_another_is_made(place, monkeypatch, capsys):
    command = ["audit", str(place / "dfa-1"), *QUICK]
    first = main(command)
    path = place / "dfa-1" / "audit.nc"
    made = path.stat().st_mtime_ns
    assert main(command) == first
    assert path.stat().st_mtime_ns == made
    main(["audit", str(place / "dfa-1"), "--tier", "quick", "--n", "32"])
    assert path.stat().st_mtime_ns != made
    made = path.stat().st_mtime_ns
    main(["audit", str(place / "dfa-1"), "--tier", "quick", "--n", "32", "--again"])
    assert path.stat().st_mtime_ns != made
    made = path.stat().st_mtime_ns
    monkeypatch.setattr("creditscope.auditing.trained.VERSION", 2)
    main(["audit", str(place / "dfa-1"), "--tier", "quick", "--n", "32"])
    assert path.stat().st_mtime_ns != made


def test_a_study_compares_seeds_and_baselines(place, capsys):
    main(["audit", "s", *QUICK, "--json"])
    found = {Path(audit["name"]).name: audit for audit in json.loads(capsys.readouterr().out)["audits"]}
    assert {*found} == {f"{name}-{seed}" for name in ("bp", "dfa", "frozen", "shallow") for seed in (1, 2)}
    attrs = cs.load_audit(place / "dfa-2" / "audit.nc").data.attrs
    assert attrs["accuracies"] == [accuracy(place / f"dfa-{seed}") for seed in (1, 2)]
    assert attrs["baseline_frozen-rule"] == [accuracy(place / f"frozen-{seed}") for seed in (1, 2)]
    assert attrs["baseline_shallow"] == [accuracy(place / f"shallow-{seed}") for seed in (1, 2)]
    assert "baseline_frozen-bp" not in attrs
    assert "margin_low" in attrs
    bp = cs.load_audit(place / "bp-1" / "audit.nc").data.attrs
    assert {key for key in bp if key.startswith("baseline_") and key != "baseline_mean"} == {"baseline_shallow"}
    for name in ("frozen-1", "shallow-2"):  # a baseline is compared with, and not compared
        assert "depth-utility" in next(iter(found[name]["verdicts"].values()))["unmeasured"]


def test_runs_of_other_options_are_not_compared(place):
    shutil.rmtree(place / "dfa-2")
    data = cs.data.load("digits")
    network = NetworkSpec("resmlp", {"width": 9, "depth": 2}, data.shape, data.classes)
    given = {"epochs": 1, "threads": 1, "batch": 256, "keep": (0, 1, "last")}
    cs.fit(network, cs.rules.DFA(), data, seed=2, out=place / "dfa-2", **given)
    main(["audit", "s", *QUICK])
    assert cs.load_audit(place / "dfa-1" / "audit.nc").data.attrs["accuracies"] == [accuracy(place / "dfa-1")]


def test_the_exit_code_is_that_of_the_worst(place, monkeypatch, capsys):
    monkeypatch.setattr("creditscope.cli.audit.SEVERITY", {"passed": 0, "flagged": 3, "cannot judge": 4})
    limits = place / "limits.toml"
    limits.write_text("[block_growth]\nvalue = 0.001\n")
    assert main(["audit", str(place / "bp-1"), *QUICK]) == Exit.DONE
    assert main(["audit", str(place / "bp-1"), *QUICK, "--thresholds", str(limits)]) == Exit.FLAGGED
    assert main(["audit", str(place / "bp-1"), "--tier", "quick", "--n", "8"]) == Exit.UNJUDGED
    capsys.readouterr()


def test_an_epoch_whose_checkpoint_was_kept(place, capsys):
    main(["audit", str(place / "dfa-1"), *QUICK, "--epoch", "0"])
    audit = cs.load_audit(place / "dfa-1" / "audit.nc")
    assert float(audit.data.drift.max()) == 0
    capsys.readouterr()
    assert main(["audit", str(place / "dfa-1"), *QUICK, "--epoch", "9"]) == Exit.USAGE
    assert "has no checkpoint of epoch 9; there are epoch-0000, epoch-0001, last" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "says"), [("april", "trustworthy"), ("released", "PASS")])
def test_a_published_protocol_on_the_same_numbers(place, name, says, capsys):
    main(["audit", str(place / "bp-1"), *QUICK, "--protocol", name])
    assert f"): {says}" in capsys.readouterr().out
    main(["audit", str(place / "bp-1"), *QUICK, "--protocol", name, "--json"])
    (found,) = json.loads(capsys.readouterr().out)["audits"]
    assert found["protocol"]["bp"]["verdict"] == says


def test_own_baselines_of_a_run_count(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(
        [
            "train",
            "--rule",
            "dfa",
            "--set",
            "net.width=8",
            "--epochs",
            "1",
            "--threads",
            "1",
            "--baselines",
            "--out",
            "r",
        ]
    )
    out = capsys.readouterr().out
    assert "baselines: frozen-bp 0." in out
    main(["audit", "r", *QUICK])
    attrs = cs.load_audit("r/audit.nc").data.attrs
    for name in ("frozen-bp", "frozen-rule", "shallow"):
        assert attrs[f"baseline_{name}"] == [accuracy(Path("r/baselines") / name)]


def test_train_with_a_monitor_says_what_fired_and_what_it_cost(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--rule", "bp", "--set", "net.width=8", "--epochs", "1", "--threads", "1", "--monitor"]
    assert main([*command, "--out", "r"]) == Exit.DONE
    out, err = capsys.readouterr()
    assert "first fired: none" in out
    assert "creditscope: the monitor took " in err
    assert Path("r/monitor.jsonl").exists()
    main([*command, "--out", "r", "--json"])
    assert json.loads(capsys.readouterr().out)["first_fired"] == {}


def test_a_run_that_others_made_needs_its_network(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = cs.data.load("digits")
    Path("mine.py").write_text(
        "import creditscope as cs\ndef make(): return cs.nets.ResMLP(inputs=64, width=8, depth=2)\n"
    )
    given = {"epochs": 1, "threads": 1, "batch": 256}
    cs.fit(lambda: cs.nets.ResMLP(inputs=64, width=8, depth=2), cs.rules.BP(), data, out="r", **given)
    assert main(["audit", "r", *QUICK]) == Exit.USAGE
    assert "pass --module package.file:function" in capsys.readouterr().err
    assert main(["audit", "r", *QUICK, "--module", "mine.py:make"]) == Exit.DONE


def test_unfinished_runs_are_left_out_by_name(place, capsys):
    path = place / "dfa-2" / "status.json"
    path.write_text(path.read_text().replace("finished", "interrupted"))
    main(["audit", "s", *QUICK])
    assert "dfa-2 is interrupted and left out" in capsys.readouterr().err
    assert not (place / "dfa-2" / "audit.nc").exists()
    assert main(["audit", str(place / "dfa-2"), *QUICK]) == Exit.USAGE
    assert "no run has finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "say what to audit: a run, a study, or foreign work with --module"),
        (["none"], "not found: none, nor runs/none"),
        (["empty"], "empty is no run, and no folder of runs"),
        (["file"], "file is a file: a run is a folder"),
        (["s", "--credits", "a:b"], "--credits is for foreign work: a run knows its own"),
        (["s", "--n", "0"], "--n must be at least 1, not 0"),
        (["s", "--tier", "fast"], "unknown --tier 'fast'"),
        (["s", "--thresholds", "none.toml"], "not found: none.toml"),
        (["--module", "a:b"], "--credits and --data must be given too"),
    ],
)
def test_usage_errors_are_one_line(argv, message, place, capsys):
    Path("empty").mkdir()
    Path("file").touch()
    assert main(["audit", *argv]) == Exit.USAGE
    err = capsys.readouterr().err
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("creditscope: ")]) == 1
    assert "Traceback" not in err


def test_a_run_on_data_of_ones_own_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cs.fit(net(), cs.rules.DFA(), task(), out="r", **options())
    assert main(["audit", "r"]) == Exit.USAGE
    assert "audit it where it is trained, as fit(...).audit" in capsys.readouterr().err


def test_find_runs(place):
    assert find_runs(str(place / "dfa-1")) == [place / "dfa-1"]
    assert find_runs("s") == find_runs("runs/s")
    assert len(find_runs("s")) == 8
    with pytest.raises(MissingError):
        find_runs("nowhere")


# --- foreign work -----------------------------------------------------------------------------------------------------

MINE = """
import torch
from torch import nn
import creditscope as cs

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(11))

    def forward(self, x):
        h = self.stem(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)

def make():
    return Mine()

def exact(net):
    return cs.rules.BP().attach(net, blocks=[f"layers.{l}" for l in range(11)], head="head").credits

def against(net):
    credits = exact(net)
    return lambda x, y: [-g / len(x) for g in credits(x, y)]

def wrong(net):
    def fail(x, y):
        raise ValueError("of mine")
    return fail

def nothing(net):
    return None

def text():
    return "a network"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pack").mkdir()
    Path("pack/foreign_mine.py").write_text(MINE)
    namespace: dict = {}
    exec(MINE, namespace)
    module = namespace["make"]()
    torch.save(module.state_dict(), "w.pt")
    torch.save({"state_dict": module.state_dict()}, "wrapped.pt")
    safetensors.torch.save_file(module.state_dict(), "w.safetensors")
    torch.save(torch.nn.Linear(2, 2), "evil.pt")
    torch.save({"other": torch.ones(2)}, "other.pt")
    Path("broken.pt").write_bytes(b"nothing")
    x, y = np.random.default_rng(0).normal(size=(48, 6)), np.arange(48) % 3
    np.savez("d.npz", x=x, y=y)
    np.savez("short.npz", x=x, y=y[:3])
    np.savez("wide.npz", x=np.ones((48, 7)), y=y)
    np.savez("bare.npz", a=x)
    np.savez("objects.npz", x=np.array([object()], dtype=object), y=y)
    safetensors.torch.save_file({"x": torch.tensor(x).float(), "y": torch.tensor(y)}, "d.safetensors")
    return module


def foreign(**changes):
    given = {
        "module": "pack/foreign_mine.py:make",
        "weights": "w.pt",
        "blocks": "layers.*",
        "credits": "pack/foreign_mine.py:exact",
        "data": "d.npz",
        "tier": "quick",
    } | changes
    return ["audit", *(part for key, value in given.items() if value for part in (f"--{key}", value))]


@pytest.mark.parametrize("weights", ["w.pt", "wrapped.pt", "w.safetensors"])
@pytest.mark.parametrize("data", ["d.npz", "d.safetensors"])
def test_foreign_work_is_audited(weights, data, mine, capsys):
    assert main(foreign(weights=weights, data=data, out="o")) == Exit.DONE
    assert {path.name for path in Path("o").iterdir()} == {"audit.nc", "audit.md", "audit.html"}
    found = cs.load_audit("o/audit.nc")
    x, y = torch.tensor(np.load("d.npz")["x"]).float(), torch.tensor(np.load("d.npz")["y"])
    blocks = [f"layers.{l}" for l in range(11)]
    assert found.data.attrs["blocks"] == blocks
    own = cs.audit(cs.rules.BP().attach(mine, blocks=blocks, head="head"), x, y, tier="quick")
    np.testing.assert_allclose(found.data.state_norm, own.data.state_norm)
    np.testing.assert_allclose(found.data.cosine.sel(credit="exact"), 1)


def test_without_a_folder_nothing_is_written(mine, capsys):
    before = {*Path().rglob("*")}
    assert main(foreign()) == Exit.DONE
    assert {path for path in {*Path().rglob("*")} - before if "__pycache__" not in str(path)} == set()


def test_packages_are_found_in_the_present_folder(mine, capsys):
    name = "pack.foreign_mine"
    assert main(foreign(module=f"{name}:make", credits=f"{name}:exact", head="head", n="32")) == Exit.DONE


def test_a_convention_is_applied_and_hinted_at(mine, capsys):
    assert main(foreign(credits="pack/foreign_mine.py:against", convention="mean,-1", out="o")) == Exit.DONE
    np.testing.assert_allclose(cs.load_audit("o/audit.nc").data.cosine, 1)
    main(foreign(credits="pack/foreign_mine.py:against"))
    out = " ".join(capsys.readouterr().out.split())
    assert "looks mean-reduced" in out


def test_conventions():
    assert read_convention(()) is None
    assert read_convention(("mean", "-1")) == read_convention(("-1", "mean")) == cs.Convention("mean", -1)
    assert read_convention(("-1",)) == cs.Convention(sign=-1)
    with pytest.raises(UsageError, match="two values for the sign"):
        read_convention(("1", "-1"))
    with pytest.raises(UsageError, match=r"unknown convention\.reduction 'avg'"):
        read_convention(("avg",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "evil.pt"}, "evil.pt is a pickle that wants to run code when it is loaded"),
        ({"weights": "other.pt"}, "other.pt does not fit the network: Missing key(s)"),
        ({"weights": "broken.pt"}, "broken.pt is"),
        ({"weights": "none.pt"}, "not found: none.pt"),
        ({"blocks": "layrs.*"}, "no module of the network is called 'layrs.*'"),
        ({"module": "pack/foreign_mine.py:mak"}, "has no function 'mak': did you mean 'make'?"),
        ({"module": "pack/none.py:make"}, "not found: pack/none.py"),
        ({"module": "nopackage:make"}, "No module named 'nopackage'"),
        ({"module": "make"}, "--module must be package.module:function or path/file.py:function, not 'make'"),
        ({"module": "pack/foreign_mine.py:text"}, "must return an nn.Module, not str"),
        ({"credits": "pack/foreign_mine.py:wrong"}, "ValueError: of mine"),
        ({"credits": "pack/foreign_mine.py:nothing"}, "must take the network and return a function (x, y) -> credits"),
        ({"data": "none.npz"}, "not found: none.npz"),
        ({"data": "short.npz"}, "short.npz has 48 inputs x and 3 labels y"),
        ({"data": "bare.npz"}, "bare.npz must hold arrays x and y; it holds a"),
        ({"data": "wide.npz"}, "the network on wide.npz: RuntimeError: mat1 and mat2"),
        ({"data": "objects.npz"}, "objects.npz is no file of plain arrays"),
        ({"data": "digitz"}, "unknown dataset 'digitz': did you mean 'digits'?"),
        ({"head": "haed"}, "haed"),
    ],
)
def test_foreign_mistakes_are_one_line(changes, message, mine, capsys):
    assert main(foreign(**changes)) == Exit.USAGE
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_pickle_is_never_run(mine, capsys):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (Path("sprung"),))

    torch.save({"a": Trap()}, "trap.pt")
    assert main(foreign(weights="trap.pt")) == Exit.USAGE
    assert not Path("sprung").exists()


def test_patterns_stop_at_dots_and_keep_the_order_of_the_network(mine):
    assert match_blocks(mine, "layers.*") == [f"layers.{l}" for l in range(11)]
    assert match_blocks(mine, "layers.1?") == ["layers.10"]
    assert match_blocks(mine, "stem, layers.0.0") == ["stem", "layers.0.0"]
    assert match_blocks(mine, "layers.*,layers.0") == [f"layers.{l}" for l in range(11)]
