"""Tells whether a model's files bring a draft head of their own, for multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from engine.core.errors import ModelError
from engine.weights.gguf.file import GgufFile, read_gguf
from engine.weights.gguf.source import open_gguf
from engine.weights.quantised import unquantised

METHOD = "mtp"
PREFIX = "mtp."
"""The prefix of the head's tensors in safetensors."""
_LATENT = ("deepseek2",)
"""Architectures whose heads attend by latent vectors, which our head does not."""
_LARGEST_HEADER = 100_000_000  # bytes, as in safetensors itself


def brings_head(model: Path) -> bool:
    """Return whether the GGUF file or the directory has a head. Whoever loads the model says what is wrong with it."""
    try:
        if model.is_file():
            return head_block(read_gguf(model, "model")) is not None
        folder = unquantised(model)
        if (gguf := open_gguf(folder)) is not None:
            return head_block(gguf) is not None
        return any(name.startswith(PREFIX) for name in _names(folder))
    except (OSError, ValueError, LookupError, TypeError, ModelError):
        return False


def head_block(file: GgufFile) -> str | None:
    """Return how the names of the head's tensors begin; None if the file has none."""
    if file.architecture in _LATENT or not file.metadata.get(f"{file.architecture}.nextn_predict_layers"):
        return None
    block = f"blk.{file.metadata[f'{file.architecture}.block_count'] - 1}."
    return block if file.tensor(f"{block}nextn.eh_proj.weight") is not None else None


def _names(folder: Path) -> list[str]:
    """Return the names of a checkpoint's tensors, read without a tensor library."""
    if (index := folder / "model.safetensors.index.json").is_file():
        return [*json.loads(index.read_text(encoding="utf8"))["weight_map"]]
    with (folder / "model.safetensors").open("rb") as weights:
        length = int(np.frombuffer(weights.read(8), "<u8")[0])
        return [*json.loads(weights.read(length))] if length <= _LARGEST_HEADER else []
