"""The command line: ``main``, and the registry of commands. Importing this loads no torch, nor does ``--help``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from creditscope import __version__
from creditscope.cli.command import Command, Exit, complain, say
from creditscope.errors import CreditscopeError, unknown
from creditscope.registry import Entry
from creditscope.runs import RunBusyError

COMMANDS = {
    entry.key: entry
    for entry in [
        Entry("demo", "creditscope.cli.demo:Demo", "the whole story on data that ships with the package"),
        Entry("train", "creditscope.cli.train:Train", "one run: a rule, a network, data, a seed, options"),
        Entry("audit", "creditscope.cli.audit:Audit", "what was learned, layer by layer, and whether to believe it"),
        Entry("list", "creditscope.cli.list:List", "what there is: rules, nets, data"),
        Entry("data fetch", "creditscope.cli.data:Fetch", "download a data set and verify it, or take local files"),
        Entry("data list", "creditscope.cli.data:Listing", "which data sets are there, and where"),
    ]
}

_HELP = """\
usage: creditscope COMMAND [options]

Train networks without backpropagation, and know what to believe.

commands:
{commands}

`creditscope COMMAND --help` says more of each; --version prints the version.
exit codes: 0 done (or already done), 1 internal error, 2 usage, 3 flagged and 4 could not judge (audit alone),
5 diverged, 6 another process has the run, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on its arguments and return its exit code."""
    with _sigterm_as_ctrl_c():
        try:
            return _run([*(sys.argv[1:] if argv is None else argv)])
        except SystemExit as left:  # argparse leaves so after --help
            return int(left.code or 0)
        except RunBusyError as error:
            complain(f"creditscope: {error}")
            return Exit.BUSY
        except CreditscopeError as error:
            complain(f"creditscope: {error}")
            return Exit.USAGE
        except KeyboardInterrupt:
            complain("creditscope: interrupted; the same command goes on from here")
            return Exit.INTERRUPTED
        except BrokenPipeError:  # whoever read our output has gone, as in `creditscope list rules | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.DONE
        except Exception as error:
            if _is_out_of_memory(error):
                complain(f"creditscope: out of memory; a smaller network or recipe.batch takes less ({_first(error)})")
                return Exit.USAGE
            complain(traceback.format_exc())
            complain("creditscope: this is a fault of creditscope; please report it with the lines above")
            return Exit.INTERNAL


def _is_out_of_memory(error: Exception) -> bool:
    """Tell it without loading torch, which says it in two ways: a type on a GPU, a text on a CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        say(_HELP.format(commands=_table([*COMMANDS])))
        return Exit.DONE if argv else Exit.USAGE
    if argv[0] == "--version":
        say(f"creditscope {__version__}")
        return Exit.DONE
    name, rest = _command(argv)
    if name not in COMMANDS:
        say(f"usage: creditscope {name} COMMAND [options]\n\ncommands:\n{_table(_below(name))}")
        return Exit.DONE if rest else Exit.USAGE
    kind: type[Command] = COMMANDS[name].load()
    return kind.parse(name, rest).run()


def _command(argv: list[str]) -> tuple[str, list[str]]:
    """Split the arguments into the command's name, of one word or two, and what is left."""
    first, *rest = argv
    if first in COMMANDS:
        return first, rest
    if not _below(first):
        raise unknown("command", first, dict.fromkeys(name.partition(" ")[0] for name in COMMANDS))
    if not rest or rest[0] in ("-h", "--help"):
        return first, rest
    if f"{first} {rest[0]}" not in COMMANDS:
        raise unknown("command", f"{first} {rest[0]}", _below(first))
    return f"{first} {rest[0]}", rest[1:]


def _below(name: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(f"{name} ")]


def _table(names: list[str]) -> str:
    return "\n".join(f"  {name:<12}{COMMANDS[name].summary}" for name in names)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
