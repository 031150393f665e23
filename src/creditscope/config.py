"""Rules, networks, data and recipes from names and options, and back: what the command line and a run's record share.

Options are given by their path, as text or as values: ``rule.scale=2``, ``net.width=64``, ``recipe.lr=1e-4``. A rule
inside a rule is an option whose value is a name, with options of its own: ``rule.rule=dfa``, ``rule.rule.scale=2``.
Importing this loads no torch; making a rule or a network does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from creditscope import data, nets, recipes, rules
from creditscope.errors import MissingError, UsageError, unknown
from creditscope.options import Option, convert, describe, options_of, require_known
from creditscope.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from creditscope.data import Dataset
    from creditscope.recipes import Recipe
    from creditscope.rules import Rule

Overrides = Mapping[str, Any]

NONE: Overrides = MappingProxyType({})
STUDY = "study"
"""The preset of a rule as the source study used it: ``dfa:study``."""


# --- rules ------------------------------------------------------------------------------------------------------------


def require_name(registry: Registry, given: str) -> None:
    """Refuse a path where a registered name is wanted, and say so where nothing lies there."""
    if given in registry.entries or not (given.startswith(".") or os.sep in given):
        return
    if not Path(given).exists():
        raise MissingError(f"not found: {given}")
    raise UsageError(
        f"{given} is a path: the name of a {registry.kind} is wanted, one of {', '.join(registry.entries)}"
    )


def rule_schema(name: str) -> dict[str, Option]:
    """Return the options of a registered rule."""
    return options_of(rules.REGISTRY.load(name))


def to_dict(rule: Rule) -> dict[str, Any]:
    """Return a rule as plain values, ready for JSON: its registered name and every option, rules inside it likewise."""
    path = rules.REGISTRY.key_of(type(rule))
    options = {
        name: _plain(getattr(rule, name), option, f"{path}.{name}") for name, option in options_of(type(rule)).items()
    }
    return {"name": path} | options


def _plain(value: Any, option: Option, path: str) -> Any:
    if _is_rule_type(option.hint):
        return to_dict(value)
    value = convert(value, option.hint, path)
    if isinstance(value, tuple):
        return [*value]
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    raise UsageError(f"{path} is {describe(type(value))}: only numbers, text and rules can be recorded")


def rule_from_dict(given: Mapping[str, Any], path: str = "rule") -> Rule:
    """Return the rule that :func:`to_dict` gave."""
    if "name" not in given:
        raise UsageError(f"{path} has no name; there are {', '.join(rules.REGISTRY.entries)}")
    return make_rule(given["name"], {name: value for name, value in given.items() if name != "name"}, path)


def make_rule(name: str, overrides: Overrides = NONE, path: str = "rule") -> Rule:
    """Return a rule by its name (``dfa``, or ``dfa:study``) with some options given by their paths below ``path``."""
    kind, preset = _kind_and_preset(name)
    options = options_of(kind)
    values = preset | _rule_options(options, overrides, preset, path)
    _require_all(options, values, path)
    return kind(**values)


def _kind_and_preset(name: str) -> tuple[type[Rule], dict[str, Any]]:
    require_name(rules.REGISTRY, name)
    key, colon, preset = name.partition(":")
    if key not in rules.REGISTRY.entries or not colon:
        return rules.REGISTRY.load(name), {}
    if preset != STUDY:
        raise unknown(f"preset of rule '{key}'", preset, [STUDY])
    rule = rules.REGISTRY.load(key).study()
    return type(rule), {option: getattr(rule, option) for option in options_of(type(rule))}


def _rule_options(options: dict[str, Option], overrides: Overrides, preset: Overrides, path: str) -> dict[str, Any]:
    own, inner = _by_level(overrides)
    require_known(path, [*own, *inner], options)
    values = {}
    for name in dict.fromkeys([*own, *inner]):
        hint, at = options[name].hint, f"{path}.{name}"
        if _is_rule_type(hint):
            value = own.get(name, preset.get(name, options[name].default))
            values[name] = _inner_rule(value, inner.get(name, {}), at)
        elif name in inner:
            raise UsageError(f"{at} is {describe(hint)}: it has no options, as in '{at}.{next(iter(inner[name]))}'")
        else:
            values[name] = convert(own[name], hint, at)
    return values


def _by_level(overrides: Overrides) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split options into those of this level, and those below it by the name that they are below."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    return own, inner


def _is_rule_type(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, rules.Rule)


def _inner_rule(value: Any, overrides: Overrides, path: str) -> Rule:
    if value is MISSING:
        raise UsageError(f"{path}.{next(iter(overrides))} is an option of a rule: name it too, as in {path}=dfa")
    if isinstance(value, rules.Rule):
        value = to_dict(value) if overrides else value
    if isinstance(value, Mapping):
        return rule_from_dict({**value, **overrides}, path)
    return make_rule(value, overrides, path) if isinstance(value, str) else value


def _require_all(options: dict[str, Option], values: Mapping[str, Any], path: str) -> None:
    missing = [f"{path}.{name}" for name, option in options.items() if option.default is MISSING and name not in values]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given")


# --- networks, data, recipes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkSpec:
    """A registered network and the arguments of its constructor, but for those that the data settles.

    Calling it makes the network, drawing from torch's global random stream as constructors do.
    """

    name: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    """The shape of one example."""
    classes: int

    def __call__(self) -> nn.Module:
        """Return a new network."""
        return nets.REGISTRY.load(self.name).from_data(self.shape, self.classes, **self.options)


def network_schema(name: str) -> dict[str, Option]:
    """Return the options of a registered network: its constructor's arguments but for those that the data settles."""
    require_name(nets.REGISTRY, name)
    kind = nets.REGISTRY.load(name)
    if not hasattr(kind, "from_data"):
        raise UsageError(f"net '{name}' has no from_data(shape, classes, **options) and so cannot be made by its name")
    return {key: option for key, option in options_of(kind).items() if key not in kind.settled_by_data}


