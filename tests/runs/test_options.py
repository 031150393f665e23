import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.runs.options import as_json, differences, listed

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
NESTED = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_size=4,
)


@pytest.mark.parametrize(
    ("there", "given", "said"),
    [
        ({"recipe": {"lr": 0.001}}, {"recipe": {"lr": 0.0003}}, ["recipe.lr: 0.001 there, 0.0003 given"]),
        ({"rule": "dfa"}, {"rule": "bp"}, ['rule: "dfa" there, "bp" given']),
        ({"a": 1}, {"a": 1, "b": None}, ["b: not there, null given"]),
        ({"a": 1, "b": [1]}, {"a": 1}, ["b: [1] there, not given"]),
        ({"a": {"b": 1}}, {"a": 2}, ['a: {"b": 1} there, 2 given']),
        ({"a": 1}, {"a": True}, ["a: 1 there, true given"]),
        ({"a": 1}, {"a": 1.0}, ["a: 1 there, 1.0 given"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a: [1, 2] there, [2, 1] given"]),
        ({"a": [{"x": 1, "y": 2}]}, {"a": [{"y": 2, "x": 1}]}, []),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
    ],
)
def test_differences(there, given, said):
    assert list(differences(there, given)) == said


@given(NESTED)
def test_options_that_were_written_do_not_differ(options):
    assert list(differences(json.loads(json.dumps(options)), as_json(options))) == []


@given(NESTED, NESTED)
def test_none_is_found_only_between_equals(one, other):
    assert (not list(differences(one, other))) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def test_tuples_and_keys_are_as_json_has_them():
    assert as_json({"keep": (0, "last"), "by": {1: 2}}) == {"keep": [0, "last"], "by": {"1": 2}}


def test_many_differences_are_capped():
    found = list(differences({str(n): n for n in range(15)}, {str(n): -1 for n in range(15)}))
    assert listed(found).startswith("0: 0 there, -1 given; 1: 1 there")
    assert listed(found).endswith("9: 9 there, -1 given; and 5 more")
    assert listed(found[:10]).endswith("9: 9 there, -1 given")
