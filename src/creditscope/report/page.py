"""The page: a template and what fills it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from matplotlib import rc_context
from matplotlib.figure import Figure

from creditscope import __version__
from creditscope.report.tables import Table


@dataclass(frozen=True)
class Illustration:
    """A figure, what is to be seen in it, and what a reader without eyes for it is told."""

    figure: Figure
    title: str
    caption: str

    def image(self, kind: Literal["png", "pdf", "svg"]) -> bytes:
        """Return the figure as a file's contents."""
        buffer = io.BytesIO()
        with rc_context({"svg.hashsalt": "creditscope"}):  # else the names inside are drawn at random
            self.figure.savefig(buffer, format=kind, dpi=200, metadata=_UNDATED[kind])
        return buffer.getvalue()

    @property
    def source(self) -> str:
        """The figure as a data address, so that the page needs no other file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.image("svg")).decode()


@dataclass(frozen=True)
class Judged:
    """What the audit of a run says, and where all of it stands, from the page's own folder."""

    name: str
    status: str
    sentences: tuple[str, ...]
    link: str


# The same figure is the same file, whenever it is drawn.
_UNDATED: dict[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: str
    table: Table
    illustrations: tuple[Illustration, ...]
    settings: Mapping[str, str]
    """What was trained, and how."""
    environment: Mapping[str, Any]
    """As a run records it."""
    repeat: str
    """The command that gives all of it again."""
    commands: tuple[str, ...]
    """The command of each run."""
    verdicts: tuple[Judged, ...] = ()
    """Of the runs that stand for all."""

    def html(self) -> str:
        """Return the page as one HTML text."""
        loader = jinja2.PackageLoader("creditscope.report", "templates")
        jinja = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
        facts = _flat(self.environment)
        return jinja.get_template("page.html").render(page=self, facts=facts, version=__version__)


def _flat(nested: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """Return nested values by their dotted paths; what is None is left out."""
    found: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}{name}.")
        elif value is not None:
            found[f"{path}{name}"] = str(value)
    return found
