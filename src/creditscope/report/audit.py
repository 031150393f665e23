"""The page of one audit: verdict first. Filled with texts and figures; nothing here measures or judges."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from creditscope import __version__
from creditscope.report.page import Illustration

_STATUS = {"passed": "passed", "flagged": "flagged", "cannot judge": "unjudged"}
"""The class of a status on the page."""


@dataclass(frozen=True)
class CreditPart:
    """What there is to say of one credit."""

    name: str
    verdict: Any
    sentences: Sequence[tuple[str, Sequence[str]]]
    facts: Mapping[str, str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class AuditPage:
    """A page."""

    verdict: Any
    parts: Sequence[CreditPart]
    heading: Sequence[str]
    legend: str
    illustrations: Sequence[Illustration]
    disclosures: Sequence[str]
    thresholds: Mapping[str, Any]
    seconds: Mapping[str, float]
    made: str

    @property
    def title(self) -> str:
        """What the page is about."""
        return f"Audit of {', '.join(part.name for part in self.parts)}"

    def html(self) -> str:
        """Return the page as one HTML text."""
        loader = jinja2.PackageLoader("creditscope.report", "templates")
        jinja = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
        pictures = [(item, inline_svg(item.figure)) for item in self.illustrations]
        return jinja.get_template("audit.html").render(page=self, pictures=pictures, kind=_STATUS, version=__version__)


def inline_svg(figure: Figure) -> Markup:
    """Return a figure as an SVG element, the same for the same figure, which the page's style can reach."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "creditscope"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return Markup(re.sub(r"^.*?(?=<svg)", "", text, flags=re.DOTALL))
