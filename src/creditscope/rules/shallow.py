"""The shallow baseline: the head on the stem alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from creditscope.rules._base import Site
from creditscope.rules.bp import BP


@dataclass(frozen=True)
class Shallow(BP):
    """The network without its blocks: h_0 goes straight to the head, and both are trained by backpropagation.

    A rule whose accuracy does not exceed this one was not worth its blocks. ``learner(x)`` runs the network in that
    form; h_0 and h_L must have the same shape, else it is refused by name.
    """

    bypasses_blocks: ClassVar[bool] = True

    def frozen(self, site: Site) -> set[str]:
        """Return the blocks' parameters, which take no part."""
        return {name for block in site.cut.blocks for name in site.topology.sections[block]}
