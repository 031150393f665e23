"""Loading by name or folder, what is there, and what is said where it is not."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import creditscope as cs
from creditscope import registry
from creditscope.data import REGISTRY, official
from creditscope.errors import MissingError, UsageError
from tests.data import layouts

THIRD_PARTY = '''
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from creditscope.data import Arrays

@dataclass(frozen=True)
class Stripes:
    """Black and white."""

    examples: int = 6
    seed: int = 0
    classes = 2
    mean = std = None
    augment = "none"

    def locate(self, root=None):
        return Path(__file__)

    def read(self, place):
        y = (np.arange(self.examples) + self.seed) % 2
        x = np.repeat(y[:, None], 3, 1).astype(np.float32)
        return Arrays(x, y, x, y)
'''


@pytest.fixture(autouse=True)
def _nothing_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(official, "SYSTEM_ROOT", tmp_path / "no system")
    monkeypatch.setenv("CREDITSCOPE_DATA", str(tmp_path / "root"))


@pytest.mark.parametrize("name", list(official.OFFICIAL))
def test_a_name_and_its_folder_load_the_same(name, tmp_path):
    folder = layouts.WRITERS[name](tmp_path / "root")
    by_name = cs.data.load(name)
    assert by_name.name == name
    assert by_name.options == {"augment": by_name.augment, "validation": 0, "seed": 0}
    if not name.endswith("mnist"):
        assert cs.data.load(folder).fingerprint() == by_name.fingerprint()
    by_root = cs.data.load(str(tmp_path / "root"))
    assert by_root.name == name
    assert by_root.fingerprint() == by_name.fingerprint()


def test_a_folder_that_could_be_two_data_sets(tmp_path):
    folder = layouts.write_idx(tmp_path / "images", layouts.mnist())
    with pytest.raises(
        UsageError, match="images may hold mnist or fashion-mnist: give the name, and the folder as root"
    ):
        cs.data.load(folder)


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere", "no/where", "/no/where", ".nowhere"])
def test_a_path_that_is_not_there_is_not_found(path):
    with pytest.raises(MissingError) as caught:
        cs.data.load(path)
    assert str(caught.value) == f"not found: {path}"


def test_a_folder_without_data(tmp_path):
    with pytest.raises(UsageError, match="does not hold a data set in an official layout: cifar10, cifar100, mnist"):
        cs.data.load(tmp_path)


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "train.bin").touch()
    with pytest.raises(UsageError, match=r"train\.bin is a file where a folder should be"):
        cs.data.load(tmp_path / "train.bin")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UsageError, match="unknown dataset 'cifar-10': did you mean 'cifar10'"):
        cs.data.load("cifar-10")


@pytest.mark.parametrize("name", list(official.OFFICIAL))
def test_missing_data_names_the_command_and_the_folder(name, tmp_path):
    for root, folder in ((None, tmp_path / "root"), (tmp_path / "other", tmp_path / "other")):
        with pytest.raises(MissingError) as caught:
            cs.data.load(name, root=root)
        assert str(caught.value).startswith(f"{name} is not in {folder}: `creditscope data fetch {name}` downloads it")


def test_an_unknown_option_gets_the_nearest():
    with pytest.raises(UsageError, match="unknown option of teacher 'alfa': did you mean 'alpha'"):
        cs.data.load("teacher", alfa=0.5)


def test_a_validation_split_leaves_the_test_set_alone():
    whole, split = cs.data.load("digits"), cs.data.load("digits", validation=200, seed=3)
    assert split.validation is not None
    assert (len(split.train), len(split.validation)) == (len(whole.train) - 200, 200)
    assert split.test.x.equal(whole.test.x)
    assert split.options == {"augment": "none", "validation": 200, "seed": 3}


def test_what_is_available(tmp_path):
    folder = layouts.WRITERS["mnist"](tmp_path / "root")
    rows = {name: (summary, path) for name, summary, path in cs.data.available()}
    assert list(rows) == [entry.key for entry in REGISTRY]
    assert rows["mnist"] == (REGISTRY["mnist"].summary, folder)
    assert rows["cifar10"][1] is None
    for shipped in ("digits", "teacher"):
        assert rows[shipped][1].is_file()
    assert all(path is None for name, _, path in cs.data.available(tmp_path / "other") if name == "mnist")


def test_a_data_set_of_another_package(tmp_path, monkeypatch):
    (tmp_path / "stripes_of_a_test.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("stripes", "stripes_of_a_test:Stripes", "creditscope.datasets"),
        EntryPoint("broken", "no_such_module:Broken", "creditscope.datasets"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "creditscope.datasets" else [])
    monkeypatch.setattr("creditscope.data.catalogue.REGISTRY", registry.Registry("dataset", []))
    stripes = cs.data.load("stripes", examples=8, seed=1)
    assert len(stripes.train) == 8
    assert stripes.train.y[0] == 1
    assert stripes.options == {"examples": 8, "seed": 1, "validation": 0}
    rows = {name: (summary, path) for name, summary, path in cs.data.available()}
    assert rows["stripes"] == ("from another package", tmp_path / "stripes_of_a_test.py")
    assert rows["broken"][1] is None
    assert "cannot be loaded" in rows["broken"][0]
    with pytest.raises(UsageError, match=r"'broken' .* cannot be loaded"):
        cs.data.load("broken")


def test_listing_loads_no_torch():
    code = (
        "import sys, creditscope.data as data; data.available(); data.fetch('digits'); data.data_root(); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_data_set_has_one_line_and_an_importable_class():
    for entry in REGISTRY:
        assert entry.summary
        assert len(entry.summary) < 80
        source = entry.load()()
        assert source.classes >= 2
        assert source.locate() is None or isinstance(source.locate(), Path)
