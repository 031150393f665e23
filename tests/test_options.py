from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.errors import UsageError
from creditscope.options import Option, convert, describe, docs_of, options_of, require_known


@dataclass
class Base:
    width: int = 3
    """Its width."""


@dataclass
class Sample(Base):
    name: str = field(kw_only=True)
    """Its name,
    on two lines."""
    parts: tuple[int, ...] = field(default_factory=tuple)
    hidden: int = field(default=0, init=False)


class Plain:
    def __init__(self, size: int, *rest: int, scale: float = 1.0, untyped=None, **more: Any):
        pass


def test_options_of_a_dataclass():
    assert options_of(Sample) == {
        "width": Option(int, 3),
        "name": Option(str, MISSING),
        "parts": Option(tuple[int, ...], ()),
    }


def test_options_of_a_constructor():
    assert options_of(Plain) == {
        "size": Option(int, MISSING),
        "scale": Option(float, 1.0),
        "untyped": Option(Any, None),
    }


def test_docs_stand_under_the_fields_also_of_bases():
    assert docs_of(Sample) == {"width": "Its width.", "name": "Its name,\non two lines."}


def test_docs_of_a_class_without_source():
    made = dataclass(type("Made", (), {"__annotations__": {"a": int}, "a": 1}))
    assert docs_of(made) == {}


TYPES = [
    (bool, st.booleans()),
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (str, st.text()),
]


@given(st.data(), st.sampled_from(TYPES))
def test_a_value_and_its_text_are_read_as_the_value(data, kind):
    hint, values = kind
    value = data.draw(values)
    for given_value in (value, str(value)):
        read = convert(given_value, hint, "x")
        assert read == value
        assert type(read) is hint


@pytest.mark.parametrize(
    ("given_value", "hint", "value"),
    [
        (2, float, 2.0),
        ("1e-3", float, 1e-3),
        ("True", bool, True),
        ("none", float | None, None),
        ("0.5", float | None, 0.5),
        (None, int | None, None),
        ("b", Literal["a", "b"], "b"),
        ("2", Literal[1, 2], 2),
        ("0, 5,last", tuple[int | Literal["last"], ...], (0, 5, "last")),
        ([1, "2"], tuple[int, ...], (1, 2)),
        ("as it is", Any, "as it is"),
    ],
)
def test_read(given_value, hint, value):
    read = convert(given_value, hint, "x")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("given_value", "hint", "message"),
    [
        ("two", int, "x must be a whole number, not 'two'"),
        ("2.5", int, "x must be a whole number, not '2.5'"),
        (2.0, int, "x must be a whole number, not 2.0"),
        (True, int, "x must be a whole number, not True"),
        (True, float, "x must be a finite number, not True"),
        ("nan", float, "x must be a finite number, not 'nan'"),
        (float("inf"), float, "x must be a finite number, not inf"),
        ("", float, "x must be a finite number, not ''"),
        ("yes", bool, "x must be true or false, not 'yes'"),
        (1, bool, "x must be true or false, not 1"),
        (1, str, "x must be text, not 1"),
        ("no", float | None, "x must be a finite number or none, not 'no'"),
        ("c", Literal["ab", "b"], "unknown x 'c': There are ab, b."),
        ("1,x", tuple[int, ...], "x must be a list with commas, each a whole number, not '1,x'"),
        (3, tuple[int, ...], "x must be a list with commas, each a whole number, not 3"),
    ],
)
def test_refused_in_one_line(given_value, hint, message):
    with pytest.raises(UsageError) as raised:
        convert(given_value, hint, "x")
    assert str(raised.value) == message


def test_described():
    assert describe(Literal["a", "b"] | None) == "a or b or none"
    assert describe(Sample) == "a Sample"


def test_a_misspelt_name_gets_the_nearest():
    require_known("rule", ["width"], options_of(Sample))
    with pytest.raises(
        UsageError, match=r"^unknown option 'rule.widht': did you mean 'rule.width'\? There are rule.width"
    ):
        require_known("rule", ["widht"], options_of(Sample))
