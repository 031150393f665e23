import importlib

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from tests.shapes import check_shapes, modules_with_shapes


@jaxtyped(typechecker=check_shapes)
def outer(a: Float[Tensor, "batch m"], b: list[Float[Tensor, "batch n"]], power: int = 1) -> Float[Tensor, "batch m n"]:
    return (a[:, :, None] * b[0][:, None, :]) ** power


def test_right_shapes_pass():
    assert outer(torch.ones(2, 3), [torch.ones(2, 4)]).shape == (2, 3, 4)


def test_wrong_shapes_are_found():
    with pytest.raises(TypeCheckError):
        outer(torch.ones(2, 3), [torch.ones(5, 4)])


def test_types_are_left_to_the_library():
    assert outer(torch.ones(2, 3), [torch.ones(2, 4)], power=torch.tensor(2.0)).shape == (2, 3, 4)  # type: ignore[arg-type]


def test_no_module_with_shapes_escapes_the_check():
    for name in modules_with_shapes("creditscope"):
        module = importlib.import_module(name)
        assert type(module.__loader__).__name__ == "_JaxtypingLoader", name
