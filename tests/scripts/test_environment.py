"""The set-up of ``.venv``: what was interrupted is never used, what is right is left alone, two at once take turns."""

import importlib.util
import os
import re
import subprocess
import threading
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Setup:
    """The script on a small project in a folder of its own, with a pip that only takes notes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        spec = importlib.util.spec_from_file_location("environment", SCRIPTS / "environment.py")
        assert spec is not None
        assert spec.loader is not None
        self.script: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.script)
        self.constraints = folder / "constraints.txt"
        self.constraints.write_text("torch==1\n")
        self.stamps = folder / ".venv" / "stamps"
        for name, value in {
            "ROOT": folder,
            "VENV": folder / ".venv",
            "STAMPS": self.stamps,
            "CONSTRAINTS": self.constraints,
            "pip_install": self.pip_install,
        }.items():
            monkeypatch.setattr(self.script, name, value)
        self.installed: list[tuple[str, ...]] = []
        self.failing: str | None = None

    def pip_install(self, *arguments: str, check: bool = True) -> bool:
        self.installed.append(arguments)
        fails = self.failing in arguments
        if fails and check:
            raise subprocess.CalledProcessError(1, "pip")
        return not fails

    def run(self, *extras: str) -> int:
        """Return how many times pip was called."""
        before = len(self.installed)
        self.script.main(list(extras))
        return len(self.installed) - before


@pytest.fixture
def setup(tmp_path, monkeypatch):
    return Setup(tmp_path, monkeypatch)


def test_torch_comes_first_and_alone(setup):
    setup.run()
    assert setup.installed == [("torch",), ("--editable", ".")]


def test_what_is_right_is_left_alone(setup):
    assert setup.run("dev") == 4
    assert setup.run("dev") == 0
    assert setup.run() == 0
    assert setup.run("dev", "docs") == 1


def test_new_requirements_make_it_anew(setup):
    setup.run("dev")
    leftover = setup.stamps.parent / "leftover"
    leftover.touch()
    setup.constraints.write_text("torch==2\n")
    assert setup.run("dev") == 4
    assert not leftover.exists()


@pytest.mark.parametrize("failing", ["torch", "."])
def test_an_interrupted_set_up_is_not_used(setup, failing):
    setup.failing = failing
    with pytest.raises(subprocess.CalledProcessError):
        setup.run()
    setup.failing = None
    assert setup.run() == 2


def test_an_oracle_that_cannot_be_had_is_no_failure(setup, capsys):
    setup.failing = "biotorch"
    setup.run("dev")
    assert "biotorch could not be installed" in capsys.readouterr().err


def test_two_at_once_take_turns(setup, monkeypatch):
    inside, proceed = threading.Event(), threading.Event()
    make_package = setup.script.make_package

    def slowly():
        inside.set()
        assert proceed.wait(30)
        make_package()

    monkeypatch.setattr(setup.script, "make_package", slowly)
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        if "waiting" in line:
            proceed.set()

    monkeypatch.setattr(setup.script, "say", say)
    first, second = threading.Thread(target=setup.run), threading.Thread(target=setup.run)
    first.start()
    assert inside.wait(30)
    second.start()  # finds the lock held, says that it waits, and so lets the first one go on
    first.join(30)
    second.join(30)
    assert any("waiting" in line for line in told)
    assert setup.installed == [("torch",), ("--editable", ".")]


def test_extras_are_those_of_the_project(setup):
    extras = setup.script.PROJECT["project"]["optional-dependencies"]
    setup.run("docs")
    assert setup.installed[-1] == tuple(extras["docs"])


def test_pins_fit_the_ranges(setup):
    """Every package that is asked for has a pin, so that CI never meets a release it did not choose."""
    project = setup.script.PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"], *setup.script.ORACLES]
    pinned = {line.split("==")[0].lower() for line in (SCRIPTS.parent / "constraints.txt").read_text().splitlines()}
    names = {re.split("[>=[]", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned


def test_a_python_that_will_not_do_is_refused():
    command = ["/bin/sh", str(SCRIPTS / "setup")]
    done = subprocess.run(command, env={**os.environ, "PYTHON": "/bin/false"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "setup: PYTHON=/bin/false is not a Python >= 3.11 with pip\n"
