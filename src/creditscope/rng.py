"""Random streams: every draw comes from a generator derived from (run seed, purpose), never from the global one."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Return the 63-bit seed of one purpose of a run, e.g. ``derive(42, "order", epoch)``.

    A hash keeps the streams of neighbouring seeds and purposes apart, which adding offsets to a seed does not.
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of one purpose of a run."""
    return torch.Generator(device).manual_seed(derive(seed, *purpose))
