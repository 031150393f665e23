import io
from types import SimpleNamespace

import pytest

from creditscope.cli import Exit, main, progress


def end(epoch: int, **row: float):
    return SimpleNamespace(epoch=epoch, epochs=10, row={"epoch": epoch, "lr": 1e-3, **row})


def test_a_line_an_epoch(capsys):
    with progress.training("run", 10) as shown:
        shown.step(1, 1, 12)
        shown.epoch(end(1, train_loss=0.5, train_acc=0.75, test_acc=0.7))
    assert capsys.readouterr().err == "epoch 1/10: train_loss 0.500, train_acc 0.750, test_acc 0.700\n"


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Give what turns standard error into a terminal; called in the test, since pytest puts its own in before that."""

    def open_terminal() -> Terminal:
        screen = Terminal()
        monkeypatch.setattr("sys.stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        return screen

    return open_terminal


def test_a_bar_on_a_terminal(terminal):
    screen = terminal()
    with progress.training("run", 10) as shown:
        shown.step(5, 12, 12)
        shown.epoch(end(5, test_acc=0.7))
        assert isinstance(shown, progress.Bar)
        task = shown._bars.tasks[0]
        assert (task.completed, task.total) == (60, 120)
        assert task.description == "run  epoch 5/10  test_acc 0.700"
    assert "epoch 5/10" in screen.getvalue()


def test_several_on_a_terminal(terminal):
    screen = terminal()
    with progress.several(2, 10) as shown:
        for label in ("a", "b"):
            shown.begin(label)
            shown.epoch(end(5, test_loss=0.25))
            assert shown._bars is not None
            task = shown._bars.tasks[0]
            assert task.description == f"{label}  epoch 5/10  test_loss 0.250"
            shown.end(SimpleNamespace(status="finished", history={"test_acc": [0.1, 0.5]}))
        assert (task.completed, task.total) == (15, 20)
    assert "2/2 b: finished, test_acc 0.500" in screen.getvalue()


def test_downloads_on_a_terminal(terminal):
    screen = terminal()
    with progress.downloading() as show:
        show("a.gz", 1, None)
        show("a.gz", 5, 10)
        show("b.gz", 1, 10)
    assert "a.gz" in screen.getvalue()
    assert "b.gz" in screen.getvalue()


def test_a_run_with_a_bar(terminal, tmp_path, capsys):
    screen = terminal()
    options = ["--set", "net.width=16", "--epochs", "2", "--threads", "1", "--out", str(tmp_path / "r")]
    assert main(["train", "--rule", "dfa", *options]) == Exit.DONE
    assert "epoch 2/2" in screen.getvalue()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "r")
