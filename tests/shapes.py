"""Run the shape annotations of the library under the tests: jaxtyping's import hook, with beartype as the checker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook


def states_shape(annotation: Any) -> bool:
    """Whether a shape stands somewhere in an annotation, e.g. in ``list[Float[Tensor, "batch features"]]``."""
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return any(states_shape(argument) for argument in get_args(annotation))


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let beartype check what states a shape, and nothing else.

    Wrong types are a user's mistake that the library itself must refuse in its own words; a checker that came first
    would hide whether it does.
    """
    kept = {name: hint for name, hint in function.__annotations__.items() if states_shape(hint)}
    function.__annotations__ = kept
    return beartype(function) if kept else function


def modules_with_shapes(package: str) -> list[str]:
    """Return the modules of a package that use jaxtyping, without importing any of them."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    paths = [path for path in root.rglob("*.py") if "jaxtyping" in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def install() -> None:
    """Check the shapes in every module of ours that states some; before any of them is imported."""
    install_import_hook(modules_with_shapes("creditscope"), "tests.shapes.check_shapes")
