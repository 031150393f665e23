import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from creditscope import config, nets, recipes, rules
from creditscope.config import NetworkSpec, make_recipe, make_rule, rule_from_dict, to_dict
from creditscope.errors import MissingError, UsageError
from creditscope.registry import Entry
from creditscope.rules import BP, DFA, FA, Blend, Handover, LastK, LocalRule, Rule
from tests.data import layouts


@dataclass(frozen=True)
class Foreign(LocalRule):
    """A rule of another package."""

    sizes: tuple[int, ...] = (1, 2)
    gain: float | None = None
    inner: Rule = field(default_factory=lambda: DFA(scale=3.0))


@dataclass(frozen=True)
class Unrecordable(Rule):
    """A rule with an option that no file can hold."""

    matrix: Any = field(default_factory=lambda: torch.ones(1))


@pytest.fixture
def foreign(monkeypatch):
    for key, kind in {"foreign": Foreign, "unrecordable": Unrecordable}.items():
        monkeypatch.setitem(rules.REGISTRY.entries, key, Entry(key, f"{__name__}:{kind.__name__}", "from elsewhere"))


NESTED = {
    "last-k": {"rule": "dfa"},
    "blend": {"first": "bp", "second": "fa"},
    "handover": {"first": "fa", "second": "dfa"},
}


def test_importing_loads_no_torch():
    code = "import sys, creditscope.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [entry.key for entry in rules.REGISTRY])
def test_every_registered_rule_goes_through_json_and_back(key):
    rule = make_rule(key, NESTED.get(key, {}))
    stored = json.loads(json.dumps(to_dict(rule)))
    assert stored["name"] == key
    assert rule_from_dict(stored) == rule


@pytest.mark.parametrize(
    "rule",
    [
        DFA.study(),
        FA(level="block", normalise="example", scale=0.5),
        LastK(Blend(BP(penalty=0.1), FA.study(), weight=0.25), k=2),
        Handover(LastK(DFA(), k=1), BP(), at=0.1),
    ],
)
def test_rules_go_through_json_and_back(rule):
    assert rule_from_dict(json.loads(json.dumps(to_dict(rule)))) == rule


def test_a_rule_of_another_package(foreign):
    rule = make_rule(
        "foreign", {"sizes": "4,5", "gain": "0.5", "inner": "last-k", "inner.rule": "bp", "drive": "input"}
    )
    assert rule == Foreign(sizes=(4, 5), gain=0.5, inner=LastK(BP()), drive="input")
    assert rule_from_dict(json.loads(json.dumps(to_dict(rule)))) == rule


def test_the_default_of_a_rule_inside_is_changed_in_part(foreign):
    assert make_rule("foreign", {"inner.tokens": "cls"}) == Foreign(inner=DFA(scale=3.0, tokens="cls"))


def test_what_cannot_be_recorded_is_refused(foreign):
    with pytest.raises(UsageError, match=r"^unrecordable.matrix is a Tensor: only numbers, text and rules"):
        to_dict(Unrecordable())


def test_whole_numbers_are_recorded_as_the_field_has_them():
    assert json.dumps(to_dict(DFA(scale=2))["scale"]) == "2.0"


def test_options_as_text_and_as_values():
    assert make_rule("dfa", {"scale": "2", "drive": "input"}) == DFA(scale=2.0, drive="input")
    assert make_rule("last-k", {"rule": FA(), "k": 1}) == LastK(FA(), k=1)
    assert make_rule("last-k", {"rule": DFA(scale=2.0), "rule.drive": "input"}) == LastK(DFA(scale=2.0, drive="input"))


def test_options_of_rules_inside_rules():
    given = {"first": "dfa", "first.scale": "2", "second": "last-k", "second.rule": "fa", "second.rule.level": "block"}
    assert make_rule("blend", given) == Blend(DFA(scale=2.0), LastK(FA(level="block")))


