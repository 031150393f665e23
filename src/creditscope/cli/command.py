"""What a command is: a dataclass whose fields are its flags, their docstrings the help, and ``run`` the work."""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import IntEnum
from typing import Any, NoReturn, Self

from creditscope.errors import UsageError, unknown
from creditscope.options import Option, convert, docs_of, options_of


class Exit(IntEnum):
    """What the program ends with."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    FLAGGED = 3
    UNJUDGED = 4
    DIVERGED = 5
    BUSY = 6
    INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Command:
    """The base of all commands."""

    json: bool = False
    """Print one JSON object, for a program to read."""

    def run(self) -> Exit:
        """Do the work."""
        raise NotImplementedError

    @classmethod
    def parse(cls, name: str, argv: Sequence[str]) -> Self:
        """Return the command that the arguments ask for; ``--help`` prints and leaves."""
        flags = flags_of(cls)
        parser = _parser(cls, name, flags)
        given, rest = parser.parse_known_args(argv)
        if rest:
            raise _not_understood(rest, flags, parser.prog)
        texts = vars(given)
        for item in flags:
            if item.is_required and item.field not in texts:
                raise UsageError(f"{item.spelling} must be given (see `{parser.prog} --help`)")
        return cls(**{f.field: convert(texts[f.field], f.option.hint, f.spelling) for f in flags if f.field in texts})

    def arguments(self) -> list[str]:
        """Return the arguments that :meth:`parse` makes this command of, quoted for a shell."""
        return [text for item in flags_of(type(self)) for text in item.arguments(getattr(self, item.field))]


def say(text: str = "") -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_json(value: Mapping[str, Any]) -> None:
    """Write the one JSON object of a command."""
    say(json.dumps(value, allow_nan=False))


def complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts, set in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


# --- flags ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """A field of a command as it is given: by its name, or by its place."""

    field: str
    option: Option
    doc: str
    spelling: str
    """``--evaluate-every``, or ``NAME`` where it is given by its place."""
    value: str
    """What stands for its value in the help."""
    repeated: bool

    @property
    def is_placed(self) -> bool:
        """Whether it is given by its place and not by its name."""
        return not self.spelling.startswith("-")

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.option.default is MISSING

    @property
    def help(self) -> str:
        """What it is, and its default."""
        default = self.option.default
        if self.is_required or default is None or default is False or default == ():
            return self.doc
        return f"{self.doc} (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"

    def arguments(self, value: Any) -> list[str]:
        """Return how a value is given, quoted for a shell; nothing where it is the default."""
        if value == self.option.default:
            return []
        if value is True:
            return [self.spelling]
        values = [*value] if self.repeated else [",".join(map(str, value)) if isinstance(value, tuple) else value]
        texts = [shlex.quote(str(item)) for item in values]
        return texts if self.is_placed else [part for text in texts for part in (self.spelling, text)]


def argument(spelling: str, default: Any = MISSING) -> Any:
    """Make a field an argument that is given by its place; one without a default is required."""
    return field(default=default, metadata={"spelling": spelling})


def flag(
    default: Any = MISSING, *, spelling: str | None = None, value: str | None = None, repeated: bool = False
) -> Any:
    """Make a field a flag: of another name than the field's, with a word for its value, or given several times."""
    return field(default=default, metadata={"spelling": spelling, "value": value, "repeated": repeated})


def flags_of(kind: type[Command]) -> list[Flag]:
    """Return the flags of a command, those that all commands have last."""
    docs, options = docs_of(kind), options_of(kind)
    flags = [_flag(item, options[item.name], docs.get(item.name, "")) for item in fields(kind)]
    return sorted(flags, key=lambda flag: flag.field in Command.__dataclass_fields__)


def _flag(item: Field[Any], option: Option, doc: str) -> Flag:
    meta = item.metadata
    spelling = meta.get("spelling") or "--" + item.name.replace("_", "-")
    value = meta.get("value") or ("N" if option.hint in (int, int | None) else "NAME")
    return Flag(item.name, option, doc, spelling, value, meta.get("repeated", False))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def _parser(kind: type[Command], name: str, flags: list[Flag]) -> argparse.ArgumentParser:
    """Return a parser that leaves values as texts: they are converted by their field's type afterwards."""
    prog = f"creditscope {name}"
    places = [f.spelling if f.is_required else f"[{f.spelling}]" for f in flags if f.is_placed]
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *places, "[options]"]),
        description=inspect.getdoc(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for flag in flags:
        _add(parser, flag)
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    text = flag.help.replace("%", "%%")
    if flag.is_placed:
        parser.add_argument(flag.field, metavar=flag.spelling, nargs="?", help=text)
    elif flag.option.hint is bool:
        parser.add_argument(flag.spelling, dest=flag.field, action="store_true", help=text)
    else:
        parser.add_argument(
            flag.spelling,
            dest=flag.field,
            action="append" if flag.repeated else "store",
            metavar=flag.value,
            help=text,
        )


def _not_understood(rest: Sequence[str], flags: list[Flag], prog: str) -> UsageError:
    for item in rest:
        if item.startswith("-"):
            return unknown("option", item.partition("=")[0], [f.spelling for f in flags if not f.is_placed])
    return UsageError(f"'{rest[0]}' is one argument too many (see `{prog} --help`)")
