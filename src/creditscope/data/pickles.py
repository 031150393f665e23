"""Read the pickles of CIFAR's Python version without executing anything that they ask for.

A pickle names the functions that rebuild its objects, and an ordinary unpickler imports and calls them. Here no such
name is imported: the few that a pickled dict of lists, bytes and one array of bytes needs stand for inert classes of
this module, and any other is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from creditscope.data.official import contents
from creditscope.errors import UsageError


class _RefusedError(Exception):
    """The pickle asks for more than data."""


class _Inert:
    """Stands for something that a pickle names. A pickle may set the state of whatever it names: here in vain."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> Any:
        """Return the data that stands here."""
        raise _RefusedError("something else than data")


class _Dtype(_Inert):
    """Stands for ``numpy.dtype``; only single bytes are read."""

    @property
    def is_bytes(self) -> bool:
        """Whether the entries are single unsigned bytes."""
        return self.arguments[:1] in [("u1",), (b"u1",)]


class _Array(_Inert):
    """Stands for an array under reconstruction: its state is (version, shape, dtype, column-major, bytes)."""

    def value(self) -> np.ndarray:
        _, shape, dtype, columns_first, raw = self.state
        return _bytes_array(raw, dtype, shape, "F" if columns_first else "C")


class _Buffer(_Inert):
    """Stands for an array of protocol 5: called with (bytes, dtype, shape, order)."""

    def value(self) -> np.ndarray:
        return _bytes_array(*self.arguments)


class _Latin1(_Inert):
    """Stands for ``_codecs.encode``, with which Python 3 writes bytes into protocols 0 to 2."""

    def value(self) -> bytes:
        text, encoding = self.arguments
        if encoding not in ("latin1", b"latin1"):
            raise _RefusedError(f"the encoding {encoding!r}")
        return text.encode("latin1")


_ALLOWED = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Inert,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Buffer,
    ("numpy._core.numeric", "_frombuffer"): _Buffer,
    ("_codecs", "encode"): _Latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Inert]:
        if (module, name) not in _ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        return _ALLOWED[module, name]


def load(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the pickled dict of a file in a folder; byte strings of Python 2 are keys too."""
    path, raw = contents(folder, name)
    try:
        loaded = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise _RefusedError(f"a {type(loaded).__name__} where a dict should be")
        return path, {_text(key): _plain(value) for key, value in loaded.items()}
    except _RefusedError as refusal:
        raise UsageError(f"{path}: refused, its pickle asks for {refusal}, which CIFAR's files do not") from None
    except Exception as error:  # a corrupt pickle can raise anything, says the documentation of pickle
        raise UsageError(f"{path}: truncated or corrupt pickle ({type(error).__name__}: {error})") from error


def _text(key: Any) -> str:
    key = _plain(key)
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _plain(value: Any) -> Any:
    return value.value() if isinstance(value, _Inert) else value


def _bytes_array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    raw = _plain(raw)
    if not (isinstance(dtype, _Dtype) and dtype.is_bytes and isinstance(raw, bytes | bytearray)):
        raise _RefusedError("an array of something else than bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order in ("F", b"F") else "C")
