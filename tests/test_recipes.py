"""Recipes: their values, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from creditscope import recipes
from creditscope.errors import UsageError
from creditscope.recipes import Recipe


def test_the_default_is_what_is_promised():
    given = recipes.default
    assert (given.optimiser, given.lr, given.weight_decay) == ("adamw", 1e-3, 0.01)
    assert (given.schedule, given.batch, given.clip, given.drop_last) == ("cosine", 128, None, False)
    assert given.precision == "float32"


def test_the_study_clips_by_block_and_is_the_default_otherwise():
    assert recipes.study == recipes.default.with_(clip=1.0, clip_by="block")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimiser": "adamww"}, "did you mean 'adamw'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"clip_by": "layer"}, "recipe.clip_by 'layer'"),
        ({"precision": "float16"}, "There are float32, float64, bfloat16"),
        ({"batch": 0}, "recipe.batch must be a whole number of at least 1, not 0"),
        ({"batch": 2.0}, "not 2.0"),
        ({"lr": -1.0}, "recipe.lr must be a number of at least 0"),
        ({"lr": float("nan")}, "recipe.lr"),
        ({"lr": float("inf")}, "recipe.lr"),
        ({"lr": "fast"}, "recipe.lr"),
        ({"weight_decay": -0.1}, "recipe.weight_decay"),
        ({"clip": 0}, "nothing would be learned"),
        ({"clip": -1}, "recipe.clip"),
        ({"learning_rate": 1.0}, "unknown option of fit 'learning_rate'"),
        ({"optimizer": "sgd"}, "did you mean 'optimiser'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, said):
    with pytest.raises(UsageError) as refused:
        recipes.default.with_(**changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_recipe_does_not_change():
    with pytest.raises(FrozenInstanceError):
        recipes.default.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert recipes.default.with_(lr=1.0) == Recipe(lr=1.0)
    assert recipes.default.lr == 1e-3


def test_importing_recipes_loads_no_torch():
    check = "import sys, creditscope.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
