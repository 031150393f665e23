"""Audits on disk: whole, exact, and refused plainly where they are not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xarray as xr

import creditscope as cs
from creditscope.auditing.thresholds import default_path
from creditscope.auditing.verdict import ORDER
from creditscope.errors import MissingError, UsageError
from creditscope.runs import history
from tests.auditing import planted

X, Y = planted.task(0)


def several() -> Any:
    net = planted.residual(0)
    exact = planted.true_credits(net)
    functions = {"exact": exact, "part": lambda x, y: [None, *(-a for a in exact(x, y)[1:])]}
    accuracies = {"accuracies": [0.6, 0.7], "baselines": {"shallow": [0.5, 0.6], "frozen-bp": [0.4]}}
    return cs.audit(net, X, Y, credits=functions, **accuracies)


def one() -> Any:
    return cs.audit(cs.rules.DFA().attach(planted.residual(0)), X, Y, tier="full", nulls=20)


@pytest.mark.parametrize("make", [one, several])
def test_a_round_trip_is_exact(tmp_path: Path, make: Any):
    audit = make()
    loaded = cs.load_audit(audit.save(tmp_path / "audit.nc"))
    xr.testing.assert_identical(loaded.data, audit.data)
    assert loaded.verdicts == audit.verdicts
    assert loaded.verdict == audit.verdict
    assert {k: type(v) for k, v in loaded.data.attrs.items()} == {k: type(v) for k, v in audit.data.attrs.items()}
    for protocol in (cs.protocols.april, cs.protocols.released):
        name = next(iter(audit.verdicts))
        assert str(loaded.judge(protocol, name)) == str(audit.judge(protocol, name))


def test_planted_verdicts_survive_the_disk(tmp_path: Path):
    for case in planted.CASES:
        if case.status == "cannot judge" or case.hints:
            audit = case.make(0)
            assert cs.load_audit(audit.save(tmp_path / "a.nc")).verdict == audit.verdict


def test_thresholds_go_along_and_can_be_replaced(tmp_path: Path):
    strict = tmp_path / "strict.toml"
    strict.write_text("[block_growth]\nvalue = 0.5\n")
    net = planted.residual(0)
    audit = cs.audit(net, X, Y, credits=planted.true_credits(net), thresholds=strict)
    assert audit.verdict.flags == ("scale-stability",)
    assert "from strict.toml" in audit.verdict.reasons["scale-stability"]
    path = audit.save(tmp_path / "audit.nc")
    assert cs.load_audit(path).verdict == audit.verdict
    assert cs.load_audit(path, thresholds=default_path()).verdict.passed


def changed(path: Path, **attrs: Any) -> Path:
    data = history.load(path)
    assert data is not None
    history.save(path, data.assign_attrs(attrs))
    return path


def test_what_is_not_ours_is_refused(tmp_path: Path):
    path = one().save(tmp_path / "audit.nc")
    with pytest.raises(UsageError, match=r"newer creditscope \(audit version 99"):
        cs.load_audit(changed(path, version=99))
    with pytest.raises(UsageError, match="no audit of creditscope"):
        cs.load_audit(changed(path, format="another"))
    foreign = tmp_path / "foreign.nc"
    xr.Dataset({"a": ("x", [1.0])}).to_netcdf(foreign, engine="h5netcdf")
    with pytest.raises(UsageError, match="no audit of creditscope"):
        cs.load_audit(foreign)
    foreign.write_bytes(b"not netCDF at all")
    with pytest.raises(UsageError, match="corrupt"):
        cs.load_audit(foreign)
    with pytest.raises(MissingError):
        cs.load_audit(tmp_path / "nowhere.nc")


def test_judging_one_of_several_credits():
    audit = several()
    with pytest.raises(UsageError, match="say which, one of exact, part"):
        audit.judge(cs.protocols.released)
    with pytest.raises(UsageError, match="no credit 'pat'"):
        audit.judge(cs.protocols.released, "pat")
    before = audit.data.copy(deep=True)
    audit.judge(cs.protocols.april, "part")
    xr.testing.assert_identical(audit.data, before)
    assert audit.verdict.status == max((v.status for v in audit.verdicts.values()), key=ORDER.index)
