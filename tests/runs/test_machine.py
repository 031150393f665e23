import json
import platform
import shutil
import subprocess

import numpy
import pytest
import torch

import creditscope
from creditscope.runs import environment, machine


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    git(tmp_path, "init", "-q")
    (tmp_path / "study.toml").write_text("a = 1\n")
    git(tmp_path, "add", "study.toml")
    git(tmp_path, "commit", "-q", "-m", "start")
    return tmp_path


def test_what_is_recorded():
    record = environment()
    versions = {"creditscope": creditscope.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
    assert record["versions"] == {**versions, "torch": str(torch.__version__), "cuda": torch.version.cuda}
    assert record["torch"]["threads"] == torch.get_num_threads()
    assert record["device"]["type"] == "cpu"
    assert record["device"]["name"]
    assert "git" not in record


def test_it_is_json_and_the_same_when_asked_again():
    record = environment(device=torch.device("cpu"))
    assert json.loads(json.dumps(record)) == record == environment()


def test_what_else_the_caller_knows():
    assert environment(argv=["train", "--rule", "dfa"])["argv"] == ["train", "--rule", "dfa"]


def test_determinism_is_recorded():
    assert environment()["torch"]["deterministic_algorithms"] is False
    torch.use_deterministic_algorithms(True)
    try:
        assert environment()["torch"]["deterministic_algorithms"] is True
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_commit_of_a_folder(repository):
    clean = {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False}
    assert environment(folder=repository)["git"] == clean
    (repository / "runs").mkdir()
    (repository / "runs" / "log.txt").touch()
    assert environment(folder=repository / "runs")["git"] == clean
    (repository / "study.toml").write_text("a = 2\n")
    assert environment(folder=str(repository))["git"] == {**clean, "dirty": True}


def test_a_folder_outside_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment(folder=tmp_path)["git"] is None


def test_a_repository_without_a_commit(tmp_path, repository):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    git(fresh, "init", "-q")
    assert environment(folder=fresh)["git"] is None


def test_no_git(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment(folder=repository)["git"] is None


def test_a_processor_that_linux_does_not_name(monkeypatch):
    monkeypatch.setattr(machine.Path, "read_text", lambda *arguments, **options: "cpu : x\n")
    assert machine._processor() == (platform.processor() or platform.machine())
