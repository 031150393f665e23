"""Load a data set by name, and list which are there."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from creditscope import errors
from creditscope.data import REGISTRY, official
from creditscope.errors import MissingError, UsageError

if TYPE_CHECKING:
    from creditscope.data._base import Source
    from creditscope.data.dataset import Dataset


class Available(NamedTuple):
    """One registered data set: its name, a line that says what it is, and where it lies (None: not there)."""

    name: str
    summary: str
    path: Path | None


def load(
    name: str | Path, *, root: str | Path | None = None, validation: int = 0, seed: int = 0, **options: Any
) -> Dataset:
    """Return a data set by its name, or by the folder that holds one in its official layout.

    ``root`` is the folder that holds the data; without it ``CREDITSCOPE_DATA`` or the platform's cache folder does.
    ``validation`` training examples, drawn from ``seed``, are held out as a split of their own. ``options`` are the
    fields of the data set's class, e.g. ``load("teacher", alpha=0.5)``. Nothing is ever downloaded here.
    """
    from creditscope.data.dataset import from_tensors  # here, since `available` needs no torch

    if _is_path(name):
        name, root = _named_by(name), name
    source = _source(str(name), seed, options)
    place = source.locate(Path(root) if root else None)
    if place is None:
        raise MissingError(
            f"{name} is not in {official.data_root(root)}: `creditscope data fetch {name}` downloads it "
            "(CREDITSCOPE_DATA names another folder)"
        )
    return from_tensors(
        *source.read(place),
        name=str(name),
        classes=source.classes,
        mean=source.mean,
        std=source.std,
        augment=source.augment,
        validation=validation,
        seed=seed,
        options=asdict(source) | {"validation": validation, "seed": seed},  # pyright: ignore[reportArgumentType]
    )


def name_of(given: str | Path) -> str:
    """Return the name of a data set that is given by its name, or by the folder that holds it."""
    return _named_by(given) if _is_path(given) else str(given)


def available(root: str | Path | None = None) -> list[Available]:
    """Return every registered data set and where it lies; one whose package cannot be loaded says so in its line."""
    rows = []
    for entry in REGISTRY:
        try:
            place = entry.load()().locate(Path(root) if root else None)
        except UsageError as error:
            rows.append(Available(entry.key, str(error), None))
        else:
            rows.append(Available(entry.key, entry.summary, place))
    return rows


def _source(name: str, seed: int, options: dict[str, Any]) -> Source:
    kind = REGISTRY.load(name)
    allowed = [field.name for field in fields(kind)]
    for option in options:
        if option not in allowed:
            raise errors.unknown(f"option of {name}", option, allowed)
    return kind(**options, **({"seed": seed} if "seed" in allowed else {}))


def _is_path(name: str | Path) -> bool:
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return isinstance(name, Path) or name.startswith(".") or any(separator in name for separator in separators)


def _named_by(given: str | Path) -> str:
    path = Path(given)
    if not path.exists():
        raise MissingError(f"not found: {given}")
    if not path.is_dir():
        raise UsageError(f"{given} is a file where a folder should be")
    found = [name for name in official.OFFICIAL if official.locate(name, path)]
    if not found:
        raise UsageError(f"{path} does not hold a data set in an official layout: {', '.join(official.OFFICIAL)}")
    if len(found) > 1:
        raise UsageError(f"{path} may hold {' or '.join(found)}: give the name, and the folder as root")
    return found[0]
