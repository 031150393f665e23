"""creditscope: train networks without backpropagation, audit them layer by layer, and know what to believe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> where it lives. Resolved on first use, so that `import creditscope` costs little and loads no torch.
_PUBLIC = {
    "fit": "creditscope.train:fit",
    "audit": "creditscope.auditing.run:audit",
    "load_audit": "creditscope.auditing.result:load_audit",
    "calibrate": "creditscope.auditing.thresholds:calibrate",
    "Monitor": "creditscope.auditing.monitor:Monitor",
    "load_monitor": "creditscope.auditing.monitor:load_monitor",
    "Convention": "creditscope.auditing.subject:Convention",
    "protocols": "creditscope.auditing.protocols",
    "recipes": "creditscope.recipes",
    "nets": "creditscope.nets",
    "rules": "creditscope.rules",
    "data": "creditscope.data",
    "testing": "creditscope.testing",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from creditscope import data, nets, recipes, rules, testing
    from creditscope.auditing import protocols
    from creditscope.auditing.monitor import Monitor, load_monitor
    from creditscope.auditing.result import load_audit
    from creditscope.auditing.run import audit
    from creditscope.auditing.subject import Convention
    from creditscope.auditing.thresholds import calibrate
    from creditscope.train import fit


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'creditscope' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