def test_the_study_preset():
    assert make_rule("fa:study") == FA.study()
    assert make_rule("dfa:study", {"scale": "2"}) == DFA(**{**vars(DFA.study()), "scale": 2.0})
    assert make_rule("last-k", {"rule": "dfa:study"}) == LastK(DFA.study())


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("dfb", {}, "unknown rule 'dfb': did you mean 'dfa'? There are bp, "),
        ("dfa", {"scael": "2"}, "unknown option 'rule.scael': did you mean 'rule.scale'? There are rule.normalise, "),
        ("dfa", {"scale": "two"}, "rule.scale must be a finite number, not 'two'"),
        ("dfa", {"drive": "inptu"}, "unknown rule.drive 'inptu': did you mean 'input'? There are output, input."),
        ("dfa", {"scale.x": "2"}, "rule.scale is a finite number: it has no options, as in 'rule.scale.x'"),
        ("last-k", {}, "rule.rule must be given"),
        ("blend", {}, "rule.first and rule.second must be given"),
        ("last-k", {"rule.scale": "2"}, "rule.rule.scale is an option of a rule: name it too, as in rule.rule=dfa"),
        ("last-k", {"rule": "dfb"}, "unknown rule 'dfb': did you mean 'dfa'?"),
        (
            "last-k",
            {"rule": "dfa", "rule.scael": "2"},
            "unknown option 'rule.rule.scael': did you mean 'rule.rule.scale'?",
        ),
        ("last-k", {"rule": 3}, "LastK.rule must be a rule, not 3"),
        ("dfa:stduy", {}, "unknown preset of rule 'dfa' 'stduy': did you mean 'study'?"),
        ("handover:study", {}, "the source study has no recipe for 'handover'"),
        ("./dfa.py", {}, "not found: ./dfa.py"),
    ],
)
def test_refused_in_one_line(name, given, message):
    with pytest.raises((UsageError, MissingError)) as raised:
        make_rule(name, given)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_a_path_that_is_there_is_no_name(tmp_path):
    with pytest.raises(UsageError, match="is a path: the name of a rule is wanted, one of bp, fa, dfa"):
        make_rule(str(tmp_path))


def test_a_record_without_a_name():
    with pytest.raises(UsageError, match=r"^rule has no name; there are bp, "):
        rule_from_dict({"scale": 2.0})


def test_nothing_is_imported_because_a_record_names_it():
    with pytest.raises(UsageError, match="unknown rule 'antigravity:DFA'"):
        rule_from_dict({"name": "antigravity:DFA"})
    assert "antigravity" not in sys.modules


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [entry.key for entry in nets.REGISTRY])
def test_every_network_is_made_from_its_options(key):
    shape = (3, 8, 8)
    options = config.network_options(key)
    assert not set(options) & set(nets.REGISTRY.load(key).settled_by_data)
    network = NetworkSpec(key, options, shape, classes=5)()
    assert network(torch.zeros(2, *shape)).shape == (2, 5)


def test_options_of_a_network():
    options = config.network_options("resmlp", {"width": "64", "residual": "false"})
    assert options == {"width": 64, "depth": 4, "terminal_norm": True, "residual": False, "branch_std": 0.01}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("resmlq", {}, "unknown net 'resmlq': did you mean 'resmlp'?"),
        ("resmlp", {"inputs": "3"}, "net.inputs is taken from the data and cannot be set"),
        ("resmlp", {"widht": "3"}, "unknown option 'net.widht': did you mean 'net.width'? There are net.width, "),
        ("resmlp", {"width": "3.5"}, "net.width must be a whole number, not '3.5'"),
        ("mlp", {"activation": "rleu"}, "unknown net.activation 'rleu': did you mean 'relu'?"),
        ("./net.py", {}, "not found: ./net.py"),
    ],
)
def test_refused_of_a_network(name, given, message):
    with pytest.raises((UsageError, MissingError)) as raised:
        config.network_options(name, given)
    assert str(raised.value).startswith(message)


class Nameless(torch.nn.Module):
    """A module of another package that cannot be made from data."""


