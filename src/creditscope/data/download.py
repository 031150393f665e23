"""Verified downloads: official places, resumed where interrupted, nothing kept that is half or wrong.

A transfer goes into a ``.part`` file in the data folder, and only what has its published checksum is moved, whole, to
its place. A ``.part`` outlives nothing but an interruption, and the next fetch goes on from its end.
"""

from __future__ import annotations

import http.client
import shutil
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

from creditscope import __version__
from creditscope.data import REGISTRY, official
from creditscope.data.official import OFFICIAL, Download, Layout
from creditscope.errors import CreditscopeError, MissingError, UsageError

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are there, and those of the whole (None where no server says)."""

_CHUNK = 1 << 18
_TIMEOUT = 30  # seconds without a byte


class _InterruptedError(Exception):
    """A transfer that did not come to its end; what came is kept."""


def fetch(
    name: str,
    *,
    root: str | Path | None = None,
    source: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Bring a data set into the data folder and return where it lies; one that is there and right is left alone.

    ``source`` takes the archives or files of a local folder instead of the network; both are verified.
    """
    if name not in OFFICIAL:
        return _not_fetched(name)
    home = official.data_root(root)
    with _one_line():
        there = official.locate(name, root)
        if there and all(official.is_genuine(there.folder, file, there.layout) for file in there.layout.files):
            return there.folder
        home.mkdir(parents=True, exist_ok=True)
        if source is not None:
            return _take(name, Path(source), home)
        return _download(name, home, progress or (lambda *_: None))


def _not_fetched(name: str) -> Path:
    place = REGISTRY.load(name)().locate()
    if place is None:
        raise UsageError(f"{name} has no known place to download it from")
    return place


@contextmanager
def _one_line() -> Iterator[None]:
    """Say in one line what the file system refused: a full or read-only disk, a file where a folder should be."""
    try:
        yield
    except CreditscopeError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{error.filename} is a file where a folder should be") from error
    except OSError as error:
        what = error.filename or "the data folder"
        raise UsageError(f"{what} cannot be written or read: {error.strerror or error}") from error


# --- from the network -------------------------------------------------------------------------------------------------


def _download(name: str, home: Path, progress: Progress) -> Path:
    layout = OFFICIAL[name][0]
    folder = home / layout.folders[0]
    for download in layout.downloads:
        if not download.is_archive and official.is_genuine(folder, _stem(download), layout):
            continue  # an earlier fetch was interrupted after it
        part = _obtain(download, home / f"{name}.{download.name}.part", progress)
        if download.is_archive:
            _unpack(part, layout, folder, home)
            part.unlink()
        else:
            _move(part, folder / download.name)
    return folder


def _stem(download: Download) -> str:
    return download.name.removesuffix(".gz")


def _obtain(download: Download, part: Path, progress: Progress) -> Path:
    """Return the verified ``.part`` file of a download, from the first of its addresses that gives it."""
    if part.exists() and _raw_digest(part, download) == download.digest:
        return part
    failures = []
    for url in download.urls:
        try:
            _transfer(url, part, lambda done, total: progress(download.name, done, total))
        except _InterruptedError as failure:
            failures.append(f"{url}: {failure}")
            continue
        found = _raw_digest(part, download)
        if found == download.digest:
            return part
        part.unlink()
        raise CreditscopeError(f"{url}: its checksum is {found}, not {download.digest} as published; nothing was kept")
    advice = "the same command goes on where it stopped, and --from takes local files"
    raise CreditscopeError(f"{'; '.join(failures)} ({advice})")


def _raw_digest(path: Path, download: Download) -> str:
    with path.open("rb") as file:
        return official.digest_of(file, download.digest)


