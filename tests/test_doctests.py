"""The examples in the docstrings of the library."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import creditscope

ROOT = Path(creditscope.__file__).parent


class Finder(doctest.DocTestFinder):
    """Finds also what the check of shapes has wrapped, which doctest would take for another module's and leave out."""

    def _from_module(self, module, object):
        return super()._from_module(module, inspect.unwrap(object) if callable(object) else object)


def modules_with_examples() -> list[str]:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in Finder().find(importlib.import_module(name), name):
        runner.run(test)
    failed, attempted = runner.summarize()
    assert attempted > 0, f"{name} has examples that are not found"
    assert failed == 0, "the captured output says what failed"
