"""Pickles are read as data: whatever asks for more is refused before anything of it happens."""

import builtins
import io
import os
import pickle
import pickletools

import numpy as np
import pytest

from creditscope.data import pickles
from creditscope.errors import UsageError

# What the Python 2 script of the data set's authors wrote: protocol 2, byte strings, numpy's old module names.
PYTHON_2 = (
    b"\x80\x02}(U\x04dataqcnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"\x89U\x06\x00\x01\x02\x03\x04\x05tbU\x06labels](K\x03K\x04eu."
).replace(b"dataqc", b"datac")


class Hostile:
    """Pickles as a call, as an attacker would have it."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def read(tmp_path, raw: bytes):
    (tmp_path / "batch").write_bytes(raw)
    return pickles.load(tmp_path, "batch")[1]


def test_a_file_of_python_2(tmp_path):
    batch = read(tmp_path, PYTHON_2)
    assert batch["labels"] == [3, 4]
    assert np.array_equal(batch["data"], np.arange(6, dtype=np.uint8).reshape(2, 3))
    as_numpy_reads_it = pickle.loads(PYTHON_2, encoding="bytes")
    assert np.array_equal(batch["data"], as_numpy_reads_it[b"data"])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_protocol_and_order(tmp_path, protocol, order):
    array = np.asarray(np.arange(12, dtype=np.uint8).reshape(3, 4), order=order)
    batch = read(tmp_path, pickle.dumps({"data": array, b"name": b"\xe9\x00"}, protocol))
    assert np.array_equal(batch["data"], array)
    assert batch["name"] == b"\xe9\x00"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch pwned",)),
        (builtins.eval, ("open('pwned', 'w')",)),
        (builtins.open, ("pwned", "w")),
        (builtins.getattr, (os, "name")),
        (np.fromfile, ("/etc/hostname",)),
        (np.zeros, (1 << 40,)),
    ],
)
def test_code_is_refused_and_not_run(tmp_path, monkeypatch, protocol, function, arguments):
    monkeypatch.chdir(tmp_path)
    if function is builtins.getattr:  # a module does not pickle; a string has attributes too
        arguments = ("text", "upper")
    raw = pickle.dumps({b"data": Hostile(function, *arguments), b"labels": [0]}, protocol)
    with pytest.raises(UsageError, match="refused, its pickle asks for ") as caught:
        read(tmp_path, raw)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def test_objects_of_python_are_refused(tmp_path):
    array = np.array([os.getcwd, None], dtype=object)
    for value in (array, np.float64(1.0), np.zeros(3, np.int16), {1, 2}.__class__, object()):
        with pytest.raises(UsageError, match="refused"):
            read(tmp_path, pickle.dumps({b"data": value}, 2))


@pytest.mark.parametrize(
    "raw",
    [
        b"cnumpy\ndtype\n}U\x01aK\x01sb.",  # a state for the class itself
        b"cnumpy.core.multiarray\n_reconstruct\n}U\x0c__defaults__K\x01sb.",
        b"cnumpy\nndarray\n)R}U\x09__class__K\x01sb.",
        b"Pevil\n.",  # a persistent id
        b"\x82\x01.",  # an extension code
        b"c_codecs\nencode\n(U\x01aU\x03hextR.",
    ],
)
def test_tricks_of_the_machine_change_nothing(tmp_path, raw):
    pickletools.dis(raw, out=io.StringIO())  # it is a well-formed pickle
    before = {kind: dict(vars(kind)) for kind in set(pickles._ALLOWED.values())}
    with pytest.raises(UsageError):
        read(tmp_path, raw)
    assert {kind: dict(vars(kind)) for kind in before} == before


@pytest.mark.parametrize("cut", [0, 1, 10, 60, -1])
def test_truncated_pickle(tmp_path, cut):
    with pytest.raises(UsageError, match="batch: truncated or corrupt pickle"):
        read(tmp_path, PYTHON_2[:cut])


def test_an_array_whose_shape_does_not_fit_its_bytes(tmp_path):
    with pytest.raises(UsageError, match="truncated or corrupt pickle"):
        read(tmp_path, PYTHON_2.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"))
