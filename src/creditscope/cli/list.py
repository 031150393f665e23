"""``creditscope list``: what is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple

from creditscope import config, data, nets, rules
from creditscope.cli.command import Command, Exit, argument, columns, say, say_json
from creditscope.options import Option, describe, docs_of
from creditscope.registry import Registry


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the rules, the networks or the data sets, with a line each; with a NAME, what can be set of that one."""

    kind: Literal["rules", "nets", "data"] = argument("KIND")
    """Rules, nets or data."""
    name: str | None = argument("NAME", None)
    """One of them: its options, as --set takes them."""

    def run(self) -> Exit:
        """Print the lines."""
        if self.name is None:
            self._entries()
        else:
            self._options(self.name)
        return Exit.DONE

    def _entries(self) -> None:
        entries = [*_KINDS[self.kind].registry]
        if self.json:
            say_json({self.kind: [{"name": entry.key, "summary": entry.summary} for entry in entries]})
        else:
            say(columns([(entry.key, entry.summary) for entry in entries]))

    def _options(self, name: str) -> None:
        kind = _KINDS[self.kind]
        options, docs = kind.schema(name), docs_of(kind.registry.load(name))
        if self.json:
            rows = [{"name": key, **_as_json(option), "about": docs.get(key, "")} for key, option in options.items()]
            say_json({"name": name, "options": rows})
        else:
            lines = [
                (f"{kind.section}.{key}={_default(option)}", describe(option.hint), _first_line(docs.get(key, "")))
                for key, option in options.items()
            ]
            say(columns(lines) if lines else f"{name} has no options")


class _Kind(NamedTuple):
    registry: Registry
    section: str
    schema: Callable[[str], dict[str, Option]]


_KINDS = {
    "rules": _Kind(rules.REGISTRY, "rule", config.rule_schema),
    "nets": _Kind(nets.REGISTRY, "net", config.network_schema),
    "data": _Kind(data.REGISTRY, "data", config.data_schema),
}


def _as_json(option: Option) -> dict[str, Any]:
    required = option.default is MISSING
    return {"type": describe(option.hint), "required": required, "default": None if required else option.default}


def _default(option: Option) -> str:
    return "..." if option.default is MISSING else str(option.default)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
