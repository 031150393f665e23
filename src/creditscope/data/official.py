"""The published data sets: their files, checksums and download places, and where they are looked for on disk.

Nothing here imports torch. A file counts as there when it lies in one of its layout's folders, plain or gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

from creditscope.errors import UsageError

# Where a Linux distribution puts data sets, e.g. Debian's package dataset-fashion-mnist.
SYSTEM_ROOT = Path("/usr/share/datasets")

_TORONTO = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class Download:
    """One file of a data set's official place: its name, its published checksum, and the addresses that offer it."""

    name: str
    digest: str
    urls: tuple[str, ...]

    @property
    def is_archive(self) -> bool:
        """Whether the file is unpacked; any other is kept as it comes."""
        return self.name.endswith(".tar.gz")


@dataclass(frozen=True)
class Layout:
    """One form in which a data set is published.

    ``folders`` are where it may lie under a root, the first being where a download puts it and what its archive calls
    it; ``files`` are the files that are read and the checksums of their (decompressed) contents, the test set's last.
    """

    folders: tuple[str, ...]
    files: dict[str, str]
    downloads: tuple[Download, ...]

    @property
    def test_file(self) -> str:
        """The last file: the test set, or its labels."""
        return list(self.files)[-1]

    def is_in(self, folder: Path) -> bool:
        """Whether every file of the layout lies in a folder."""
        return all(find_file(folder, name) for name in self.files)


class Place(NamedTuple):
    """Where a data set lies, and in which form."""

    folder: Path
    layout: Layout


def _archive(name: str, digest: str) -> tuple[Download, ...]:
    return (Download(name, digest, (_TORONTO + name,)),)


def _gzipped(mirrors: tuple[str, ...], digests: dict[str, str]) -> tuple[Download, ...]:
    return tuple(
        Download(f"{name}.gz", digest, tuple(f"{mirror}{name}.gz" for mirror in mirrors))
        for name, digest in digests.items()
    )


# Archives: the MD5 sums printed on https://www.cs.toronto.edu/~kriz/cifar.html, and those of the files inside (SHA-256
# where we computed them from the verified archive, MD5 as published by others). MNIST and Fashion-MNIST: the MD5 sums
# published for the .gz files, and the SHA-256 of what they decompress to, which also verifies recompressed copies.
OFFICIAL: dict[str, tuple[Layout, ...]] = {
    "cifar10": (
        Layout(
            ("cifar-10-batches-bin", ""),
            {
                "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            },
            _archive("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
        ),
        Layout(
            ("cifar-10-batches-py", ""),
            {
                "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
                "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
                "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "md5:40351d587109b95175f43aff81a1287e",
            },
            _archive("cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
        ),
    ),
    "cifar100": (
        Layout(
            ("cifar-100-binary", ""),
            {
                "train.bin": "md5:6172c7755cfe09b2fe270c85cebc1b15",
                "test.bin": "md5:4499cfba6c016c1be1438163640a0898",
            },
            _archive("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),
        ),
        Layout(
            ("cifar-100-python", ""),
            {
                "train": "md5:16019d7e3df5f24257cddd939b257f8d",
                "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
            },
            _archive("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
        ),
    ),
    "mnist": (
        Layout(
            ("MNIST/raw", "mnist", ""),
            {
                "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            },
            _gzipped(
                (
                    # The original place (yann.lecun.com) no longer serves the files; these two mirror it.
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    "https://storage.googleapis.com/cvdf-datasets/mnist/",
                ),
                {
                    "train-images-idx3-ubyte": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "train-labels-idx1-ubyte": "md5:d53e105ee54ea40749a09fcbcd1e9432",
                    "t10k-images-idx3-ubyte": "md5:9fb629c4189551a2d022fa330f9573f3",
                    "t10k-labels-idx1-ubyte": "md5:ec29112dd5afa0611ce80d1b7f02629c",
                },
            ),
        ),
    ),
    "fashion-mnist": (
        Layout(
            ("FashionMNIST/raw", "fashion-mnist", ""),
            {
                "train-images-idx3-ubyte": "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "train-labels-idx1-ubyte": "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "t10k-images-idx3-ubyte": "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "t10k-labels-idx1-ubyte": "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            },
            _gzipped(
                (
                    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                ),
                {
                    "train-images-idx3-ubyte": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "train-labels-idx1-ubyte": "md5:25c81989df183df01b3e8a0aad5dffbe",
                    "t10k-images-idx3-ubyte": "md5:bef4ecab320f06d8554ea6380940ec79",
                    "t10k-labels-idx1-ubyte": "md5:bb300cfdad3c16e7a12a480ee83cd310",
                },
            ),
        ),
    ),
}


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder that holds the data: the one given, else ``CREDITSCOPE_DATA``, else the platform's cache."""
    chosen = root or os.environ.get("CREDITSCOPE_DATA")
    return Path(chosen).expanduser() if chosen else _cache_folder() / "creditscope"


def _cache_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def locate(name: str, root: str | Path | None = None) -> Place | None:
    """Return where a published data set lies; without a root also where the system's packages put it."""
    for base in [data_root(root)] if root else [data_root(), SYSTEM_ROOT]:
        for layout in OFFICIAL[name]:
            for folder in layout.folders:
                if layout.is_in(base / folder) and not _is_another(name, base / folder):
                    return Place(base / folder, layout)
    return None


def layout_in(name: str, folder: Path) -> Layout:
    """Return the form in which a data set lies in a folder."""
    for layout in OFFICIAL[name]:
        if layout.is_in(folder):
            return layout
    raise UsageError(f"{folder} does not hold {name} in any of its official layouts")


def _is_another(name: str, folder: Path) -> bool:
    """Whether a folder holds another published data set whose files have the same names.

    MNIST and Fashion-MNIST do, and their sizes are equal too; the small file of test labels tells them apart.
    """
    others = [layout for other, layouts in OFFICIAL.items() if other != name for layout in layouts]
    return any(is_genuine(folder, layout.test_file, layout) for layout in others if layout.is_in(folder))


def is_genuine(folder: Path, name: str, layout: Layout) -> bool:
    """Whether a file of a layout is in a folder with the published contents."""
    path = find_file(folder, name)
    return path is not None and has_digest(path, layout.files[name])


def find_file(folder: Path, name: str) -> Path | None:
    """Return a file of a folder, plain or gzipped, or None."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain or gzipped file for reading its contents; a broken gzip file is the user's error, in one line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(IO[bytes], file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: truncated or corrupt gzip file ({error})") from error


def contents(folder: Path, name: str) -> tuple[Path, bytes]:
    """Return the path and the decompressed contents of a file that the layout says is in a folder."""
    path = find_file(folder, name) or folder / name
    with opened(path) as file:
        return path, file.read()


def has_digest(path: Path, digest: str) -> bool:
    """Whether the decompressed contents of a file have a checksum, given as ``algorithm:hex``."""
    try:
        with opened(path) as file:
            return digest_of(file, digest) == digest
    except UsageError:  # a broken gzip file has no contents that could be right
        return False


def digest_of(file: IO[bytes], like: str) -> str:
    """Return the checksum of an open file as ``algorithm:hex``, by the algorithm of another one."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"  # pyright: ignore[reportArgumentType]
