"""What every measurement owes its reader: an example. The examples run in tests/test_doctests.py."""

import importlib
import inspect
import pkgutil

import pytest

from creditscope import metrics

MODULES = [
    importlib.import_module(f"creditscope.metrics.{m.name}")
    for m in pkgutil.iter_modules(metrics.__path__)
    if m.name[0] != "_"
]
FUNCTIONS = [
    function
    for module in MODULES
    for name, function in inspect.getmembers(module, lambda member: callable(member) and not inspect.isclass(member))
    if name[0] != "_" and getattr(function, "__module__", None) == module.__name__
]


def test_there_are_measurements():
    assert {"cosine", "rho", "growth", "holm", "student_t", "effective_rank", "angle"} <= {
        f.__name__ for f in FUNCTIONS
    }


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_has_an_example(function):
    assert ">>> " in inspect.getdoc(function)
