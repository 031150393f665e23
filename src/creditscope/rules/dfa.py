"""Direct feedback alignment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from creditscope.rules._base import Feedback, LocalRule, Site, require
from creditscope.rules._feedback import Distribution, Matrices, draw, given_list
from creditscope.tape import Tape


def dfa_credits(
    states: Sequence[Tensor],
    errors: Tensor,
    matrices: Iterable[Tensor],
    tokens: str = "dense",
) -> list[Tensor]:
    """a_l = B_l e, per example: e (…, B, C), B_l (…, features, C), a_l shaped like h_l.

    Leading axes before the batch (several runs side by side) go through. ``dense`` gives every unit of the state its
    own row of B_l; ``shared`` gives one row a feature, the same at all tokens or positions; ``cls`` gives it to token
    0 alone.
    """
    credits = []
    for h, matrix in zip(states, matrices, strict=True):
        lead = matrix.ndim - 2
        a = errors.reshape(*errors.shape[: lead + 1], -1).to(matrix.dtype) @ matrix.mT
        if tokens == "dense" or h.ndim == lead + 2:
            credits.append(a.reshape(h.shape))
        elif tokens == "cls":
            full = a.new_zeros(h.shape)
            full[..., 0, :] = a
            credits.append(full)
        elif h.ndim == lead + 3:
            credits.append(a.unsqueeze(-2).expand(h.shape))
        else:
            credits.append(a[(..., *[None] * (h.ndim - lead - 2))].expand(h.shape))
    return credits


def features_of(shape: torch.Size) -> int:
    """Return the size of a state's feature axis: the last of (tokens, features), the first of (channels, ...)."""
    return shape[0] if len(shape) > 2 else shape[-1]


@dataclass(frozen=True)
class DFA(LocalRule):
    """Direct feedback alignment: a_l = B_l e for every state l = 0..L, with e = ∂ℓ/∂output and B_l fixed and random.

    The head is trained by the true loss. Block l is driven by the credit at its output, h_{l+1}, and uses ordinary
    backpropagation inside itself (:meth:`Learner.coverage` shows where).

    Nøkland, *Direct feedback alignment provides learning in deep neural networks*, NeurIPS 2016, eq. 5–7. There B_k e
    meets each hidden layer's activation; here each state, so on a plain MLP the two are one. Deviations: entries are
    N(0, 1)/√C rather than uniform (the source study's choice; ``distribution="uniform"`` has the same variance).
    """

    scale: float = field(default=1.0, kw_only=True)
    """The entries' standard deviation is scale/√C, C the number of outputs."""
    distribution: Distribution = field(default="normal", kw_only=True)
    """What the entries are drawn from."""
    tokens: Literal["dense", "shared", "cls"] = field(default="dense", kw_only=True)
    """States with several axes: a row of B for every unit, one shared by all tokens or positions, or token 0 alone."""

    has_feedback: ClassVar[bool] = True

    def build(self, site: Site, generator: torch.Generator, feedback: Feedback | None) -> nn.Module:
        """Draw B_0..B_L, features × outputs."""
        outputs = site.topology.output_shape.numel()
        shapes = [(self._rows(site, l, shape), outputs) for l, shape in enumerate(site.topology.shapes)]
        if feedback is not None:
            return given_list(feedback, shapes, site.factory, "DFA")
        options = {"scale": self.scale, "distribution": self.distribution, "factory": site.factory}
        return Matrices({str(l): draw(s, outputs, generator=generator, **options) for l, s in enumerate(shapes)})

    def _rows(self, site: Site, l: int, shape: torch.Size) -> int:
        if self.tokens == "dense" or len(shape) == 1:
            return shape.numel()
        require(
            self.tokens != "cls" or len(shape) == 2,
            f"state {l} has shape {tuple(shape)}: tokens='cls' needs (tokens, features)",
        )
        return features_of(shape)

    def formula(
        self,
        states: Sequence[Tensor],
        outputs: Tensor,
        errors: Tensor,
        matrices: Sequence[Tensor],
        terminal: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """a_l = B_l e."""
        return dfa_credits(states, errors, matrices, self.tokens)

    def credit(self, site: Site, pathway: nn.Module, tape: Tape) -> Sequence[Tensor]:
        """a_l = B_l e, after a look at whether the states are as long as the matrices."""
        for l, (h, matrix) in enumerate(zip(tape.states, pathway.buffers(), strict=True)):
            rows = self._rows(site, l, h.shape[1:])
            require(
                rows == matrix.shape[0],
                f"state {l} has shape {tuple(h.shape[1:])} now, {rows} units, and its feedback matrix "
                f"{matrix.shape[0]} rows: inputs of several sizes need tokens='shared' or 'cls'",
            )
        return super().credit(site, pathway, tape)
