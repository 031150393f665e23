import inspect
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import creditscope as cs
from creditscope.cli import Exit, main
from creditscope.cli.train import Train
from creditscope.config import NetworkSpec
from creditscope.runs import RunDirectory, fingerprint
from tests.runs import disks

REST = {"terminal_norm": True, "residual": True, "branch_std": 0.01}
SMALL = ["--rule", "dfa", "--set", "net.width=16", "--set", "net.depth=2", "--epochs", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*")}


def times() -> dict[str, int]:
    return {path: Path(path).stat().st_mtime_ns for path in files() if Path(path).is_file()}


def test_a_run_is_made_and_done_only_once(capsys):
    command = ["train", *SMALL, "--seed", "42", "--set", "rule.scale=2"]
    assert main(command) == Exit.DONE
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("finished: train_loss ")
    assert out.splitlines()[1] == "runs/digits-resmlp-dfa-42"
    assert [line.split(":")[0] for line in err.splitlines()] == ["epoch 0/2", "epoch 1/2", "epoch 2/2"]
    run = RunDirectory.open("runs/digits-resmlp-dfa-42")
    assert run.options["rule"]["scale"] == 2.0
    assert run.options["network"] == {"name": "resmlp", "options": {"width": 16, "depth": 2, **REST}}
    before = times()
    assert main(command) == Exit.DONE
    out, err = capsys.readouterr()
    assert out.startswith("finished before; nothing was done: train_loss ")
    assert err == ""
    assert times() == before


def test_it_is_what_fit_does(tmp_path):
    assert main(["train", *SMALL, "--seed", "7", "--recipe", "study", "--validation", "100", "--out", "a"]) == Exit.DONE
    data = cs.data.load("digits", validation=100)
    network = NetworkSpec("resmlp", {"width": 16, "depth": 2, **REST}, data.shape, data.classes)
    cs.fit(network, cs.rules.DFA(), data, epochs=2, seed=7, recipe=cs.recipes.study, threads=1, out="b")
    assert fingerprint(RunDirectory.open("a")) == fingerprint(RunDirectory.open("b"))


def test_other_options_are_refused_by_name(capsys):
    main(["train", *SMALL, "--out", "here"])
    before = files()
    capsys.readouterr()
    assert main(["train", *SMALL, "--out", "here", "--set", "rule.scale=2"]) == Exit.USAGE
    assert (
        capsys.readouterr().err
        == "creditscope: here was started with other options: rule.scale: 1.0 there, 2.0 given\n"
    )
    assert files() == before


def test_for_a_program(capsys):
    assert main(["train", *SMALL, "--json", "--validation", "100"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    history = RunDirectory.open(found["path"]).history()
    assert history is not None
    assert found["status"] == "finished"
    assert found["already_done"] is False
    assert found["epoch"] == 2
    for name in ("test_acc", "test_loss", "val_acc", "train_loss"):
        assert found[name] == float(history[name][-1])
    assert main(["train", *SMALL, "--json", "--validation", "100"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["already_done"] is True


def test_defaults_are_the_ones_of_fit():
    parameters = inspect.signature(cs.fit).parameters
    ours = Train(rule="dfa")
    for name in ("seed", "device", "threads", "evaluate_every", "keep", "probe", "graph", "compile"):
        assert getattr(ours, name) == parameters[name].default, name


# --- dry run ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_says_what_would_be_done(capsys):
    assert main(["train", *SMALL, "--rule", "dfa:study", "--dry-run"]) == Exit.DONE
    out = capsys.readouterr().out
    assert "rule    dfa normalise=example" in out
    assert "parameters  2,394: stem 1,040, blocks.0 576, blocks.1 576, head 202\n" in out
    assert "12 steps an epoch" in out
    assert not files()


def test_a_dry_run_for_a_program(capsys):
    assert main(["train", *SMALL, "--dry-run", "--json", "--epochs", "50", "--evaluate-every", "7"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    network = NetworkSpec("resmlp", {"width": 16, "depth": 2}, (1, 8, 8), 10)()
    estimate = found["estimate"]
    assert sum(estimate["parameters"].values()) == sum(p.numel() for p in network.parameters())
    steps = 50 * estimate["steps_per_epoch"] * estimate["seconds_per_step"]
    assert estimate["seconds"] == pytest.approx(steps + 9 * estimate["seconds_per_evaluation"])
    assert estimate["peak_bytes"] > 1e7
    assert found["options"]["rule"]["name"] == "dfa"
    assert found["options"]["run"]["epochs"] == 50
    assert not files()


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_diverged_run(capsys):
    command = ["train", *SMALL, "--set", "recipe.optimiser=sgd", "--set", "recipe.lr=1e30", "--out", "d"]
    for words in ("diverged: epoch 1, step ", "diverged before; nothing was done: epoch 1, step "):
        assert main(command) == Exit.DIVERGED
        out, err = capsys.readouterr()
        assert out.startswith(words)
        assert "Traceback" not in err
    assert RunDirectory.open("d").status.state == "diverged"
    main([*command, "--json"])
    assert json.loads(capsys.readouterr().out)["status"] == "diverged"


def test_a_run_that_another_process_has(capsys):
    main(["train", *SMALL, "--out", "busy"])
    run = RunDirectory.open("busy")
    code = (
        "import sys, time; from creditscope.runs import RunDirectory\n"
        f"with RunDirectory.claim('busy', {run.options!r}): print('mine', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        capsys.readouterr()
        assert main(["train", *SMALL, "--out", "busy"]) == Exit.BUSY
        other.kill()
    assert f"process {other.pid} on " in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_taken_up_again_to_the_same_bits(number):
    command = ["train", *SMALL, "--epochs", "4", "--set", "recipe.batch=16"]
    assert main([*command, "--out", "whole"]) == Exit.DONE
    program = [Path(sys.executable).with_name("creditscope"), *command, "--out", "broken"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("epoch 1/4"):
            assert process.poll() is None
        process.send_signal(number)
        last = process.stderr.read().splitlines()[-1]
    assert process.returncode == Exit.INTERRUPTED
    assert last == "creditscope: interrupted; the same command goes on from here"
    status = RunDirectory.open("broken").status
    assert status.state == "interrupted"
    assert status.epoch < 4
    assert main([*command, "--out", "broken"]) == Exit.DONE
    assert fingerprint(RunDirectory.open("broken")) == fingerprint(RunDirectory.open("whole"))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rule", "dfb"], "unknown rule 'dfb': did you mean 'dfa'?"),
        (["--net", "resmlq"], "unknown net 'resmlq': did you mean 'resmlp'?"),
        (["--data", "digist"], "unknown dataset 'digist': did you mean 'digits'?"),
        (["--data", "./nowhere"], "not found: ./nowhere"),
        (["--rule", "./nowhere"], "not found: ./nowhere"),
        (["--net", "./nowhere.py"], "not found: ./nowhere.py"),
        (["--data", "cifar10"], "cifar10 is not in "),
        (["--recipe", "stduy"], "unknown recipe 'stduy': did you mean 'study'?"),
        (["--set", "rule.scael=2"], "unknown option 'rule.scael': did you mean 'rule.scale'?"),
        (["--set", "rule.scale=two"], "rule.scale must be a finite number, not 'two'"),
        (["--set", "rule.scale"], "'rule.scale' is not an option: write SECTION.NAME=VALUE"),
        (["--set", "epochs=3"], "'epochs=3' is not an option"),
        (["--set", "fit.epochs=3"], "unknown section 'fit': "),
        (["--set", "net.inputs=3"], "net.inputs is taken from the data and cannot be set"),
        (["--set", "data.augment=crop"], "unknown data.augment 'crop': did you mean 'crop-flip'?"),
        (["--set", "recipe.lr=-1"], "recipe.lr must be a number"),
        (["--set", "recipe.batch=5000"], "a batch of 5000 is larger than the set of 1437 examples"),
        (["--set", "net.width=0"], "width must be a whole number of at least 1, not 0"),
        (["--epochs", "0"], "epochs must be a whole number of at least 1, not 0"),
        (["--seed", "-1"], "seed must be a whole number of at least 0, not -1"),
        (["--threads", "x"], "--threads must be a whole number or none, not 'x'"),
        (["--validation", "5000"], "digits: validation=5000 must be a whole number above 0 and below the 1437"),
        (["--keep", "0,9"], "keep holds epochs from 0 to 2 and 'last', not 9"),
        (["--keep", "first"], "--keep must be a list with commas, each a whole number or last, not 'first'"),
        (["--graph", "on"], "unknown --graph 'on': "),
        (["--device", "gpu"], "device 'gpu' cannot be used: "),
        (["--rule", "fa", "--set", "rule.level=block", "--net", "small-cnn", "--data", "digits"], "block '"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CREDITSCOPE_DATA", str(tmp_path / "data"))
    net = [] if "--net" in argv else ["--set", "net.depth=2"]
    assert main(["train", "--rule", "dfa", "--epochs", "2", *net, *argv]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"creditscope: {message}")
    assert err.count("\n") == 1
    assert not files()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["train", *SMALL, "--device", "cuda"]) == Exit.USAGE
    assert capsys.readouterr().err.startswith("creditscope: device 'cuda' cannot be used: ")


def test_a_file_where_a_folder_should_be(capsys):
    Path("file").write_text("mine")
    assert main(["train", *SMALL, "--out", "file"]) == Exit.USAGE
    assert capsys.readouterr().err == "creditscope: file is a file where a folder should be\n"
    assert Path("file").read_text() == "mine"


def test_a_folder_of_something_else(capsys):
    Path("folder").mkdir()
    Path("folder", "thesis.tex").write_text("mine")
    assert main(["train", *SMALL, "--out", "folder"]) == Exit.USAGE
    assert "is no run and not empty (it holds thesis.tex)" in capsys.readouterr().err


def test_a_corrupt_checkpoint(capsys):
    main(["train", *SMALL, "--out", "r"])
    path = Path("r/checkpoints/last.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    capsys.readouterr()
    assert main(["train", *SMALL, "--out", "r"]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "last.safetensors is corrupt" in err
    assert err.count("\n") == 1


def test_a_disk_that_fills_up_loses_nothing(capsys):
    assert main(["train", *SMALL, "--out", "whole"]) == Exit.DONE
    capsys.readouterr()
    with disks.longest_file(20_000):
        assert main(["train", *SMALL, "--out", "r"]) == Exit.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("creditscope: r/")
    assert "cannot be written: " in last
    assert main(["train", *SMALL, "--out", "r"]) == Exit.DONE
    assert fingerprint(RunDirectory.open("r")) == fingerprint(RunDirectory.open("whole"))


def test_a_disk_that_is_read_only(capsys):
    Path("disk").mkdir()
    with disks.read_only(Path("disk")):
        assert main(["train", *SMALL, "--out", "disk/r"]) == Exit.USAGE
    err = capsys.readouterr().err
    assert err.startswith("creditscope: disk/r cannot be made: ")
    assert err.count("\n") == 1
