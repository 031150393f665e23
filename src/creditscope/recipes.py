"""Recipes of a training: optimiser, schedule, batch, clipping and precision. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from creditscope.errors import UsageError, unknown


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained, whatever its rule; every rule of a comparison gets the same."""

    optimiser: Literal["adamw", "adam", "sgd"] = "adamw"
    """AdamW; Adam, without decoupled decay; or SGD with momentum .9."""
    lr: float = 1e-3
    """Learning rate at the start."""
    weight_decay: float = 0.01
    """Weight decay of the network's parameters (a rule's own estimators have none)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Cosine to zero over the epochs, stepped once an epoch; or no change."""
    batch: int = 128
    """Examples in a batch."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    clip: float | None = None
    """Clip the gradient of the mean loss at this norm."""
    clip_by: Literal["all", "block"] = "all"
    """Clip all parameters together; or the stem, each block and the head, each for itself."""
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the network; "bfloat16" is autocast over float32 parameters."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in ("optimiser", "schedule", "clip_by", "precision"):
            allowed = get_args(hints[name])
            if getattr(self, name) not in allowed:
                raise unknown(f"recipe.{name}", str(getattr(self, name)), allowed)
        if not isinstance(self.batch, int) or self.batch < 1:
            raise UsageError(f"recipe.batch must be a whole number of at least 1, not {self.batch!r}")
        for name, low in (("lr", 0), ("weight_decay", 0), ("clip", 0)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and low <= value < float("inf")):
                raise UsageError(f"recipe.{name} must be a number of at least {low}, not {value!r}")
        if self.clip == 0:
            raise UsageError("recipe.clip is 0: nothing would be learned; leave it out for no clipping")

    def with_(self, **changes: Any) -> Recipe:
        """Return the recipe with some options changed."""
        names = [item.name for item in fields(self)]
        for name in changes:
            if name not in names:
                raise unknown("option of fit", name, names)
        return replace(self, **changes)


default = Recipe()
"""AdamW at 1e-3 with weight decay .01, cosine over the epochs, batches of 128."""

study = Recipe(clip=1.0, clip_by="block")
"""The source study's: the default, with the gradient of every block, of the stem and of the head clipped at norm 1.

Its whole pace hangs on the clipping: without it DFA's states run ahead of the published ones by 2 to 4 times.
"""
