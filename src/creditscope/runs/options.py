"""The options of a run: what it was started with, compared name by name when it is started again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from creditscope.errors import UsageError

_SHOWN = 10


class OptionsDifferError(UsageError):
    """A run is there with other options than those given."""


def as_json(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as JSON gives them back: tuples become lists, keys strings."""
    return json.loads(json.dumps(options))


def differences(there: Any, given: Any, path: str = "") -> Iterator[str]:
    """Say each difference of two nested options, e.g. ``recipe.lr: 0.001 there, 0.0003 given``."""
    if isinstance(there, dict) and isinstance(given, dict):
        for name in [*there, *(name for name in given if name not in there)]:
            yield from _difference(there, given, name, f"{path}.{name}" if path else name)
    elif json.dumps(there, sort_keys=True) != json.dumps(given, sort_keys=True):  # NaN equals itself, 1 is not true
        yield f"{path}: {json.dumps(there)} there, {json.dumps(given)} given"


def _difference(there: dict[str, Any], given: dict[str, Any], name: str, path: str) -> Iterator[str]:
    if name not in given:
        yield f"{path}: {json.dumps(there[name])} there, not given"
    elif name not in there:
        yield f"{path}: not there, {json.dumps(given[name])} given"
    else:
        yield from differences(there[name], given[name], path)


def listed(found: list[str]) -> str:
    """Return the differences on one line, capped."""
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more
