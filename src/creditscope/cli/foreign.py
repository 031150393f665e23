"""Networks, credits and data that are not ours, from names and files. Weights are data: loading them runs no code."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.calling import undisturbed
from creditscope.errors import CreditscopeError, MissingError, UsageError, nearest
from creditscope.evaluation import evaluating

# --- code -------------------------------------------------------------------------------------------------------------


def load_function(given: str, flag: str) -> Callable[..., Any]:
    """Return the function that ``package.module:name`` or ``path/file.py:name`` says."""
    place, colon, name = given.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{flag} must be package.module:function or path/file.py:function, not '{given}'")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place, flag)
    found = getattr(module, name, None)
    if not callable(found):
        match = nearest(name, [key for key, value in vars(module).items() if callable(value)])
        raise UsageError(f"{place} has no function '{name}'" + (f": did you mean '{match}'?" if match else ""))
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise MissingError(f"not found: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses and pickles look a module up
    with _beside(path.parent), _named(str(path)):
        spec.loader.exec_module(module)
    return module


def _from_package(name: str, flag: str) -> ModuleType:
    with _beside(Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UsageError(f"{flag}: {error}; the folder that holds the package has to be the present one") from error
        except Exception as error:
            raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let a module import its neighbours, as one that is run would."""
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in one line what somebody else's code raised."""
    try:
        yield
    except CreditscopeError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def make_network(given: str) -> nn.Module:
    """Call the function that makes a network."""
    make = load_function(given, "--module")
    with _named(given):
        network = make()
    if not isinstance(network, nn.Module):
        raise UsageError(f"{given} must return an nn.Module, not {type(network).__name__}")
    return network


def make_credits(given: str, network: nn.Module) -> Callable[[Any, Any], Any]:
    """Call the function that takes the network and gives the callable (x, y) → credits."""
    make = load_function(given, "--credits")
    with _named(given):
        credits = make(network)
    if not callable(credits):
        raise UsageError(
            f"{given} must take the network and return a function (x, y) -> credits, not {type(credits).__name__}"
        )

    def guarded(x: Any, y: Any) -> Any:
        with _named(given):
            return credits(x, y)

    return guarded


# --- weights ----------------------------------------------------------------------------------------------------------


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a state dict, from safetensors or from what ``torch.save`` wrote."""
    state = read_weights(path)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise UsageError(f"{path} does not fit the network: {' '.join(lines) or error}") from error


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file by name; nothing in it is ever run."""
    if not path.is_file():
        raise MissingError(f"not found: {path}")
    loaded = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    inner = loaded.get("state_dict", loaded)
    if not isinstance(inner, Mapping) or not inner or not all(isinstance(t, Tensor) for t in inner.values()):
        raise UsageError(f"{path} must hold a state dict: tensors by the names of the network's parameters")
    return inner


def _safetensors(path: Path) -> Mapping[str, Any]:
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise UsageError(f"{path} is no safetensors file: {error}") from error


def _pickled(path: Path) -> Mapping[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} is a pickle that wants to run code when it is loaded, and here weights never do: save a state "
            "dict, torch.save(net.state_dict(), ...), or safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no file of weights: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, Mapping):
        raise UsageError(f"{path} must hold a state dict, not {type(loaded).__name__}")
    return loaded


# --- names of blocks --------------------------------------------------------------------------------------------------


def match_blocks(network: nn.Module, patterns: str) -> list[str]:
    """Return the modules whose names fit, in order: ``layers.*`` is layers.0, layers.1, ... and nothing below them.

    Several patterns are separated by commas and taken one after the other.
    """
    names = [name for name, _ in network.named_modules() if name]
    found: list[str] = []
    for pattern in patterns.split(","):
        matching = [name for name in names if _fits(name, pattern.strip())]
        if not matching:
            near = nearest(pattern, names)
            hint = f": did you mean '{near}'?" if near else ""
            raise UsageError(f"--blocks: no module of the network is called '{pattern.strip()}'{hint}")
        found += [name for name in matching if name not in found]
    return found


def _fits(name: str, pattern: str) -> bool:
    """Compare part by part, since a star shall not reach below a dot."""
    from fnmatch import fnmatchcase

    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


# --- data -------------------------------------------------------------------------------------------------------------


def load_examples(given: str, n: int, network: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the first n of a file's x and y, or of a data set's test split, if the network takes them."""
    x, y = _examples(given, n)
    like = next(network.parameters(), None)
    if like is not None and x.is_floating_point():
        x = x.to(like.dtype)  # numpy's floats are of 64 bits where nobody says otherwise
    with evaluating(network), undisturbed(network), torch.no_grad(), _named(f"the network on {given}"):
        network(x[:2])
    return x, y


def _examples(given: str, n: int) -> tuple[Tensor, Tensor]:
    if Path(given).suffix in (".npz", ".safetensors"):
        x, y = _examples_of(Path(given))
        if len(x) != len(y):
            raise UsageError(f"{given} has {len(x)} inputs x and {len(y)} labels y")
        return x[:n], y[:n]
    from creditscope import config
    from creditscope.data import Loader

    dataset = config.load_data(given)
    return next(Loader(dataset.test, batch=min(n, len(dataset.test)), dataset=dataset, augment="none").ordered())


def _examples_of(path: Path) -> tuple[Tensor, Tensor]:
    if not path.is_file():
        raise MissingError(f"not found: {path}")
    arrays = _safetensors(path) if path.suffix == ".safetensors" else _npz(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise UsageError(f"{path} must hold arrays x and y; it holds {', '.join(arrays) or 'none'}")
    x, y = arrays["x"], arrays["y"]
    return x, y if y.is_floating_point() else y.long()


def _npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no file of plain arrays: {error}") from error
