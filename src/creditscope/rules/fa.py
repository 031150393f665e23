"""Feedback alignment, in its two meanings: by weight, and by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from creditscope.calling import Inputs
from creditscope.rules._base import Feedback, Injection, LocalRule, Outcome, Rule, Site, require
from creditscope.rules._feedback import Distribution, Matrices, draw, given_dict, given_list
from creditscope.rules._maps import BackwardThrough, find_maps, refuse_opaque
from creditscope.rules.bp import whole_step
from creditscope.rules.dfa import features_of


def fa_credits(states: Sequence[Tensor], matrices: Sequence[Tensor], terminal: Tensor) -> list[Tensor]:
    """a_L = g_L (``terminal``), a_l = B_l a_{l+1} on the feature axis: B_l (…, d, d), a_l shaped like h_l.

    Leading axes before the batch (several runs side by side) go through. Tokens and positions share B_l.
    """
    credits = [terminal]
    for h, matrix in zip(reversed(states[:-1]), reversed(matrices), strict=True):
        lead = matrix.ndim - 2
        a = credits[0].to(matrix.dtype)
        inner = h.ndim - lead - 1  # axes of one example
        axis = lead + 1 if inner > 2 else -1
        turned = a.movedim(axis, -1)
        between = (1,) * (turned.ndim - lead - 2)
        transposed = matrix.mT.reshape(*matrix.shape[:lead], *between, *matrix.mT.shape[lead:])
        credits.insert(0, (turned @ transposed).movedim(-1, axis))
    return credits


@dataclass(frozen=True)
class FA(LocalRule):
    """Feedback alignment: the backward pass uses fixed random matrices in place of the transposed weights.

    ``level="weight"`` (the default, and what the literature means): every linear and convolutional map of the network,
    the head's too, sends δ back through its own B of the weight's shape; weights, biases and normalisations get their
    gradients from that δ. Works on the unmodified network. With B = W it is backpropagation.

    ``level="block"`` (the source study's): a_L = g_L exact, a_l = B_l a_{l+1} with B_l (d × d), for blocks that keep
    the state's shape; ordinary backpropagation inside each block.

    Lillicrap, Cownden, Tweed & Akerman, Nature Communications 7 (2016), eq. 3. Deviations: entries are
    N(0, 1)/√fan, fan the number of entries summed on the way back, so that δ keeps its size; there they are uniform.
    """

    level: Literal["weight", "block"] = field(default="weight", kw_only=True)
    """A matrix for every map, or one for every block."""
    scale: float = field(default=1.0, kw_only=True)
    """The entries' standard deviation is scale/√fan."""
    distribution: Distribution = field(default="normal", kw_only=True)
    """What the entries are drawn from."""

    has_feedback: ClassVar[bool] = True
    needs_terminal_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, default in (("normalise", "none"), ("drive", "output")):
            require(
                self.level == "block" or getattr(self, option) == default,
                f"rule.{option} applies to a credit on blocks: FA(level='weight') has none; use level='block'",
            )

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Draw the matrices: one for each map's weight in the parameters' order, or one for each block."""
        options = {"scale": self.scale, "distribution": self.distribution, "factory": site.factory}
        options["generator"] = generator
        if self.level == "block":
            sizes = self._block_sizes(site)
            if feedback is not None:
                return given_list(feedback, [(d, d) for d in sizes], site.factory, "block-level FA")
            return Matrices({str(l): draw((d, d), d, **options) for l, d in enumerate(sizes)})
        maps, opaque = find_maps(site.cut, site.example)
        refuse_opaque(opaque)
        shapes = {name: tuple(site.cut.network.get_parameter(name).shape) for name in maps}
        if feedback is not None:
            return given_dict(feedback, shapes, site.factory, "weight-level FA")
        return Matrices({name: draw(s, s[0] * _positions(s), **options) for name, s in shapes.items()})

    def _block_sizes(self, site: Site) -> list[int]:
        shapes = site.topology.shapes
        for name, before, after in zip(site.cut.blocks, shapes[:-1], shapes[1:], strict=True):
            require(
                before == after,
                f"block '{name}' changes the state's shape from {tuple(before)} to {tuple(after)}: block-level FA is "
                "not defined there; use FA(level='weight')",
            )
        return [features_of(shape) for shape in shapes[:-1]]

    def _mode(self, site: Site, pathway: nn.Module) -> BackwardThrough:
        assert isinstance(pathway, Matrices)
        network = site.cut.network
        names = [name.replace("/", ".") for name, _ in pathway.named_buffers()]
        return BackwardThrough({network.get_parameter(name): pathway[name] for name in names})

    def formula(
        self,
        states: Sequence[Tensor],
        outputs: Tensor,
        errors: Tensor,
        matrices: Sequence[Tensor],
        terminal: Tensor | None,
    ) -> Sequence[Tensor]:
        """a_L = g_L, a_l = B_l a_{l+1} (block level)."""
        require(self.level == "block", "FA(level='weight') gives no credit by a formula on states: use level='block'")
        assert terminal is not None
        return fa_credits(states, matrices, terminal)

    def credits(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> list[Tensor]:
        """Return a_0..a_L: at weight level the δ that arrives at each state."""
        if self.level == "block":
            return super().credits(site, pathway, x, y)
        with self._mode(site, pathway):
            return site.cut.exact(x, y).gradients

    def drives(self, site: Site, pathway: nn.Module, x: Inputs, y: Any) -> Injection:
        """Return what drives each segment."""
        if self.level == "block":
            return super().drives(site, pathway, x, y)
        return Rule.drives(self, site, pathway, x, y)

    def step(self, site: Site, pathway: nn.Module, x: Inputs, y: Any, scale: float | Tensor) -> Outcome:
        """Local updates from block credits, or one uncut pass whose maps send δ through their matrices."""
        if self.level == "block":
            return super().step(site, pathway, x, y, scale)
        mode = self._mode(site, pathway)
        return whole_step(site, x, y, scale, penalty=self.penalty, reduction=self.penalty_reduction, mode=mode)

    def exact_states(self, site: Site) -> set[int]:
        """Block level: a_L."""
        return {site.cut.depth} if self.level == "block" else set()


def _positions(shape: tuple[int, ...]) -> int:
    """Return the number of positions of a convolution kernel; 1 for a linear map."""
    return torch.Size(shape[2:]).numel()
