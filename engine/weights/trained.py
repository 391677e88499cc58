"""What has been trained for a model: draft heads and a datastore of its own answers, which come with Talon in
`models/NAME`, and heads that `talon tune` has made here, in Talon's home, which come first.

A model is known by its final norm, whatever its file is called: GGUF files keep norms unquantised, so every
quantisation of a model has the same, and so has the directory that it was made from. Where a file has 1 added to it,
1 is added to the directory's. A norm of equal numbers tells nothing: rotated models have it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError
from engine.install_paths import ROOT
from engine.weights.cache import home
from engine.weights.gguf.file import GgufFile, read_gguf
from engine.weights.gguf.source import open_gguf
from engine.weights.quantised import unquantised

_TARGETS = {
    "b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4": "smollm2-135m",
    "4a2ccafdcfc6b8111984705834abf9d4ce8187c2414ecef84804385835b18637": "qwen2.5-coder-1.5b-instruct",
}
"""Folders by the SHA-256 of their target's final norm, as little-endian bfloat16."""
_BEST = ("block", "eagle3")
_NORMS = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
    "model.embedding_norm.weight",
    "model.final_layernorm.weight",
    "model.norm_f.weight",
    "backbone.norm_f.weight",
)
_STORED_NORMS = ("output_norm.weight", "token_embd_norm.weight")  # in GGUF files
_ADDED_TO = ("gemma", "gemma2", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Types of models to whose norms llama.cpp's converter adds 1."""
_LARGEST_HEADER = 100_000_000  # bytes, as in safetensors itself

_Norm = NDArray[np.uint16]


@dataclass(frozen=True)
class Trained:
    """The folders of what there is for a model. folder: of what comes with Talon, None if nothing does. tuned: of the
    heads that were made here, which need not be there.
    """

    folder: Path | None
    tuned: Path

    @property
    def answers(self) -> Path | None:
        """The datastore of the model's own answers: see `Config.drafter.answers`."""
        return None if self.folder is None or not (found := self.folder / "answers").is_dir() else found

    @property
    def heads(self) -> Path | None:
        """The path of the heads that come with Talon, with {method}: see `Config.drafter.path`."""
        return None if self.folder is None else self.folder / "{method}"

    @property
    def is_tuned(self) -> bool:
        """Whether a head was made here."""
        return any((self.tuned / name).is_dir() for name in _BEST)


def best_head(places: Iterable[Path | None]) -> str:
    """Return the method of the head that drafts best, of those in the first of these folders that has any."""
    return next((name for place in places if place for name in _BEST if (place / name).is_dir()), _BEST[-1])


def trained_for_name(name: str) -> Trained | None:
    """Return what there is for the model of that name, which need not be there yet; None if Talon knows no such
    model.
    """
    return next((_trained(norm) for norm, known in _TARGETS.items() if known == name), None)


def trained_for(model: Path) -> Trained | None:
    """Return what there is, and may be, for the model in a GGUF file or directory; None if it cannot be told from
    others.
    """
    try:
        norm = _norm_of_gguf(read_gguf(model, "model")) if model.is_file() else _norm_of_directory(model)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, ModelError):
        return None  # whoever loads the model says what is wrong with it
    if norm is None or (norm == norm[0]).all():
        return None
    return _trained(hashlib.sha256(norm.tobytes()).hexdigest())


def _trained(norm: str) -> Trained:
    """Return the folders of a model by the hash of its norm."""
    name = _TARGETS.get(norm)
    return Trained(None if name is None else ROOT / "models" / name, home() / "heads" / norm[:32])


def _norm_of_gguf(gguf: GgufFile) -> _Norm | None:
    found = (gguf.values(name) for name in _STORED_NORMS)
    return next((_in_16_bits(values) for values in found if values is not None), None)


def _norm_of_directory(folder: Path) -> _Norm | None:
    """Return the final norm, read without a tensor library, which takes seconds to import."""
    folder = unquantised(folder)
    if (gguf := open_gguf(folder)) is not None:
        return _norm_of_gguf(gguf)
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf8"))["weight_map"]
        file = folder / next(files[name] for name in _NORMS if name in files)
    with file.open("rb") as weights:
        length = int(np.frombuffer(weights.read(8), "<u8")[0])
        if length > _LARGEST_HEADER:
            return None
        tensors = json.loads(weights.read(length))
        about = next(tensors[name] for name in _NORMS if name in tensors)
        first, end = about["data_offsets"]
        weights.seek(8 + length + first)
        stored = weights.read(end - first)
    if about["dtype"] == "BF16":
        wide = (np.frombuffer(stored, "<u2").astype("<u4") << 16).view("<f4")
    else:
        wide = np.frombuffer(stored, {"F32": "<f4", "F16": "<f2"}[about["dtype"]]).astype("<f4")
    kind = json.loads((folder / "config.json").read_text(encoding="utf8"))["model_type"]
    return _in_16_bits(wide + np.float32(1) if kind.removesuffix("_text") in _ADDED_TO else wide)


def _in_16_bits(values: NDArray[np.float32]) -> _Norm:
    """Return the upper halves, which every type of the same norm shares."""
    return (values.view("<u4") >> 16).astype("<u2")
