"""A checkpoint: tensors and JSON in one safetensors file, so that both are replaced in one step or not at all.

The JSON lies in the file's own header, under ``creditscope``, with the format, its version and a digest of everything.
Any reader of safetensors opens it; ours also refuses what is cut short, altered, foreign or from a newer creditscope.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from creditscope.errors import UsageError
from creditscope.runs.files import check_format, json_object, read_bytes, write_bytes

FORMAT = "creditscope.checkpoint"
VERSION = 1
_KEY = "creditscope"  # one key: safetensors writes several in any order, and equal checkpoints shall be equal files


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the one that is there, in one step."""
    # Copies, each of its own: safetensors takes no shared memory (tied weights, views) and no strides.
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    kept = dict(meta)
    header = {"format": FORMAT, "version": VERSION, "sha256": digest(own, json.dumps(kept)), "meta": kept}
    write_bytes(path, safetensors.torch.save(own, {_KEY: json.dumps(header)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors, on the CPU, and the JSON of a checkpoint; None where there is none."""
    data = read_bytes(path)  # at once: a reader must not see the first half of one and the second of another
    if data is None:
        return None
    try:
        tensors = safetensors.torch.load(data)
        header = json_object(_texts(data).get(_KEY, "{}"))
    except Exception as error:  # safetensors knows many ways to fail, and each means the same
        raise UsageError(f"{path} is corrupt or cut short: {error}") from error
    check_format(path, found=header.get("format"), version=header.get("version"), ours=FORMAT, latest=VERSION)
    meta = header.get("meta", {})
    if digest(tensors, json.dumps(meta)) != header.get("sha256"):
        raise UsageError(f"{path} is corrupt: its contents are not those that were saved")
    return tensors, meta


def _texts(data: bytes) -> dict[str, str]:
    """Return the texts in the header of a valid safetensors file: 8 bytes for its length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__", {})


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 of a text and of contiguous CPU tensors: names, dtypes, shapes and bits."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # the bits, of any dtype
    return sha.hexdigest()
