"""What holds for every test: shapes are checked, one thread, examples of hypothesis without a deadline."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests import shapes

shapes.install()
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give networks that a test builds by torch's own initialisers the same weights in every order and process."""
    torch.manual_seed(0)


@pytest.fixture
def untouched_rng() -> Iterator[None]:
    """Fail a test that draws from, or reseeds, the global random stream."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "the global random stream was touched"
