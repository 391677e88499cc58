"""What Talon has trained for a model, in `models/NAME`: draft heads and a datastore of the model's own answers.

A model is known by its final norm, whatever its file is called: GGUF files keep norms unquantised, so every
quantisation of a model has the same, and so has the directory that it was made from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.core.errors import ModelError
from engine.places import ROOT
from engine.weights.gguf.file import GgufFile, read_gguf
from engine.weights.gguf.source import open_gguf
from engine.weights.quantised import unquantised

_TARGETS = {
    "b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4": "smollm2-135m",
    "4a2ccafdcfc6b8111984705834abf9d4ce8187c2414ecef84804385835b18637": "qwen2.5-coder-1.5b-instruct",
}
"""Folders by the SHA-256 of their target's final norm, as little-endian bfloat16."""
_BEST = ("block", "eagle3")
_NORM = "model.norm.weight"
_LARGEST_HEADER = 100_000_000  # bytes, as in safetensors itself


@dataclass(frozen=True)
class Trained:
    """The folder of what comes with a model."""

    folder: Path

    @property
    def answers(self) -> Path | None:
        """The datastore of the model's own answers: see `Config.drafter.answers`."""
        return found if (found := self.folder / "answers").is_dir() else None

    @property
    def best_head(self) -> str:
        """The method of the head that drafts best, of those that are there."""
        return next((name for name in _BEST if (self.folder / name).is_dir()), _BEST[-1])

    @property
    def heads(self) -> Path:
        """The path of the draft heads, with {method}: see `Config.drafter.path`."""
        return self.folder / "{method}"


def trained_for_name(name: str) -> Trained | None:
    """Return what comes with the model of that name, which need not be there yet; None if nothing does."""
    return Trained(ROOT / "models" / name) if name in _TARGETS.values() else None


def trained_for(model: Path) -> Trained | None:
    """Return what comes with the model in a GGUF file or directory; None if nothing does or it cannot be read."""
    try:
        norm = _norm_of_gguf(read_gguf(model, "model")) if model.is_file() else _norm_of_directory(model)
    except (OSError, ValueError, LookupError, TypeError, ModelError):
        return None  # whoever loads the model says what is wrong with it
    name = None if norm is None else _TARGETS.get(hashlib.sha256(norm).hexdigest())
    return None if name is None else Trained(ROOT / "models" / name)


def _norm_of_gguf(gguf: GgufFile) -> bytes | None:
    values = gguf.values("output_norm.weight")
    return None if values is None else (values.view("<u4") >> 16).astype("<u2").tobytes()


def _norm_of_directory(folder: Path) -> bytes | None:
    """Return the final norm, read without a tensor library, which takes seconds to import."""
    folder = unquantised(folder)
    if (gguf := open_gguf(folder)) is not None:
        return _norm_of_gguf(gguf)
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        file = folder / json.loads(index.read_text(encoding="utf8"))["weight_map"][_NORM]
    with file.open("rb") as weights:
        length = int(np.frombuffer(weights.read(8), "<u8")[0])
        if length > _LARGEST_HEADER:
            return None
        about = json.loads(weights.read(length))[_NORM]
        first, end = about["data_offsets"]
        weights.seek(8 + length + first)
        return weights.read(end - first) if about["dtype"] == "BF16" else None
