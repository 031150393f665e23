import errno
import json
import os

import pytest

from creditscope.errors import UsageError
from creditscope.runs import files
from creditscope.runs.files import StorageError
from tests.runs.disks import longest_file, read_only, small_disk


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1, "b": [None, 0.1]})
    files.write_json(path, {"a": 2})
    assert files.read_json(path) == {"a": 2}
    assert names(tmp_path) == ["a.json"]


def test_the_data_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, order = tmp_path / "a", []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), sync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    files.write_bytes(path, b"new")
    assert order == ["fsync", "replace"]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_fails_midway_leaves_the_file_as_it_was(tmp_path, monkeypatch, step):
    path = tmp_path / "a"
    files.write_bytes(path, b"old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(StorageError, match=r"/a cannot be written: the disk is full$"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_an_interruption_midway_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_bytes(path, b"old")

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_disk_that_takes_a_part(tmp_path):
    path = tmp_path / "a"
    files.write_bytes(path, b"old")
    with longest_file(1000), pytest.raises(StorageError, match=r"/a cannot be written: File too large$"):
        files.write_bytes(path, b"x" * 5000)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path, "64k"):
        path = tmp_path / "a"
        files.write_bytes(path, b"old")
        with pytest.raises(StorageError, match=r"/a cannot be written: the disk is full$"):
            files.write_bytes(path, bytes(100_000))
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["a"]


def test_a_read_only_disk(tmp_path):
    path = tmp_path / "a"
    files.write_bytes(path, b"old")
    with read_only(tmp_path), pytest.raises(StorageError, match=r"/a cannot be written: (the disk is read-only|perm)"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_leftovers_are_swept_and_nothing_else(tmp_path):
    kept = ["a", ".hidden", "b.tmp"]
    for name in [*kept, files.temporary(tmp_path / "a").name, files.temporary(tmp_path / "c.json").name]:
        (tmp_path / name).touch()
    files.sweep(tmp_path)
    assert names(tmp_path) == sorted(kept)


def test_sweeping_a_folder_that_is_not_there(tmp_path):
    files.sweep(tmp_path / "none")


def test_a_file_that_is_not_there(tmp_path):
    assert files.read_bytes(tmp_path / "none") is None
    assert files.read_json(tmp_path / "none") is None


def test_a_folder_where_a_file_should_be(tmp_path):
    with pytest.raises(StorageError, match="cannot be read: Is a directory"):
        files.read_bytes(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "no JSON object"),
        (b"\0" * 100, "not JSON"),
    ],
)
def test_corrupt_json(tmp_path, data, reason):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"/a.json is corrupt: .*{reason}") as caught:
        files.read_json(path)
    assert "\n" not in str(caught.value)


def test_json_is_for_people_and_keeps_what_is_not_finite(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"loss": float("nan"), "bound": float("inf")})
    assert json.dumps(files.read_json(path)) == '{"loss": NaN, "bound": Infinity}'
    assert path.read_text().splitlines()[1] == '  "loss": NaN,'


@pytest.mark.parametrize(
    ("found", "version", "message"),
    [
        ("other", 1, "is not from creditscope: it does not say 'ours'"),
        (None, None, "is not from creditscope"),
        ("ours", None, "is corrupt: it has no format version"),
        ("ours", "x", "is corrupt: it has no format version"),
        ("ours", -1, "is corrupt: it has no format version"),
        ("ours", 3, "is in format 3 of a newer creditscope; this one reads up to 2"),
        ("ours", "10", "is in format 10 of a newer creditscope"),
    ],
)
def test_a_format_that_is_not_ours(tmp_path, found, version, message):
    with pytest.raises(UsageError, match=f"/a {message}"):
        files.check_format(tmp_path / "a", found=found, version=version, ours="ours", latest=2)


@pytest.mark.parametrize("version", [1, 2, "2"])
def test_a_format_that_is_ours(tmp_path, version):
    files.check_format(tmp_path / "a", found="ours", version=version, ours="ours", latest=2)
