import json

import pytest

from creditscope import data
from creditscope.cli import Exit, main
from creditscope.cli.progress import downloading
from tests.data import layouts


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDITSCOPE_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def test_list_says_what_is_there_and_what_brings_the_rest(root, capsys):
    layouts.write_cifar10_binary(root / "cifar-10-batches-bin", layouts.cifar10())
    assert main(["data", "list"]) == Exit.DONE
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == [entry.key for entry in data.REGISTRY]
    assert lines["cifar10"].endswith(str(root / "cifar-10-batches-bin"))
    assert lines["mnist"].endswith("not there: creditscope data fetch mnist")


def test_list_for_a_program(root, capsys):
    assert main(["data", "list", "--json", "--root", str(root)]) == Exit.DONE
    paths = {row["name"]: row["path"] for row in json.loads(capsys.readouterr().out)["data"]}
    assert paths["mnist"] is None
    assert paths["digits"].endswith("digits.npz")


def test_fetch_of_what_ships(root, capsys):
    assert main(["data", "fetch", "digits", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["path"].endswith("digits.npz")
    assert not root.exists()


def test_fetch_passes_its_flags_on(monkeypatch, tmp_path, capsys):
    calls = []

    def fetch(name, **options):
        options.pop("progress")("data.tar.gz", 5, 10)
        calls.append((name, options))
        return tmp_path

    monkeypatch.setattr("creditscope.data.download.fetch", fetch)
    assert main(["data", "fetch", "mnist", "--from", "here", "--root", "there"]) == Exit.DONE
    assert calls == [("mnist", {"root": "there", "source": "here"})]
    out, err = capsys.readouterr()
    assert out == f"mnist is in {tmp_path}\n"
    assert err == "data.tar.gz: 0.0 MB of 0.0\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mnits"], "unknown dataset 'mnits': did you mean 'mnist'?"),
        (["mnist", "--from", "./nowhere"], "not found: nowhere"),
    ],
)
def test_refused(argv, message, root, capsys):
    assert main(["data", "fetch", *argv]) == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"creditscope: {message}")


def test_files_that_are_wrong_are_not_taken(root, tmp_path, capsys):
    made = layouts.write_cifar10_binary(tmp_path / "cifar-10-batches-bin", layouts.cifar10())
    assert main(["data", "fetch", "cifar10", "--from", str(made)]) == Exit.USAGE
    assert "published checksum" in capsys.readouterr().err
    assert not (root / "cifar-10-batches-bin").exists()


def test_progress_of_a_download_is_a_line_a_tenth(capsys):
    with downloading() as progress:
        for done in range(0, 101, 5):
            progress("a.gz", done * 10**6, 10**8)
        progress("b.gz", 1, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["a.gz: 0.0 MB of 100.0", "a.gz: 10.0 MB of 100.0"]
    assert len(lines) == 12
    assert lines[-1] == "b.gz: 0.0 MB"
