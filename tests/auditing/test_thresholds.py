"""Thresholds: files, and calibration on the user's own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import creditscope as cs
from creditscope.auditing.thresholds import load_thresholds, write_thresholds
from creditscope.errors import UsageError
from tests.auditing import planted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("this is no toml", "is no TOML"),
        ("[blok_growth]\nvalue = 3", "did you mean 'block_growth'"),
        ("[block_growth]\nvalu = 3", "block_growth.value must be a number"),
        ("[block_growth]\nvalue = 3\nunits = 'x'", "did you mean 'unit'"),
        ("[block_growth]\nvalue = 'big'", "block_growth.value must be a number, not 'big'"),
        ("[block_growth]\nvalue = true", "must be a number, not True"),
        ("[block_growth]\nvalue = nan", "must be a number, not nan"),
        ("[block_growth]\nvalue = 3\nabove = 'yes'", "block_growth.above"),
        ("[block_growth]\nvalue = 3\nflag = 'scale-stabilty'", "block_growth.flag is 'scale-stability'"),
        ("format = 'other'", "no thresholds that this version reads"),
        ("version = 99", "no thresholds that this version reads"),
        ("version = 'x'", "no thresholds that this version reads"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, words: str):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_thresholds(path)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "mine.toml" in str(raised.value)


def test_a_file_changes_what_it_names_alone(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("block_growth = 12\n[examples]\nvalue = 4\nevidence = 'we say so'\n")
    found, shipped = load_thresholds(path), load_thresholds()
    assert found["block_growth"].value == 12
    assert found["block_growth"].unit == shipped["block_growth"].unit
    assert found["block_growth"].evidence == "from mine.toml"
    assert found["examples"].evidence == "we say so"
    assert {k: v for k, v in found.items() if k not in ("block_growth", "examples")} == {
        k: v for k, v in shipped.items() if k not in ("block_growth", "examples")
    }


def test_written_thresholds_are_read_back(tmp_path: Path):
    write_thresholds(tmp_path / "t.toml", load_thresholds())
    assert load_thresholds(tmp_path / "t.toml") == load_thresholds()


def grown(seed: int, factor: float) -> Any:
    net = planted.residual(seed)
    with torch.no_grad():
        net.blocks[1].w2.weight *= factor
    return cs.audit(net, *planted.task(seed), credits=planted.true_credits(net), tier="quick")


def test_calibration_sets_the_middle_of_the_gap(tmp_path: Path):
    healthy, degenerate = [grown(s, 1) for s in range(3)], [grown(s, 100) for s in range(3)]
    path = tmp_path / "own.toml"
    thresholds, gaps = cs.calibrate(healthy, degenerate, path=path)
    most, least = (f(float(a.data.max_growth) for a in group) for f, group in ((max, healthy), (min, degenerate)))
    assert thresholds["block_growth"].value == pytest.approx((most * least) ** 0.5)
    assert gaps[0].ratio == pytest.approx(least / most)
    assert gaps[0].ratio > 5
    assert "3 healthy runs" in thresholds["block_growth"].evidence
    assert load_thresholds(path) == thresholds
    verdicts = [
        cs.audit(n, *planted.task(0), credits=planted.true_credits(n), thresholds=path, tier="quick").verdict
        for n in (planted.residual(0),)
    ]
    assert verdicts[0].passed
    again = cs.load_audit(degenerate[0].save(tmp_path / "a.nc"), thresholds=path)
    assert again.verdict.flags == ("scale-stability",)


def test_groups_that_overlap_are_refused():
    audits = [grown(s, f) for s, f in ((0, 1), (1, 30))]
    with pytest.raises(UsageError, match="the groups overlap"):
        cs.calibrate(audits, [audits[0]])
    with pytest.raises(UsageError, match="the groups overlap"):
        cs.calibrate([audits[1]], [audits[0]])
    with pytest.raises(UsageError, match="at least one healthy"):
        cs.calibrate([], audits)
    with pytest.raises(UsageError, match="did you mean 'block_growth'"):
        cs.calibrate(audits[:1], audits[1:], names=["blok_growth"])
    with pytest.raises(UsageError, match="has no figure"):
        cs.calibrate(audits[:1], audits[1:], names=["precision_error"])
