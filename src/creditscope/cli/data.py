"""``creditscope data``: verified downloads, and what is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from creditscope.cli.command import Command, Exit, argument, columns, flag, say, say_json
from creditscope.cli.progress import downloading


@dataclass(frozen=True, kw_only=True)
class Fetch(Command):
    """Download a data set from its official place and verify it; goes on where it was interrupted."""

    name: str = argument("NAME")
    """The data set."""
    source: str | None = flag(None, spelling="--from", value="DIR")
    """Take the archives or files of this local folder instead of the network."""
    root: str | None = flag(None, value="DIR")
    """Where to put it (default: CREDITSCOPE_DATA, or the platform's cache folder)."""

    def run(self) -> Exit:
        """Fetch it and say where it lies."""
        from creditscope.data import fetch

        with downloading() as progress:
            place = fetch(self.name, root=self.root, source=self.source, progress=progress)
        if self.json:
            say_json({"name": self.name, "path": str(place)})
        else:
            say(f"{self.name} is in {place}")
        return Exit.DONE


@dataclass(frozen=True, kw_only=True)
class Listing(Command):
    """List the data sets, and where each lies."""

    root: str | None = flag(None, value="DIR")
    """Where to look (default: CREDITSCOPE_DATA, or the platform's cache folder)."""

    def run(self) -> Exit:
        """Print a line each."""
        from creditscope.data import available

        rows = available(self.root)
        if self.json:
            say_json({"data": [{"name": r.name, "summary": r.summary, "path": _text(r.path)} for r in rows]})
        else:
            say(columns([(r.name, r.summary, _where(r.name, r.path)) for r in rows]))
        return Exit.DONE


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _where(name: str, path: Path | None) -> str:
    return f"not there: creditscope data fetch {name}" if path is None else str(path)
