import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import creditscope as cs
from creditscope.cli import Exit, main, story
from creditscope.cli.train import Train
from creditscope.runs import RunDirectory


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The demo, once for all tests: its folder, and what it printed."""
    place = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        shorten(patch, place)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert main(["demo"]) == Exit.DONE
    return place, out.getvalue(), err.getvalue()


def shorten(patch: pytest.MonkeyPatch, place: Path) -> None:
    patch.chdir(place)
    patch.setattr(story, "EPOCHS", 2)
    patch.setattr(story, "SEEDS", (1, 2))
    patch.setattr(story, "SETTINGS", ("net.width=16", "net.depth=2", "recipe.batch=256"))


@pytest.fixture
def shorter(told, monkeypatch, tmp_path):
    """A copy of that folder, and of the demo one rule and its baselines."""
    shutil.copytree(told[0], tmp_path, dirs_exist_ok=True)
    shorten(monkeypatch, tmp_path)
    monkeypatch.setattr(story, "RULES", {"fa": story.RULES["fa"]})
    kept = {method: given for method, given in story.METHODS.items() if method in ("fa", "frozen-fa", "shallow")}
    monkeypatch.setattr(story, "METHODS", kept)


def changed(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_whole_story(told):
    place, out, err = told
    lines = out.splitlines()
    assert re.split("  +", lines[0]) == [
        *("rule", "accuracy", "frozen", "frozen by BP", "no blocks", "margin", "verdict", "flags")
    ]
    assert [line.split("  ")[0] for line in lines[1:4]] == [*story.RULES.values()]
    assert lines[-2].startswith(
        "Test accuracy after epoch 2, mean ± sample standard deviation (ddof = 1) of 2 seeds; 360 test examples."
    )
    assert lines[-1] == "runs/demo/report.html"
    trained, audited = err.splitlines()[:14], err.splitlines()[14:]
    assert all(": finished, test_acc 0." in line for line in trained)
    assert [line.split()[3].rstrip(":") for line in audited] == [
        f"{method}-{seed}" for method in story.METHODS for seed in (1, 2)
    ]
    demo = place / "runs/demo"
    assert {path.name for path in (demo / "figures").iterdir()} == {
        f"{name}.{kind}" for name in ("accuracy", "alignment", "norms") for kind in ("pdf", "png")
    }
    assert {f"{method}-{seed}" for method in story.METHODS for seed in (1, 2)} == {
        path.name for path in demo.iterdir() if (path / "options.json").exists()
    }
    page = (demo / "report.html").read_text("utf-8")
    assert 'src="data:image/svg+xml;base64,' in page
    for rule in story.RULES:
        assert f'href="{rule}-1/audit.html"' in page
        assert (demo / f"{rule}-1" / "audit.html").exists()


def test_each_rule_is_judged_against_all_its_baselines(told):
    place, _, _ = told
    for rule, names in {"dfa": {"frozen-bp", "frozen-rule", "shallow"}, "bp": {"frozen-bp", "shallow"}}.items():
        attrs = cs.load_audit(place / "runs/demo" / f"{rule}-2" / "audit.nc").data.attrs
        assert {key.removeprefix("baseline_") for key in attrs if key.startswith("baseline_")} - {"mean"} == names
        finals = []
        for seed in (1, 2):
            history = RunDirectory.open(place / "runs/demo" / f"{rule}-{seed}").history()
            assert history is not None
            finals.append(float(history.test_acc[-1]))
        assert attrs["accuracies"] == finals


def test_the_numbers_are_those_of_the_runs(shorter, capsys):
    main(["demo", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row[0]: row[1:] for row in found["table"]["rows"]}
    assert {*found["verdicts"]} == {f"runs/demo/{method}-{seed}" for method in story.METHODS for seed in (1, 2)}
    for method, cell in (("fa", 0), ("frozen-fa", 1), ("shallow", 3)):
        final = []
        for seed in (1, 2):
            history = RunDirectory.open(f"runs/demo/{method}-{seed}").history()
            assert history is not None
            final.append(float(history.test_acc[-1]))
        assert rows[story.RULES["fa"]][cell] == f"{np.mean(final):.3f} ± {np.std(final, ddof=1):.3f}"


def test_a_second_demo_trains_nothing_again(shorter, capsys):
    main(["demo"])
    before = changed(Path("runs/demo"))
    first = capsys.readouterr().out
    assert main(["demo"]) == Exit.DONE
    assert capsys.readouterr().out == first
    assert {path for path, time in changed(Path("runs/demo")).items() if before.get(path) != time} == {
        *(f"runs/demo/figures/{name}.{kind}" for name in ("accuracy", "alignment", "norms") for kind in ("png", "pdf")),
        "runs/demo/report.html",
    }


def test_the_report_is_the_same_bytes_again(shorter):
    main(["demo"])
    first = {path: path.read_bytes() for path in Path("runs/demo").glob("[fr]*/*.p*")}
    page = Path("runs/demo/report.html").read_bytes()
    main(["demo"])
    assert {path: path.read_bytes() for path in first} == first
    assert Path("runs/demo/report.html").read_bytes() == page


def test_the_commands_on_the_page_are_the_runs(shorter, capsys):
    main(["demo"])
    command = Train(**vars(story._training(Path("runs/demo"), "frozen-fa", 2)))
    line = " ".join(["creditscope train", *command.arguments()])
    assert line in Path("runs/demo/report.html").read_text("utf-8")
    capsys.readouterr()
    assert main(shlex.split(line)[1:]) == Exit.DONE
    assert capsys.readouterr().out.startswith("finished before; nothing was done")


def test_a_demo_of_other_options_is_not_mixed_in(shorter, monkeypatch, capsys):
    main(["demo"])
    monkeypatch.setattr(story, "EPOCHS", 3)
    assert main(["demo"]) == Exit.USAGE
    assert "runs/demo/fa-1 was started with other options: epochs: 2 there, 3 given" in capsys.readouterr().err


def test_a_diverged_run_leaves_a_gap_and_is_named(shorter, monkeypatch, capsys):
    wild = ("fa", "recipe.optimiser=sgd", "recipe.lr=1e30")
    monkeypatch.setattr(story, "METHODS", {**story.METHODS, "fa": wild})
    assert main(["demo", "--out", "d"]) == Exit.DIVERGED
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[1])[1] == "–"
    assert lines[-3:] == ["diverged: d/fa-1", "diverged: d/fa-2", "d/report.html"]


def test_histories_are_gathered_by_rule_and_seed(shorter):
    main(["demo"])
    plans = [story._training(Path("runs/demo"), method, seed) for method in story.METHODS for seed in (1, 2)]
    _, results = story._train(plans)
    data = story._gathered(results)
    assert dict(data.sizes) == {"rule": 3, "seed": 2, "epoch": 3, "layer": 3}
    own = RunDirectory.open("runs/demo/fa-2").history()
    xr.testing.assert_equal(data.sel(rule="fa", seed=2, drop=True).test_acc, own.test_acc)
    xr.testing.assert_equal(data.sel(rule="fa", seed=2, drop=True).state_norm, own.state_norm)
