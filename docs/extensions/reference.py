"""Pages written from the code: the directives ``public`` (names and registries) and ``help`` (of the program)."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective

from creditscope.cli import COMMANDS


def registered(package: ModuleType) -> list[str]:
    """List what a package has registered, then document each of its own entries and its other public names."""
    registry = package.REGISTRY
    paths = {entry.key: entry.target.replace(":", ".") for entry in registry if not entry.summary.startswith("from ")}
    table = [f"* ``{entry.key}`` (:py:class:`~{paths[entry.key]}`): {entry.summary}" for entry in registry]
    others = [name for name in package.__all__ if name not in {"REGISTRY", *registry.exports()}]
    return [*table, "", *document(paths.values()), *document(qualified(getattr(package, name)) for name in others)]


def qualified(value: Any) -> str:
    """Return the full name under which a class or function was defined."""
    return f"{value.__module__}.{value.__qualname__}"


def document(paths: Any) -> list[str]:
    """Return the autodoc directives for some full names, each once, by what they are."""
    lines = []
    for path in dict.fromkeys(paths):
        module, _, name = path.rpartition(".")
        kind = "autoclass" if inspect.isclass(getattr(import_module(module), name)) else "autofunction"
        members = ["   :members:", "   :show-inheritance:"] if kind == "autoclass" else []
        lines += [f".. {kind}:: {path}", *members, ""]
    return lines


class Public(SphinxDirective):
    """``public:: creditscope.rules`` documents a public name: a package with a registry, a module or a function."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write reStructuredText and let Sphinx read it."""
        path = self.arguments[0]
        parent, _, name = path.rpartition(".")
        value = getattr(import_module(parent), name)
        if not isinstance(value, ModuleType):
            lines = document([qualified(value)])
        elif hasattr(value, "REGISTRY"):
            lines = [f".. automodule:: {path}", "", *registered(value)]
        else:
            lines = [f".. automodule:: {path}", "   :members:", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Help(SphinxDirective):
    """``help::`` shows what the program and each of its commands print when asked for ``--help``, a section each."""

    def run(self) -> list[nodes.Node]:
        """Ask the program that is installed beside this Python."""
        return [self.section(command) for command in ["", *COMMANDS]]

    def section(self, command: str) -> nodes.section:
        """Return the section of one command."""
        name = f"creditscope {command}".strip()
        section = nodes.section(ids=[nodes.make_id(name)], names=[name])
        section += nodes.title(name, name)
        section += nodes.literal_block("", self.text(command), language="text")
        return section

    def text(self, command: str) -> str:
        """Return the help text of one command, as on a terminal of 100 columns."""
        arguments = [str(Path(sys.executable).with_name("creditscope")), *command.split(), "--help"]
        plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
        done = subprocess.run(arguments, capture_output=True, text=True, env=plain)
        if done.returncode:
            raise self.error(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout


def read_sections(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn ``Args:`` and the like into fields; napoleon would also take "what: why" on an attribute for a type."""
    if what in {"function", "method", "class", "exception"}:
        lines[:] = GoogleDocstring(lines, Config(), what=what, name=name, obj=value).lines()


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives and the reading of docstrings."""
    app.add_directive("public", Public)
    app.add_directive("help", Help)
    app.connect("autodoc-process-docstring", read_sections)
    return {"parallel_read_safe": True}
