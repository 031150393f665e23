import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import creditscope
from creditscope import cli
from creditscope.cli import COMMANDS, Exit, main
from creditscope.cli.command import Command, flags_of
from creditscope.cli.train import Train

HELP = Path(__file__).parent / "help"
PROGRAM = Path(sys.executable).with_name("creditscope")


def test_version(capsys):
    assert main(["--version"]) == Exit.DONE
    assert capsys.readouterr().out == f"creditscope {creditscope.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == Exit.DONE
    shown = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"  {name:<12}{entry.summary}\n" in shown


def test_without_a_command(capsys):
    assert main([]) == Exit.USAGE
    assert capsys.readouterr().out.startswith("usage: creditscope COMMAND")


def test_the_help_of_a_group(capsys):
    assert main(["data", "--help"]) == Exit.DONE
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "  data " in line] == ["fetch", "list"]
    assert main(["data"]) == Exit.USAGE


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_golden_help(name, capsys, monkeypatch):
    """The help is part of the product: a change of it is to be seen (the texts lie in ``help/``)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([*name.split(), "--help"]) == Exit.DONE
    assert capsys.readouterr().out == (HELP / f"{name.replace(' ', '-') or 'creditscope'}.txt").read_text("utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_text(name):
    for flag in flags_of(COMMANDS[name].load()):
        assert flag.doc, f"{name}: {flag.spelling}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tain"], "unknown command 'tain': did you mean 'train'? There are demo, train, audit, list, data."),
        (
            ["data", "fetsh"],
            "unknown command 'data fetsh': did you mean 'data fetch'? There are data fetch, data list.",
        ),
        (["--verbose"], "unknown command '--verbose'"),
        (["train"], "--rule must be given (see `creditscope train --help`)"),
        (["train", "--ruel", "dfa"], "unknown option '--ruel': did you mean '--rule'?"),
        (["list", "--jsn"], "unknown option '--jsn': did you mean '--json'?"),
        (["data", "fetch"], "NAME must be given (see `creditscope data fetch --help`)"),
        (
            ["train", "--rule", "dfa", "--epohcs", "3"],
            "unknown option '--epohcs': did you mean '--epochs'? There are --rule",
        ),
        (["train", "--rule", "dfa", "--epohcs=3"], "unknown option '--epohcs': did you mean '--epochs'?"),
        (["train", "--rule", "dfa", "--epochs"], "argument --epochs: expected one argument"),
        (["train", "--rule", "dfa", "--epochs", "many"], "--epochs must be a whole number, not 'many'"),
        (["train", "--rule", "dfa", "stray"], "'stray' is one argument too many (see `creditscope train --help`)"),
        (["train", "--rule", "dfa", "--epoch", "3"], "unknown option '--epoch': did you mean '--epochs'?"),
        (["list", "ruels"], "unknown KIND 'ruels': did you mean 'rules'? There are rules, nets, data."),
    ],
)
def test_usage_errors_are_one_line_with_the_nearest_match(argv, message, capsys):
    assert main(argv) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"creditscope: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        Train(rule="dfa"),
        Train(
            rule="dfa:study", epochs=3, assignments=("rule.scale=2", "data.x=a b"), keep=(0, 5), compile=True, out="a b"
        ),
    ],
)
def test_arguments_make_the_command_again(command):
    assert Train.parse("train", shlex.split(" ".join(command.arguments()))) == command


# --- ends -------------------------------------------------------------------------------------------------------------


class Broken(Command):
    """A command with a fault."""

    def run(self) -> Exit:
        raise ZeroDivisionError("of ours")


class Greedy(Command):
    """A command that wants more memory than there is."""

    def run(self) -> Exit:
        torch.empty(2**60)
        return Exit.DONE


class Interrupted(Command):
    """A command during which Ctrl-C is pressed."""

    def run(self) -> Exit:
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
        return Exit.DONE


class Terminated(Command):
    """A command during which SIGTERM arrives."""

    def run(self) -> Exit:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)
        return Exit.DONE


@pytest.fixture
def command(monkeypatch):
    def add(kind: type[Command]) -> str:
        entry = cli.Entry("odd", f"{__name__}:{kind.__name__}", "")
        monkeypatch.setitem(COMMANDS, "odd", entry)
        return entry.key

    return add


def test_an_error_of_ours_is_told_from_one_of_the_user(command, capsys):
    assert main([command(Broken)]) == Exit.INTERNAL
    err = capsys.readouterr().err
    assert "ZeroDivisionError: of ours" in err
    assert err.endswith("this is a fault of creditscope; please report it with the lines above\n")


def test_too_little_memory_is_no_fault_of_ours(command, capsys):
    assert main([command(Greedy)]) == Exit.USAGE
    err = capsys.readouterr().err
    assert err.startswith("creditscope: out of memory; a smaller network or recipe.batch takes less (")
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", [Interrupted, Terminated])
def test_ctrl_c_and_sigterm(kind, command, capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert main([command(kind)]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "creditscope: interrupted; the same command goes on from here\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_goes_away(tmp_path):
    done = subprocess.run(f"'{PROGRAM}' list rules | true", shell=True, capture_output=True, text=True)
    assert done.stderr == ""


# --- lightness --------------------------------------------------------------------------------------------------------

HEAVY = {"torch", "numpy", "xarray", "matplotlib", "rich", "h5py", "jinja2"}


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["list", "rules"],
        ["list", "nets"],
        ["list", "data"],
        *([*c.split(), "--help"] for c in COMMANDS),
    ],
)
def test_what_only_looks_loads_nothing_heavy(argv):
    code = f"import sys; from creditscope.cli import main; main({argv}); print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_data_list_loads_no_torch():
    code = "import sys; from creditscope.cli import main; main(['data', 'list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_installed_program():
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"creditscope {creditscope.__version__}\n")
