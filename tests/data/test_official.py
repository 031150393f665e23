"""Where the data is looked for."""

from pathlib import Path

import pytest

from creditscope.data import data_root, official
from tests.data import layouts


@pytest.fixture
def _no_environment(monkeypatch):
    for name in ("CREDITSCOPE_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))


@pytest.mark.usefixtures("_no_environment")
class TestRoot:
    def test_the_one_given_comes_first(self, monkeypatch):
        monkeypatch.setenv("CREDITSCOPE_DATA", "/elsewhere")
        assert data_root("/here") == Path("/here")

    def test_then_the_environment(self, monkeypatch):
        monkeypatch.setenv("CREDITSCOPE_DATA", "/elsewhere")
        monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
        assert data_root() == Path("/elsewhere")

    @pytest.mark.parametrize(
        ("platform", "folder"),
        [
            ("linux", ".cache/creditscope"),
            ("darwin", "Library/Caches/creditscope"),
            ("win32", "AppData/Local/creditscope"),
        ],
    )
    def test_then_the_cache_of_the_platform(self, monkeypatch, platform, folder):
        monkeypatch.setattr("sys.platform", platform)
        assert data_root() == Path("/home/someone") / folder

    def test_an_empty_variable_is_none(self, monkeypatch):
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setenv("CREDITSCOPE_DATA", "")
        monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
        assert data_root() == Path("/cache/creditscope")


def test_the_system_has_its_own_place_unless_a_root_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(official, "SYSTEM_ROOT", tmp_path / "system")
    monkeypatch.setenv("CREDITSCOPE_DATA", str(tmp_path / "mine"))
    folder = layouts.write_idx(tmp_path / "system" / "fashion-mnist", layouts.mnist(), gz=True)
    place = official.locate("fashion-mnist")
    assert place is not None
    assert place.folder == folder
    assert official.locate("fashion-mnist", tmp_path / "mine") is None
    mine = layouts.write_idx(tmp_path / "mine" / "FashionMNIST" / "raw", layouts.mnist())
    place = official.locate("fashion-mnist")
    assert place is not None
    assert place.folder == mine


def test_the_other_mnist_is_not_taken_for_this_one(tmp_path, monkeypatch):
    """Their files have the same names and sizes, so in a plain folder only the contents tell."""
    folder = layouts.write_idx(tmp_path / "plain", layouts.mnist())
    assert official.locate("mnist", folder) is not None
    assert official.locate("fashion-mnist", folder) is not None
    layout = official.OFFICIAL["fashion-mnist"][0]
    with (folder / layout.test_file).open("rb") as file:
        monkeypatch.setitem(layout.files, layout.test_file, official.digest_of(file, "sha256:"))
    assert official.locate("mnist", folder) is None
    assert official.locate("fashion-mnist", folder) is not None


def test_checksums_are_of_the_contents(tmp_path):
    data = layouts.mnist()
    plain = layouts.write_idx(tmp_path / "plain", data)
    gzipped = layouts.write_idx(tmp_path / "gzipped", data, gz=True)
    name = official.OFFICIAL["mnist"][0].test_file
    with (plain / name).open("rb") as file:
        digest = official.digest_of(file, "sha256:")
    assert official.has_digest(plain / name, digest)
    assert official.has_digest(gzipped / f"{name}.gz", digest)
    assert not official.has_digest(gzipped / f"{name}.gz", digest[:-1] + "?")
    (gzipped / f"{name}.gz").write_bytes(b"broken")
    assert not official.has_digest(gzipped / f"{name}.gz", digest)


def test_the_tables_are_well_formed():
    lengths = {"md5": 32, "sha256": 64}
    for layouts_ in official.OFFICIAL.values():
        for layout in layouts_:
            for digest in [*layout.files.values(), *(download.digest for download in layout.downloads)]:
                algorithm, _, value = digest.partition(":")
                assert len(bytes.fromhex(value)) * 2 == lengths[algorithm]
            assert all(url.endswith(d.name) for d in layout.downloads for url in d.urls)
