"""Registries of rules, nets, data sets and the like: static one-line summaries, objects imported when asked for.

A registry is read without importing torch, so ``creditscope list`` and ``--help`` are instant. Other packages add to
one by an entry point of the same name; a broken third-party entry is reported when it is used, not when it is listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from creditscope.errors import UsageError, unknown


@dataclass(frozen=True)
class Entry:
    """One registered object: its key, where it lives (``module:name``) and one line that says what it is."""

    key: str
    target: str
    summary: str

    def load(self) -> Any:
        """Import the object."""
        module, _, name = self.target.partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"'{self.key}' ({self.target}) cannot be loaded: {error}") from error


class Registry:
    """The entries of one kind, ours first, then those of other packages' entry points ``creditscope.<kind>s``."""

    def __init__(self, kind: str, entries: list[Entry]):
        self.kind = kind
        self._own = {entry.key: entry for entry in entries}

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """All entries by key."""
        found = dict(self._own)
        for point in entry_points(group=f"creditscope.{self.kind}s"):
            origin = point.dist.name if point.dist else "another package"
            found.setdefault(point.name, Entry(point.name, point.value, f"from {origin}"))
        return found

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __getitem__(self, key: str) -> Entry:
        if key not in self.entries:
            raise unknown(self.kind, key, self.entries)
        return self.entries[key]

    def load(self, key: str) -> Any:
        """Import and return the object registered under a key."""
        return self[key].load()

    def exported(self, name: str) -> Any:
        """Return the object of ours whose Python name is ``name``: what a package's ``__getattr__`` calls."""
        for entry in self._own.values():
            if entry.target.rpartition(":")[2] == name:
                return entry.load()
        raise AttributeError(name)

    def exports(self) -> list[str]:
        """Return the Python names of our own entries."""
        return [entry.target.rpartition(":")[2] for entry in self._own.values()]

    def key_of(self, kind: type) -> str:
        """Return the key under which a class is registered."""
        target = f"{kind.__module__}:{kind.__qualname__}"
        for entry in self:
            if entry.target == target:
                return entry.key
        return target
