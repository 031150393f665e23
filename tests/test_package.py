import subprocess
import sys

import pytest

import creditscope


@pytest.mark.parametrize("name", creditscope.__all__)
def test_public_name_is_there(name):
    assert getattr(creditscope, name) is not None


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="no attribute 'rule'"):
        _ = creditscope.rule


@pytest.mark.parametrize("package", ["creditscope", "creditscope.rules", "creditscope.nets", "creditscope.data"])
def test_import_is_light(package):
    code = f"import sys, {package}; print(*sorted({{'torch', 'numpy', 'matplotlib', 'xarray'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("package", ["rules", "nets", "data"])
def test_registered_objects_are_exported(package):
    module = getattr(creditscope, package)
    for entry in module.REGISTRY:
        assert entry.summary
        assert entry.load() is not None
    for name in module.__all__:
        assert getattr(module, name) is not None
