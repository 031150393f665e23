"""Nested states (of learners, optimisers, schedules) as flat tensors and JSON, and back, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from creditscope.errors import UsageError


def flatten(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into its tensors, by name, and a JSON value that says where they and all else belong.

    Names are the joined keys (``optimiser.state.0.exp_avg``). A state is made of tensors, None, booleans, integers,
    floats and strings in dicts (keys: strings or integers), lists and tuples; :func:`unflatten` gives all of them back,
    an integer key as an integer and a tuple as a tuple.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(state, "", tensors)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        name = _free(path, tensors)
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key, path), _encode(item, _join(path, key), tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        items = [_encode(item, _join(path, place), tensors) for place, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    raise UsageError(f"{path or 'the state'}: a {type(value).__qualname__} cannot be kept in a checkpoint")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _key(key: Any, path: str) -> str | int:
    if type(key) not in (str, int):
        raise UsageError(f"{path or 'the state'}: the key {key!r} is neither a string nor an integer")
    return key


def _free(name: str, taken: dict[str, Tensor]) -> str:
    """Return a name of its own also for ``{"a.b": t, "a": {"b": u}}``, and for a state that is one tensor."""
    name = name or "tensor"
    while name in taken:
        name += "'"
    return name


def unflatten(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """Return the nested state that :func:`flatten` has split."""
    if isinstance(structure, list):
        return [unflatten(tensors, item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(unflatten(tensors, item) for item in content)
    return {key: unflatten(tensors, item) for key, item in content}
