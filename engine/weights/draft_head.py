"""Tells which draft head a model's files bring, a file of its own holds, or lies beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import ModelError
from engine.weights.gguf.file import GgufFile, read_gguf
from engine.weights.gguf.source import open_gguf, source_of
from engine.weights.quantised import unquantised

METHOD = "mtp"
PREFIX = "mtp."
"""The prefix of the head's tensors in safetensors."""
ASSISTANT, _ASSISTANT_FILE = "assistant", "gemma4-assistant"
ARCHITECTURES = {"eagle3": "eagle3", "dflash": "block", _ASSISTANT_FILE: ASSISTANT}
"""The methods of heads that are GGUF files of their own, by the architecture that these name."""
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""The `model_type` of assistants in directories."""
_WITH_ASSISTANT = "gemma4"
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


def method_of(path: Path) -> str | None:
    """Return the method of the head that a file or directory holds, or that a model brings; None if there is none."""
    if brings_head(path):
        return METHOD
    try:
        if path.is_file():
            return ARCHITECTURES.get(read_gguf(path, "drafter.path").architecture)
    except ModelError:  # whoever loads it says what is wrong
        return None
    return ASSISTANT if _model_type(path) in ASSISTANT_TYPES else None


def assistant_beside(model: Path) -> Path | None:
    """Return the assistant that lies beside a model: a GGUF file in the folder of the model's, of the same width and
    vocabulary, or the directory NAME-assistant beside the directory NAME. None if there is none.
    """
    try:
        if model.is_file():
            return _file_beside(model)
        folder = unquantised(model)
        if (source := source_of(folder)) is not None:
            return _file_beside(folder / source.file)
    except (OSError, ValueError, LookupError, TypeError, ModelError):
        return None  # whoever loads the model says what is wrong with it
    beside = folder.with_name(f"{folder.name}-{ASSISTANT}")
    fits = _model_type(folder).startswith(_WITH_ASSISTANT) and _model_type(beside) in ASSISTANT_TYPES
    return beside if fits else None


def _file_beside(model: Path) -> Path | None:
    target = read_gguf(model, "model")
    if target.architecture != _WITH_ASSISTANT:
        return None
    for file in sorted(model.absolute().parent.glob("*.gguf")):
        try:
            found = read_gguf(file, "drafter.path")
        except ModelError:
            continue
        if found.architecture == _ASSISTANT_FILE and _sizes(found, "_out") == _sizes(target):
            return file
    return None


def _sizes(file: GgufFile, ending: str = "") -> tuple[Any, Any]:
    """Return the width and the vocabulary of the model that the file is, or is for."""
    key = f"{file.architecture}.embedding_length{ending}"
    return file.metadata.get(key), file.metadata.get("tokenizer.ggml.tokens")


def _model_type(folder: Path) -> str:
    """Return what the directory's configuration says; "" if there is none."""
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf8"))["model_type"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


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
