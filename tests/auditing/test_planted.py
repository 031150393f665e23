"""Every planted case gets its verdict: exactly these flags, hints and status."""

from __future__ import annotations

import pytest

from scripts import planted_verdicts
from tests.auditing import planted

CASES = {case.name: case for case in planted.CASES}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_verdict_on_a_few_seeds(name: str, seed: int):
    audit = CASES[name].make(seed)
    verdict = audit.verdict
    assert planted.is_right(CASES[name], audit), f"{verdict}"
    assert set(verdict.flags) == set(verdict.reasons)
    assert all(any(character.isdigit() for character in reason) for reason in verdict.reasons.values())
    assert not set(verdict.flags) & set(verdict.unmeasured)


@pytest.mark.slow
def test_the_page_of_verdicts_is_what_its_command_writes():
    """Ten seeds of every case: the table in the documentation, made again, and every row right."""
    page = planted_verdicts.page(10)
    assert page == planted_verdicts.PAGE.read_text()
    assert page.count("| 10 of 10 |") == len(CASES)