def test_a_network_that_takes_no_sizes_from_data(monkeypatch):
    monkeypatch.setitem(nets.REGISTRY.entries, "nameless", Entry("nameless", f"{__name__}:Nameless", ""))
    with pytest.raises(UsageError, match="net 'nameless' has no from_data"):
        config.network_options("nameless")


# --- data, recipes ----------------------------------------------------------------------------------------------------


def test_data_by_name():
    data = config.load_data("teacher", {"train": "30", "test": "10", "alpha": "0.5", "seed": "3"}, validation=4)
    assert {name: len(part) for name, part in data.splits.items()} == {"train": 26, "validation": 4, "test": 10}
    assert data.options["alpha"] == 0.5
    assert data.options["seed"] == 3


def test_data_by_its_folder(tmp_path):
    folder = layouts.write_cifar10_binary(tmp_path / "photographs", layouts.cifar10())
    data = config.load_data(str(folder), {"augment": "none"})
    assert (data.name, data.augment, len(data.train)) == ("cifar10", "none", 20)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("digist", {}, "unknown dataset 'digist': did you mean 'digits'?"),
        ("./nowhere", {}, "not found: ./nowhere"),
        ("digits", {"augmnt": "none"}, "unknown option 'data.augmnt': did you mean 'data.augment'?"),
        ("digits", {"augment": "flip"}, "unknown data.augment 'flip': did you mean 'crop-flip'?"),
        ("teacher", {"alpha": "big"}, "data.alpha must be a finite number, not 'big'"),
    ],
)
def test_refused_of_data(given, options, message):
    with pytest.raises((UsageError, MissingError)) as raised:
        config.load_data(given, options)
    assert str(raised.value).startswith(message)


def test_data_that_is_not_there_names_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDITSCOPE_DATA", str(tmp_path))
    with pytest.raises(MissingError, match="creditscope data fetch cifar100"):
        config.load_data("cifar100")


def test_recipes():
    assert make_recipe() == recipes.default
    assert make_recipe("study", {"lr": "1e-4"}) == recipes.study.with_(lr=1e-4)
    assert make_recipe("study", {"clip": "none"}).clip is None


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("stduy", {}, "unknown recipe 'stduy': did you mean 'study'? There are default, study."),
        ("study", {"lrr": "1"}, "unknown option 'recipe.lrr': did you mean 'recipe.lr'?"),
        ("study", {"clip": "no"}, "recipe.clip must be a finite number or none, not 'no'"),
        ("study", {"batch": "0"}, "recipe.batch must be a whole number of at least 1, not 0"),
    ],
)
def test_refused_of_a_recipe(name, given, message):
    with pytest.raises(UsageError) as raised:
        make_recipe(name, given)
    assert str(raised.value).startswith(message)


# --- text -------------------------------------------------------------------------------------------------------------


def test_assignments_by_section():
    given = ["rule.scale=2", "net.width = 64", "rule.rule.drive=input", "data.folder=a=b"]
    assert config.parse_assignments(given, ["rule", "net", "data", "recipe"]) == {
        "rule": {"scale": "2", "rule.drive": "input"},
        "net": {"width": "64"},
        "data": {"folder": "a=b"},
        "recipe": {},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rule.scale"], "'rule.scale' is not an option: write SECTION.NAME=VALUE, as in rule.scale=2"),
        (["scale=2"], "'scale=2' is not an option: write SECTION.NAME=VALUE"),
        (["rule.=2"], "'rule.=2' is not an option: write SECTION.NAME=VALUE"),
        (["ruel.scale=2"], "unknown section 'ruel': did you mean 'rule'? There are rule, net."),
        (["rule.scale=2", "rule.scale=3"], "rule.scale is given twice, 2 and 3"),
    ],
)
def test_refused_of_assignments(given, message):
    with pytest.raises(UsageError) as raised:
        config.parse_assignments(given, ["rule", "net"])
    assert str(raised.value).startswith(message)
