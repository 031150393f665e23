import json

import pytest

from creditscope import data, nets, rules
from creditscope.cli import Exit, main

REGISTRIES = {"rules": rules.REGISTRY, "nets": nets.REGISTRY, "data": data.REGISTRY}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_line_each(kind, capsys):
    assert main(["list", kind]) == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [[entry.key, entry.summary] for entry in REGISTRIES[kind]]


@pytest.mark.parametrize("kind", REGISTRIES)
def test_for_a_program(kind, capsys):
    assert main(["list", kind, "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out) == {
        kind: [{"name": entry.key, "summary": entry.summary} for entry in REGISTRIES[kind]]
    }


def test_what_another_package_registers_is_listed(monkeypatch, capsys):
    entry = type(next(iter(rules.REGISTRY)))("mine", "mine:Rule", "from mine")
    monkeypatch.setitem(rules.REGISTRY.entries, "mine", entry)
    main(["list", "rules"])
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["mine", "from mine"]


def test_options_as_they_are_set(capsys):
    assert main(["list", "rules", "dfa"]) == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    scale = next(line for line in lines if line.startswith("rule.scale="))
    assert scale.split(maxsplit=4)[0] == "rule.scale=1.0"
    assert "a finite number" in scale
    assert "scale/√C" in scale


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (["list", "rules", "last-k"], "rule.rule=...  a Rule"),
        (["list", "nets", "resmlp"], "net.width=256"),
        (["list", "data", "teacher"], "data.inputs=8"),
    ],
)
def test_options_of_each_kind(argv, first, capsys):
    assert main(argv) == Exit.DONE
    assert capsys.readouterr().out.startswith(first)


def test_options_for_a_program(capsys):
    assert main(["list", "rules", "last-k", "--json"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert [(o["name"], o["required"], o["default"]) for o in found["options"]] == [
        ("rule", True, None),
        ("k", False, 0),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list", "rules", "dfb"], "unknown rule 'dfb': did you mean 'dfa'?"),
        (["list", "nets", "./nowhere"], "not found: ./nowhere"),
        (["list", "data", "mnits"], "unknown dataset 'mnits': did you mean 'mnist'?"),
    ],
)
def test_refused(argv, message, capsys):
    assert main(argv) == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"creditscope: {message}")
