"""Make the virtual environment ``.venv``, or leave it alone where it is right: ``environment.py [EXTRA ...]``.

A stamp for the package and one for each extra hold the fingerprint of what they were installed from. A stamp is written
last, so an environment that was interrupted half-way counts as not there, and a lock lets a second set-up wait for the
first. Only the standard library: this runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMPS = VENV / "stamps"
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Other libraries that tests compare with where they can be had, without what they would drag in.
ORACLES = ["biotorch"]


def fingerprint() -> str:
    """Return a hash of all that decides what is installed: this Python, the requirements, the pins, this script."""
    python = [sys.version, sys.base_prefix, str(ROOT)]
    requirements = json.dumps([PROJECT["project"], PROJECT["build-system"]], sort_keys=True)
    parts = [*python, requirements, CONSTRAINTS.read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def stamped(part: str) -> bool:
    """Whether a part was installed, to the end, from what stands in the files now."""
    stamp = STAMPS / part
    return stamp.exists() and stamp.read_text() == fingerprint()


def stamp(part: str) -> None:
    """Record that a part is complete."""
    STAMPS.mkdir(exist_ok=True)
    partial = STAMPS / f".{part}"
    partial.write_text(fingerprint())
    partial.replace(STAMPS / part)


def pip_install(*arguments: str, check: bool = True) -> bool:
    """Install into the environment with the pip of the Python that runs this, so that ensurepip is not needed."""
    pip = [sys.executable, "-m", "pip", "--python", str(VENV / "bin" / "python"), "install", "--no-input"]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    options = ["--no-warn-conflicts", "--constraint", str(CONSTRAINTS)]  # the oracles' own dependencies are left out
    return subprocess.run([*pip, *quiet, *options, *arguments], cwd=ROOT, check=check).returncode == 0


def make_package() -> None:
    """Make the environment anew with the package itself, editable."""
    shutil.rmtree(STAMPS, ignore_errors=True)  # first, so that an interrupted removal leaves nothing that looks whole
    shutil.rmtree(VENV, ignore_errors=True)
    venv.create(VENV, symlinks=True)
    pip_install("torch")  # on its own, so that the pin alone decides which build of it is taken
    pip_install("--editable", ".")


def install_extra(extra: str) -> None:
    """Add what one extra of pyproject.toml asks for; what is there already stays, for all versions are pinned."""
    pip_install(*PROJECT["project"]["optional-dependencies"][extra])
    if extra == "dev" and not pip_install("--no-deps", *ORACLES, check=False):
        say(f"{', '.join(ORACLES)} could not be installed: the tests that compare with it will be skipped")


@contextmanager
def locked() -> Iterator[None]:
    """Hold the set-up's lock, which the system releases also when this process is killed."""
    with (ROOT / ".venv.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is under way; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    """Tell the user; standard output belongs to the command that follows."""
    sys.stderr.write(f"setup: {line}\n")


def main(extras: list[str]) -> None:
    """Bring the environment up to date with the package and the extras."""
    with locked():
        if not stamped("package"):
            say(f"making .venv with Python {sys.version.split()[0]}; this takes a few minutes, once")
            make_package()
            stamp("package")
        for extra in extras:
            if not stamped(extra):
                say(f"adding what '{extra}' needs")
                install_extra(extra)
                stamp(extra)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        say("pip could not install what is needed (its words are above); nothing half-made will be used")
        sys.exit(error.returncode)
    except KeyboardInterrupt:
        sys.exit(130)
