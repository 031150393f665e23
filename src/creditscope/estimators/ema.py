"""An exponential moving average of a module, advanced once per change of its source."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class EMA(nn.Module):
    """θ_ema ← m·θ_ema + (1 − m)·θ: a frozen copy whose parameters are buffers, so that no optimiser sees them.

    :meth:`advance` may be called at every backward pass: it moves only where the source has changed since the last
    time. That is compared on the device with a kept copy, so gradient accumulation counts once, a replayed CUDA graph
    counts each time, and nothing is waited for.
    """

    def __init__(self, source: nn.Module, momentum: float = 0.995):
        super().__init__()
        self.momentum = momentum
        self.average = frozen_copy(source)
        self.seen = frozen_copy(source)

    @torch.no_grad()
    def advance(self, source: nn.Module) -> None:
        """Move the average towards the source where the source has changed."""
        average, seen = dict(self.average.named_buffers()), dict(self.seen.named_buffers())
        new = {name: p.detach() for name, p in source.named_parameters()}
        changed = torch.stack([(p != seen[name]).any() for name, p in new.items()]).any()
        weight = changed.double() * (1 - self.momentum)
        for name, p in new.items():
            average[name].lerp_(p, weight.to(p.dtype))
            seen[name].copy_(p)

    def forward(self, *args: Tensor) -> Tensor:
        """Run the averaged module."""
        return self.average(*args)


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters are buffers."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for name, parameter in [*part._parameters.items()]:
            if parameter is not None:
                del part._parameters[name]
                part.register_buffer(name, parameter.detach().clone())
    return twin
