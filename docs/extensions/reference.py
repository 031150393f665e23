"""Two Sphinx directives that write pages from the code: ``public`` names and registries, ``help`` of the program."""

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
from sphinx.util.docutils import SphinxDirective


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
    """``help:: train`` shows what ``creditscope train --help`` prints."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Run the program that is installed beside this Python."""
        command = [str(Path(sys.executable).with_name("creditscope")), *self.arguments, "--help"]
        plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
        done = subprocess.run(command, capture_output=True, text=True, env=plain)
        if done.returncode:
            raise self.error(f"{' '.join(command)}: {done.stderr}")
        return [nodes.literal_block(done.stdout, done.stdout, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("public", Public)
    app.add_directive("help", Help)
    return {"parallel_read_safe": True}
