"""Options: names and types read off a dataclass or a constructor; values checked, or read from text, by their type.

The types that an option may have are ``bool``, ``int``, ``float``, ``str``, ``None``, ``Literal``, a union of these,
and ``tuple[one of these, ...]``, in text separated by commas. A type that is not known here takes any value.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from creditscope.errors import UsageError, unknown


@dataclass(frozen=True)
class Option:
    """One option: its type, and its default, which is MISSING where it has to be given."""

    hint: Any
    default: Any = MISSING


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a class by name: a dataclass's fields, or the arguments of a constructor."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {item.name: Option(hints[item.name], _default(item)) for item in fields(kind) if item.init}
    hints = get_type_hints(kind.__init__)
    arguments = inspect.signature(kind).parameters.values()
    return {
        item.name: Option(hints.get(item.name, Any), MISSING if item.default is item.empty else item.default)
        for item in arguments
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    }


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def docs_of(kind: type) -> dict[str, str]:
    """Return the text that stands under each field of a class and of its bases, where their source can be read."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            docs |= _docs_in(base)
    return docs


def _docs_in(kind: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return {}
    assert isinstance(tree.body[0], ast.ClassDef)
    docs = {}
    for line, below in pairwise(tree.body[0].body):
        match line, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


def require_known(path: str, names: Iterable[str], allowed: Mapping[str, Any]) -> None:
    """Refuse what is no option, with its path: ``unknown option 'rule.scael': did you mean 'rule.scale'? ...``."""
    for name in names:
        if name not in allowed:
            raise unknown("option", f"{path}.{name}", [f"{path}.{option}" for option in allowed])


def convert(value: Any, hint: Any, path: str) -> Any:
    """Return a value in the type of an option, read from text where it is text."""
    try:
        return _read(value, hint)
    except ValueError as error:
        if get_origin(hint) is Literal:
            raise unknown(path, str(value), [str(choice) for choice in get_args(hint)]) from error
        raise UsageError(f"{path} must be {describe(hint)}, not {value!r}") from error


_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", NoneType: "none"}


def describe(hint: Any) -> str:
    """Say in words what values a type has."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return " or ".join(str(choice) for choice in parts)
    if kind in (Union, UnionType):
        return " or ".join(describe(part) for part in parts)
    if kind is tuple:
        return f"a list with commas, each {describe(parts[0])}"
    return _WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def _read(value: Any, hint: Any) -> Any:
    """Return the value in the type, or raise ValueError."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return _read_choice(value, parts)
    if kind in (Union, UnionType):
        return _read_first(value, parts)
    if kind is tuple:
        return tuple(_read(item, parts[0]) for item in _items(value))
    reader = _READERS.get(hint)
    return reader(value) if reader else value


def _read_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if str(value) == str(choice):
            return choice
    raise ValueError(value)


def _read_first(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        try:
            return _read(value, hint)
        except ValueError:
            continue
    raise ValueError(value)


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    if isinstance(value, list | tuple):
        return [*value]
    raise ValueError(value)


def _read_bool(value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    return _require(value, isinstance(value, bool))


def _read_int(value: Any) -> int:
    return int(_require(value, isinstance(value, int | str) and not isinstance(value, bool)))


def _read_float(value: Any) -> float:
    number = float(_require(value, isinstance(value, int | float | str) and not isinstance(value, bool)))
    return _require(number, math.isfinite(number))


def _read_text(value: Any) -> str:
    return _require(value, isinstance(value, str))


def _read_none(value: Any) -> None:
    _require(value, value is None or value == "none")


def _require(value: Any, holds: bool) -> Any:
    if not holds:
        raise ValueError(value)
    return value


_READERS = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_text, NoneType: _read_none}
