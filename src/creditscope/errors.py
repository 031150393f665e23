"""Errors for the user's own mistakes: one clear line, what was given, what is allowed, the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CreditscopeError(Exception):
    """Anything that creditscope refuses or cannot do; its message is one line made for the user."""


class UsageError(CreditscopeError, ValueError):
    """What was given cannot be used: a wrong name, option, shape or combination."""


class MissingError(CreditscopeError, FileNotFoundError):
    """A file, folder or data set that is not there."""

    def __str__(self) -> str:  # FileNotFoundError would print errno fields
        return str(self.args[0]) if self.args else "not found"


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that is closest to the given one, or None where none is close."""
    matches = difflib.get_close_matches(str(given), list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown(kind: str, given: str, allowed: Iterable[str], *, shown: int = 20) -> UsageError:
    """Say ``unknown rule 'dfb': did you mean 'dfa'? There are bp, dfa, ...``."""
    names = list(allowed)
    match = nearest(given, names)
    hint = f" did you mean '{match}'?" if match else ""
    listed = ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
    return UsageError(f"unknown {kind} '{given}':{hint} There are {listed or 'none'}.")