def _transfer(url: str, part: Path, progress: Callable[[int, int | None], None]) -> None:
    """Append to a ``.part`` file what it lacks, or begin anew where the server does not resume."""
    have = part.stat().st_size if part.exists() else 0
    try:
        response = _request(url, have)
    except HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise _InterruptedError(f"the server says {error.code} {error.reason}") from error
        part.unlink()  # as long as the whole file or longer, and not right
        return _transfer(url, part, progress)
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(f"cannot be reached ({getattr(error, 'reason', error)})") from error
    with response, part.open("ab" if _resumes(response, have) else "wb") as file:
        done = file.tell()
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        for chunk in _chunks(response):
            done += file.write(chunk)
            progress(done, total)
    if total is not None and done < total:
        raise _InterruptedError(f"broke off after {done} of {total} bytes")
    return None


def _request(url: str, have: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"creditscope/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)


def _resumes(response: http.client.HTTPResponse, have: int) -> bool:
    partial = response.status == http.HTTPStatus.PARTIAL_CONTENT
    return partial and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := response.read(_CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(f"broke off ({error})") from error


# --- from a local folder ----------------------------------------------------------------------------------------------


def _take(name: str, source: Path, home: Path) -> Path:
    if not source.exists():
        raise MissingError(f"not found: {source}")
    if not source.is_dir():
        raise UsageError(f"{source} is a file where a folder should be")
    place = official.locate(name, source)
    if place:
        return _copy(name, place, home)
    for layout in OFFICIAL[name]:
        for download in layout.downloads:
            if download.is_archive and (source / download.name).is_file():
                return _take_archive(source / download.name, download, layout, home)
    forms = [_looked_for(layout) for layout in OFFICIAL[name]]
    raise MissingError(f"{source} holds no {name}; looked for {', or '.join(forms)}")


def _looked_for(layout: Layout) -> str:
    archives = [download.name for download in layout.downloads if download.is_archive]
    return " or ".join([" + ".join(layout.files), *archives])


def _take_archive(path: Path, download: Download, layout: Layout, home: Path) -> Path:
    found = _raw_digest(path, download)
    if found != download.digest:
        raise UsageError(f"{path}: its checksum is {found}, not {download.digest} as published; nothing was taken")
    folder = home / layout.folders[0]
    _unpack(path, layout, folder, home)
    return folder


def _copy(name: str, place: official.Place, home: Path) -> Path:
    folder = home / place.layout.folders[0]
    with _staging(home, name) as staging:
        for file in place.layout.files:
            path = official.find_file(place.folder, file)
            if path is None:
                raise MissingError(f"{place.folder / file} was there and is gone")
            shutil.copyfile(path, staging / path.name)
            if not official.is_genuine(staging, file, place.layout):
                raise UsageError(f"{path}: its contents do not have the published checksum; nothing was taken")
        _move_all(staging, folder)
    return folder


# --- into place -------------------------------------------------------------------------------------------------------


def _unpack(archive: Path, layout: Layout, folder: Path, home: Path) -> None:
    """Unpack the files of a layout, and only those, from an archive whose checksum is right."""
    with _staging(home, layout.folders[0]) as staging, tarfile.open(archive, "r:gz") as tar:
        for name in layout.files:
            member = tar.extractfile(f"{layout.folders[0]}/{name}")
            if member is None:
                raise UsageError(f"{archive}: {name} is not a file in it")
            with member, (staging / name).open("wb") as file:
                shutil.copyfileobj(member, file)
        _move_all(staging, folder)


@contextmanager
def _staging(home: Path, name: str) -> Iterator[Path]:
    """Give an empty folder beside the data that is gone afterwards; what a killed fetch left in it goes first."""
    staging = home / f".{name}.unpacked"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move_all(staging: Path, folder: Path) -> None:
    for path in sorted(staging.iterdir()):
        _move(path, folder / path.name)


def _move(path: Path, target: Path) -> None:
    """Move a whole, verified file to its place, in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    # What stood there before had other contents, and in the other form (plain or .gz) it would hide the new file.
    other = target.with_suffix("") if target.suffix == ".gz" else target.with_name(f"{target.name}.gz")
    other.unlink(missing_ok=True)
