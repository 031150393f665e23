"""The examples in the docstrings of the library."""

import doctest
import importlib
import inspect
import math
import re
from pathlib import Path

import pytest

import creditscope

ROOT = Path(creditscope.__file__).parent
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")


class Finder(doctest.DocTestFinder):
    """Finds also what the check of shapes has wrapped, which doctest would take for another module's and leave out."""

    def _from_module(self, module, object):
        return super()._from_module(module, inspect.unwrap(object) if callable(object) else object)


class Checker(doctest.OutputChecker):
    """Takes numbers for equal up to rounding: torch prints 2. or 2.0000 by the last bit, which differs by machine."""

    def check_output(self, want, got, optionflags):
        if super().check_output(want, got, optionflags):
            return True
        numbers = zip(NUMBER.findall(want), NUMBER.findall(got), strict=False)
        texts = ["".join(NUMBER.sub("#", text).split()) for text in (want, got)]  # padding hangs on the digits too
        return texts[0] == texts[1] and all(
            math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=1e-6) for a, b in numbers
        )


def modules_with_examples() -> list[str]:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in Finder().find(importlib.import_module(name), name):
        runner.run(test)
    failed, attempted = runner.summarize()
    assert attempted > 0, f"{name} has examples that are not found"
    assert failed == 0, "the captured output says what failed"


def test_numbers_are_compared_as_numbers():
    same = Checker().check_output
    assert same("tensor([2.0000, -1.0000])\n", "tensor([ 2., -1.])\n", 0)
    assert not same("tensor(2.0000)\n", "tensor(2.1)\n", 0)
    assert not same("2 cats\n", "2 dogs\n", 0)
