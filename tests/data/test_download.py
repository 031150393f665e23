"""Fetching from a server of this machine that resumes, breaks off, refuses and lies; and from local folders."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import creditscope as cs
from creditscope.data import download, official
from creditscope.errors import CreditscopeError, MissingError, UsageError
from tests.data import layouts

CIFAR, MNIST = "cifar10", "mnist"
ARCHIVE = "cifar-10-binary.tar.gz"


@dataclass
class Server:
    """What the server offers, how it misbehaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    breaks_after: int | None = None
    ignores_ranges: bool = False
    status: int | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    plan: Server

    def do_GET(self):
        name, wanted = self.path.rsplit("/", 1)[-1], self.headers["Range"]
        self.plan.asked.append((name, wanted))
        body = self.plan.files.get(name)
        if self.plan.status or body is None:
            self.send_error(self.plan.status or 404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and not self.plan.ignores_ranges else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = None if self.plan.breaks_after is None else start + self.plan.breaks_after
        self.wfile.write(body[start:end])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    plan = Server()
    handler = type("PlannedHandler", (Handler,), {"plan": plan})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        plan.url = f"http://127.0.0.1:{running.server_port}/"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield plan
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def small_world(server, tmp_path, monkeypatch) -> dict[str, layouts.Arrays]:
    """Small CIFAR-10 and MNIST as what is official, offered by the server; nothing else on this machine."""
    monkeypatch.setattr(official, "SYSTEM_ROOT", tmp_path / "no system")
    monkeypatch.setenv("CREDITSCOPE_DATA", str(tmp_path / "home"))
    data = {CIFAR: layouts.cifar10(), MNIST: layouts.mnist()}
    publish_archive(
        server, monkeypatch, layouts.write_cifar10_binary(tmp_path / "pub" / "cifar-10-batches-bin", data[CIFAR])
    )
    publish_idx(server, monkeypatch, layouts.write_idx(tmp_path / "pub" / "idx", data[MNIST]))
    return data


def publish_archive(server: Server, monkeypatch, folder: Path) -> None:
    path = folder.parent / ARCHIVE
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    server.files[ARCHIVE] = path.read_bytes()
    binary, python = official.OFFICIAL[CIFAR]
    small = dataclasses.replace(
        binary,
        files={name: sha256((folder / name).read_bytes()) for name in binary.files},
        downloads=(official.Download(ARCHIVE, md5(server.files[ARCHIVE]), (server.url + ARCHIVE,)),),
    )
    monkeypatch.setitem(official.OFFICIAL, CIFAR, (small, python))


def publish_idx(server: Server, monkeypatch, folder: Path) -> None:
    (layout,) = official.OFFICIAL[MNIST]
    raw = {name: (folder / name).read_bytes() for name in layout.files}
    server.files |= {f"{name}.gz": gzip.compress(contents) for name, contents in raw.items()}
    small = dataclasses.replace(
        layout,
        files={name: sha256(contents) for name, contents in raw.items()},
        downloads=tuple(
            official.Download(f"{name}.gz", md5(server.files[f"{name}.gz"]), (f"{server.url}{name}.gz",))
            for name in raw
        ),
    )
    monkeypatch.setitem(official.OFFICIAL, MNIST, (small,))


def sha256(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def md5(raw: bytes) -> str:
    return f"md5:{hashlib.md5(raw).hexdigest()}"


def everything(folder: Path) -> set[str]:
    return (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} if folder.exists() else set()
    )


def breaks_off(server: Server, name: str, **options) -> str:
    with pytest.raises(CreditscopeError) as caught:
        cs.data.fetch(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CIFAR_FILES = {f"cifar-10-batches-bin/{name}" for name in official.OFFICIAL[CIFAR][0].files}
MNIST_FILES = {f"MNIST/raw/{name}.gz" for name in official.OFFICIAL[MNIST][0].files}


class TestFromTheNetwork:
    @pytest.mark.parametrize(("name", "files"), [(CIFAR, CIFAR_FILES), (MNIST, MNIST_FILES)])
    def test_a_download_is_verified_unpacked_and_loads(self, tmp_path, small_world, name, files):
        folder = cs.data.fetch(name)
        assert everything(tmp_path / "home") == files
        layouts.assert_holds(cs.data.load(name), small_world[name])
        assert {row.name: row.path for row in cs.data.available()}[name] == folder

    def test_what_is_there_is_left_alone(self, server):
        folder = cs.data.fetch(CIFAR)
        times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert cs.data.fetch(CIFAR) == folder
        assert len(server.asked) == 1
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times

    def test_progress_goes_from_nothing_to_the_whole(self, server, monkeypatch):
        monkeypatch.setattr(download, "_CHUNK", 1000)
        seen = []
        cs.data.fetch(CIFAR, progress=lambda *row: seen.append(row))
        size = len(server.files[ARCHIVE])
        assert {(name, total) for name, _, total in seen} == {(ARCHIVE, size)}
        done = [count for _, count, _ in seen]
        assert done == sorted(done)
        assert done[-1] == size
        assert len(done) == -(-size // 1000)

    @pytest.mark.parametrize("kept", [1, 1000, 30_000])
    def test_an_interrupted_transfer_goes_on_where_it_stopped(self, server, tmp_path, small_world, kept):
        server.breaks_after = kept
        said = breaks_off(server, CIFAR)
        assert f"broke off after {kept} of {len(server.files[ARCHIVE])} bytes" in said
        assert "the same command goes on" in said
        assert everything(tmp_path / "home") == {f"{CIFAR}.{ARCHIVE}.part"}
        server.breaks_after = None
        cs.data.fetch(CIFAR)
        assert server.asked == [(ARCHIVE, None), (ARCHIVE, f"bytes={kept}-")]
        assert everything(tmp_path / "home") == CIFAR_FILES
        layouts.assert_holds(cs.data.load(CIFAR), small_world[CIFAR])

    def test_a_transfer_may_be_interrupted_often(self, server, tmp_path):
        server.breaks_after = len(server.files[ARCHIVE]) // 4
        for _ in range(3):
            breaks_off(server, CIFAR)
        server.breaks_after = None
        cs.data.fetch(CIFAR)
        assert [wanted is None for _, wanted in server.asked] == [True, False, False, False]
        assert everything(tmp_path / "home") == CIFAR_FILES

    def test_a_server_that_does_not_resume(self, server, tmp_path):
        server.breaks_after = 500
        breaks_off(server, CIFAR)
        server.breaks_after, server.ignores_ranges = None, True
        cs.data.fetch(CIFAR)
        assert everything(tmp_path / "home") == CIFAR_FILES

    def test_several_files_are_not_fetched_twice(self, server, tmp_path):
        third = list(official.OFFICIAL[MNIST][0].files)[2]
        body = server.files.pop(f"{third}.gz")
        assert "the server says 404" in breaks_off(server, MNIST)
        assert len(everything(tmp_path / "home")) == 2
        server.files[f"{third}.gz"] = body
        server.asked.clear()
        cs.data.fetch(MNIST)
        assert len(server.asked) == 2
        assert everything(tmp_path / "home") == MNIST_FILES

    def test_a_wrong_checksum_is_refused_and_nothing_kept(self, server, tmp_path):
        body = bytearray(server.files[ARCHIVE])
        body[-20] ^= 1
        server.files[ARCHIVE] = bytes(body)
        said = breaks_off(server, CIFAR)
        assert md5(bytes(body)) in said
        assert official.OFFICIAL[CIFAR][0].downloads[0].digest in said
        assert everything(tmp_path / "home") == set()

    def test_a_part_of_something_else_is_refused_too(self, tmp_path):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / f"{CIFAR}.{ARCHIVE}.part").write_bytes(b"something else")
        with pytest.raises(CreditscopeError, match="nothing was kept"):
            cs.data.fetch(CIFAR)
        cs.data.fetch(CIFAR)
        assert everything(tmp_path / "home") == CIFAR_FILES

    @pytest.mark.parametrize("extra", [b"", b"and more"])
    def test_a_part_that_is_as_long_as_the_whole(self, server, tmp_path, extra):
        """Killed between the end of the transfer and the move, or grown too long: with or without a new transfer."""
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / f"{CIFAR}.{ARCHIVE}.part").write_bytes(server.files[ARCHIVE] + extra)
        cs.data.fetch(CIFAR)
        assert everything(tmp_path / "home") == CIFAR_FILES
        assert len(server.asked) == (2 if extra else 0)

    def test_a_second_address_is_tried(self, server, tmp_path, monkeypatch):
        layout = official.OFFICIAL[MNIST][0]
        mirrored = tuple(
            dataclasses.replace(each, urls=(f"{server.url}gone/nothing", *each.urls)) for each in layout.downloads
        )
        monkeypatch.setitem(official.OFFICIAL, MNIST, (dataclasses.replace(layout, downloads=mirrored),))
        cs.data.fetch(MNIST)
        assert everything(tmp_path / "home") == MNIST_FILES

    @pytest.mark.parametrize("status", [403, 500, 503])
    def test_a_server_that_refuses(self, server, tmp_path, status):
        server.status = status
        assert f"the server says {status}" in breaks_off(server, CIFAR)
        assert everything(tmp_path / "home") == set()

    def test_no_server_at_all(self, tmp_path, monkeypatch):
        layout, other = official.OFFICIAL[CIFAR]
        gone = dataclasses.replace(layout.downloads[0], urls=("http://127.0.0.1:9/nothing.tar.gz",))
        monkeypatch.setitem(official.OFFICIAL, CIFAR, (dataclasses.replace(layout, downloads=(gone,)), other))
        with pytest.raises(CreditscopeError, match="cannot be reached"):
            cs.data.fetch(CIFAR)
        assert everything(tmp_path / "home") == set()

    def test_damaged_data_is_replaced(self, tmp_path, small_world):
        for name in (CIFAR, MNIST):
            folder = cs.data.fetch(name)
            victim = sorted(folder.iterdir())[0]
            if name == MNIST:  # the damaged copy has the other form
                victim.unlink()
                victim = victim.with_suffix("")
            victim.write_bytes(b"damaged")
            with pytest.raises(UsageError):
                cs.data.load(name)
            cs.data.fetch(name)
            layouts.assert_holds(cs.data.load(name), small_world[name])
        assert everything(tmp_path / "home") == CIFAR_FILES | MNIST_FILES

    def test_an_interrupt_keeps_the_part_and_nothing_else(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(download, "_CHUNK", 1000)

        def stop(name, done, total):
            if done >= 3000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cs.data.fetch(CIFAR, progress=stop)
        assert everything(tmp_path / "home") == {f"{CIFAR}.{ARCHIVE}.part"}
        cs.data.fetch(CIFAR)
        assert server.asked[-1] == (ARCHIVE, "bytes=3000-")

    def test_what_a_killed_unpacking_left_is_cleared(self, tmp_path):
        stale = tmp_path / "home" / ".cifar-10-batches-bin.unpacked"
        stale.mkdir(parents=True)
        (stale / "half").write_bytes(b"half")
        cs.data.fetch(CIFAR)
        assert everything(tmp_path / "home") == CIFAR_FILES
        assert not stale.exists()

    def test_an_archive_is_not_trusted_with_paths(self, server, tmp_path, monkeypatch):
        """Even one whose checksum is right: only the files of the layout are written, where the layout says."""
        outside = tmp_path / "evil"
        folder = tmp_path / "pub" / "cifar-10-batches-bin"
        path = tmp_path / "pub" / ARCHIVE
        (tmp_path / "pub" / "payload").write_text("x")
        with tarfile.open(path, "w:gz") as tar:
            tar.add(folder, folder.name)
            tar.add(tmp_path / "pub" / "payload", "../evil")
            tar.add(tmp_path / "pub" / "payload", str(outside))
        server.files[ARCHIVE] = path.read_bytes()
        layout, other = official.OFFICIAL[CIFAR]
        changed = dataclasses.replace(layout.downloads[0], digest=md5(server.files[ARCHIVE]))
        monkeypatch.setitem(official.OFFICIAL, CIFAR, (dataclasses.replace(layout, downloads=(changed,)), other))
        cs.data.fetch(CIFAR)
        assert not outside.exists()
        assert everything(tmp_path / "home") == CIFAR_FILES


class TestFromAFolder:
    @pytest.mark.parametrize("form", ["files", "folder", "archive"])
    def test_every_form_of_cifar(self, server, tmp_path, small_world, form):
        published = tmp_path / "pub"
        source = {"files": published / "cifar-10-batches-bin", "folder": published, "archive": tmp_path / "arch"}[form]
        if form == "archive":
            source.mkdir()
            (published / ARCHIVE).rename(source / ARCHIVE)
        before = everything(source)
        folder = cs.data.fetch(CIFAR, source=source)
        assert folder == tmp_path / "home" / "cifar-10-batches-bin"
        assert everything(tmp_path / "home") == CIFAR_FILES
        assert everything(source) == before
        assert server.asked == []
        layouts.assert_holds(cs.data.load(CIFAR), small_world[CIFAR])

    @pytest.mark.parametrize("gz", [False, True])
    def test_idx_files_keep_their_form(self, tmp_path, small_world, gz):
        source = layouts.write_idx(tmp_path / "mine", small_world[MNIST], gz=gz)
        cs.data.fetch(MNIST, source=source)
        assert everything(tmp_path / "home") == (
            MNIST_FILES if gz else {file.removesuffix(".gz") for file in MNIST_FILES}
        )
        layouts.assert_holds(cs.data.load(MNIST), small_world[MNIST])

    def test_wrong_contents_are_refused_and_nothing_is_taken(self, tmp_path):
        layouts.write_cifar10_binary(tmp_path / "wrong", layouts.cifar10(train=10))
        with pytest.raises(UsageError, match=r"data_batch_1\.bin: its contents do not have the published checksum"):
            cs.data.fetch(CIFAR, source=tmp_path / "wrong")
        assert everything(tmp_path / "home") == set()

    def test_a_wrong_archive_is_refused(self, tmp_path):
        (tmp_path / "wrong").mkdir()
        (tmp_path / "wrong" / ARCHIVE).write_bytes(b"not the archive")
        with pytest.raises(UsageError, match=f"{re.escape(ARCHIVE)}: its checksum is md5:.* nothing was taken"):
            cs.data.fetch(CIFAR, source=tmp_path / "wrong")
        assert everything(tmp_path / "home") == set()

    def test_a_folder_without_it(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(
            MissingError, match=r"empty holds no cifar10; looked for data_batch_1\.bin \+ .*binary\.tar\.gz"
        ):
            cs.data.fetch(CIFAR, source=tmp_path / "empty")

    def test_a_folder_that_is_not_there_or_is_a_file(self, tmp_path):
        with pytest.raises(MissingError, match=r"not found: .*nowhere"):
            cs.data.fetch(CIFAR, source=tmp_path / "nowhere")
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="file is a file where a folder should be"):
            cs.data.fetch(CIFAR, source=tmp_path / "file")


class TestThePlace:
    def test_a_root_is_made(self, tmp_path):
        assert cs.data.fetch(CIFAR, root=tmp_path / "a" / "b") == tmp_path / "a" / "b" / "cifar-10-batches-bin"

    @pytest.mark.parametrize("root", ["file", "file/below"])
    def test_a_file_where_a_folder_should_be(self, tmp_path, root):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=r"file.* is a file where a folder should be"):
            cs.data.fetch(CIFAR, root=tmp_path / root)

    @pytest.mark.parametrize("name", [CIFAR, MNIST])
    def test_a_full_disk(self, server, tmp_path, monkeypatch, name):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(download.shutil, "copyfileobj", full)
        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(UsageError, match="cannot be written or read: No space left on device"):
            cs.data.fetch(name)
        monkeypatch.undo()
        assert all(file.endswith(".part") for file in everything(tmp_path / "home")), "what came is kept, whole"

    def test_names(self):
        with pytest.raises(UsageError, match="unknown dataset 'cifar1': did you mean 'cifar10'"):
            cs.data.fetch("cifar1")
        assert cs.data.fetch("digits").name == "digits.npz"
