"""The page of the flags says what the thresholds are, and has a section for each flag."""

import re
from pathlib import Path

import pytest

from creditscope.auditing.thresholds import load_thresholds
from creditscope.auditing.verdict import BLOCKING

PAGE = (Path(__file__).parents[2] / "docs" / "flags.md").read_text("utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
VERDICT = (Path(__file__).parents[2] / "src/creditscope/auditing/verdict.py").read_text("utf-8")


@pytest.mark.parametrize("name", load_thresholds())
def test_each_threshold_is_told_with_its_value(name):
    threshold = load_thresholds()[name]
    section = SECTIONS[threshold.flag]
    said = re.search(rf"`{name}`: [^.]*(?:above|below) ([0-9.]+)", section.replace("\n", " ") + " ")
    assert said is not None
    assert float(said[1].rstrip(".")) == threshold.value


@pytest.mark.parametrize("flag", sorted({t.flag for t in load_thresholds().values()} | {*BLOCKING, "coverage"}))
def test_each_flag_has_a_section_that_says_what_to_do(flag):
    assert "**What it means.**" in SECTIONS[flag]
    assert "**How it is measured.**" in SECTIONS[flag]
    assert "**What to do.**" in SECTIONS[flag]


def test_no_flag_is_raised_that_the_page_does_not_have():
    raised = set(re.findall(r'_flag\(\s*"([a-z-]+)"', VERDICT))
    assert raised
    assert raised <= {*SECTIONS}