def network_options(name: str, overrides: Overrides = NONE, path: str = "net") -> dict[str, Any]:
    """Return the values of a network's options: the defaults, with some given."""
    options = network_schema(name)
    for key in overrides:
        if key in nets.REGISTRY.load(name).settled_by_data:
            raise UsageError(f"{path}.{key} is taken from the data and cannot be set")
    return _values(options, overrides, path)


def data_schema(name: str) -> dict[str, Option]:
    """Return the options of a registered data set, with the seed of what is drawn in it (or from it)."""
    return options_of(data.REGISTRY.load(name)) | {"seed": Option(int, 0)}


def data_options(name: str, overrides: Overrides = NONE, path: str = "data") -> dict[str, Any]:
    """Return the values of a data set's options: the defaults, with some given."""
    return _values(data_schema(name), overrides, path)


def load_data(given: str, overrides: Overrides = NONE, *, validation: int = 0, path: str = "data") -> Dataset:
    """Return a data set by its name, or by the folder that holds it, with some of its options given."""
    from creditscope.data.catalogue import name_of

    return data.load(given, validation=validation, **data_options(name_of(given), overrides, path))


def make_recipe(name: str = "default", overrides: Overrides = NONE, path: str = "recipe") -> Recipe:
    """Return a recipe by its name, with some options given."""
    known = {key: value for key, value in vars(recipes).items() if isinstance(value, recipes.Recipe)}
    if name not in known:
        raise unknown("recipe", name, known)
    options = options_of(recipes.Recipe)
    require_known(path, overrides, options)
    return known[name].with_(**{key: convert(overrides[key], options[key].hint, f"{path}.{key}") for key in overrides})


def _values(options: dict[str, Option], overrides: Overrides, path: str) -> dict[str, Any]:
    require_known(path, overrides, options)
    defaults = {name: option.default for name, option in options.items() if option.default is not MISSING}
    values = defaults | {name: convert(overrides[name], options[name].hint, f"{path}.{name}") for name in overrides}
    _require_all(options, values, path)
    return values


# --- text -------------------------------------------------------------------------------------------------------------


def parse_assignments(given: Sequence[str], sections: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return ``["rule.scale=2", ...]`` by section: ``{"rule": {"scale": "2"}, ...}``."""
    parsed: dict[str, dict[str, str]] = {section: {} for section in sections}
    for text in given:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        if not (equals and dot and name):
            raise UsageError(f"'{text}' is not an option: write SECTION.NAME=VALUE, as in rule.scale=2")
        if section not in parsed:
            raise unknown("section", section, sections)
        if name in parsed[section]:
            raise UsageError(f"{path} is given twice, {parsed[section][name]} and {value}")
        parsed[section][name] = value.strip()
    return parsed
