"""Reads draft heads in their public layouts, and what they borrow from the target: embeddings and output matrix.

Every tensor is asked for by name and shape and none may be left over, so a head in another layout or for another model
is refused before it serves a request. Pickles are only ever opened with `weights_only=True`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.heads.layouts import llama_cpp, speculators
from drafters.heads.matrices import HeadTensors, Joins, Matrix, file_matrix, numbers
from engine.core.errors import DrafterMismatch, ModelError, first_line
from engine.kernels.quant.layouts import STEP
from engine.kernels.quant.nearest import nearest_codes, values_of
from engine.kernels.quant.stored import StoredMatrix
from engine.weights.catalogue import suggestion
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.source import open_gguf
from engine.weights.quantised import unquantised

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_OWN_FIELD = "drafter.path"
"""The key whose heads may be GGUF files."""
_SCALES = ".scales"
"""Ending of the tensor beside a matrix that is stored in codes of 8 bits, as Talon's own heads may be."""


class Checkpoint:
    """A directory with `config.json` and one file of tensors, or a GGUF file, taken out by name until none is left.

    method: the method to train instead, for the fix in each message (`talon train <method>`). field: the key that names
    the directory. source: where the configuration stands. folder: the directory, or the file.
    """

    def __init__(self, path: str, method: str, files: Sequence[str] = WEIGHT_FILES, field: str = _OWN_FIELD):
        self.path, self.method, self.field, self.source = path, method, field, "config.json"
        self.speculator: str | None = None
        """The kind of head in a file of the `speculators` format, None in another layout."""
        self._stored_name: Callable[[str], str] = str
        self.tensors: dict[str, Matrix]
        self.folder = Path(path)
        if field == _OWN_FIELD and Path(path).is_file():
            self.config, self.tensors = llama_cpp.read_head(path, method, field)
            self.source, self._stored_name = "metadata", llama_cpp.stored_name
            return
        folder = self.folder = find_folder(path, field)
        self.config = read_config(folder, field)
        found = [folder / name for name in files if (folder / name).is_file()]
        if not found:
            raise self.error(f"has none of {', '.join(files)}")
        self._file = found[0]
        self.tensors = self._decoded(read_tensors(self._file, field))
        self.speculator = self.config.get(speculators.TYPE)
        if self.speculator is not None:
            self._read_as_public()

    def _read_as_public(self) -> None:
        try:
            self.config = speculators.public_config(self.config, self.tensors)
        except ValueError as problem:
            raise self.error(f"config.json: {problem}") from None
        if self.speculator != self.method:
            raise self.error(f"is a head for method {self.speculator}, not {self.method}")
        self._stored_name = partial(speculators.stored_name, kind=self.speculator)

    def _decoded(self, tensors: dict[str, Tensor]) -> dict[str, Matrix]:
        """Return the tensors, with the bfloat16 values of matrices that are stored in codes of 8 bits (`coded`)."""
        for name in [name for name in tensors if name.endswith(_SCALES)]:
            scales, codes = tensors.pop(name), tensors.get(name.removesuffix(_SCALES))
            if codes is None or codes.dtype != torch.int8 or scales.dtype not in (torch.float16, torch.float32):
                raise self.error(f"tensor {name} belongs to no codes of 8 bits")
            try:
                tensors[name.removesuffix(_SCALES)] = values_of(codes, scales)
            except ValueError:
                raise self.error(
                    f"tensor {name} has shape {list(scales.shape)}, its codes {list(codes.shape)}"
                ) from None
        return {**tensors}

    def codes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Read the codes of 8 bits and the scales of the matrices that a folder's file holds so; `tensors` has their
        values.
        """
        stored = read_tensors(self._file, self.field)
        matrices = [name.removesuffix(_SCALES) for name in stored if name.endswith(_SCALES)]
        return {name: (stored[name], stored[name + _SCALES]) for name in matrices}

    def number(self, key: str, default: int | None = None) -> int:
        """Return a size or count from the config."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.error(f"{self.source}: {key}={value!r} is not a positive count")
        return value

    def has(self, name: str) -> bool:
        """Return whether the tensor `name` of the public layout is there."""
        return self._stored_name(name) in self.tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Take the tensor `name`, which must have `shape`."""
        return numbers(self.take_matrix(name, *shape))

    def take_matrix(self, name: str, *shape: int) -> Matrix:
        """Take the tensor `name`, which must have `shape` and may stay in the file."""
        name = self._stored_name(name)
        if name not in self.tensors:
            raise self.error(f"tensor {name} is missing")
        tensor = self.tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise self.error(f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        return tensor

    def take_optional(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if self.has(name) else None

    def optional_matrix(self, name: str, *shape: int) -> Matrix | None:
        return self.take_matrix(name, *shape) if self.has(name) else None

    def tensors_for(self, device: torch.device, dtype: torch.dtype) -> HeadTensors:
        """Return what takes tensors for a head on that device."""
        return HeadTensors(self.take, self.take_matrix, Joins(device, dtype))

    def target_ids(self, draft_vocab: int, vocab: int) -> Tensor:
        """Take [draft_vocab] int64, the target's ids of the outputs: offsets in `d2t`, checked against `t2d`."""
        if draft_vocab == vocab and "d2t" not in self.tensors:
            return torch.arange(vocab)
        ids = self.take("d2t", draft_vocab).long() + torch.arange(draft_vocab)
        drafted = self.take("t2d", vocab).bool()
        inside = bool(((ids >= 0) & (ids < vocab)).all())
        if (
            not inside
            or len(set(ids.tolist())) != draft_vocab
            or int(drafted.sum()) != draft_vocab
            or not drafted[ids].all()
        ):
            raise self.error("tensors d2t and t2d do not describe the same tokens")
        return ids

    def ignore(self, suffix: str) -> None:
        """Drop tensors that published files carry but that hold no weights, such as cached rotary frequencies."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not name.endswith(suffix)}

    def finish(self) -> None:
        """Refuse leftover tensors: a head that was read only in part would draft wrongly."""
        if self.tensors:
            raise self.error(f"tensor {min(self.tensors)} is not part of the {self.method} layout")

    def match(self, what: str, mine: int, target: int) -> None:
        if mine != target:
            raise DrafterMismatch(
                f"drafter {what} {mine} != target {what} {target} ({self.field}={self.path}): "
                f'train a head for it with "talon train {self.method}", or use a method without one: suffix'
            )

    def error(self, problem: str) -> ModelError:
        return ModelError(
            f"{self.field}={self.path}: {problem}: give a checkpoint in the public {self.method} layout, "
            f'or train one with "talon train {self.method}"'
        )


def coded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with each matrix of floats as codes of 8 bits and `NAME.scales`, one of 32 inputs, where its
    inputs are a multiple of 32: half the bytes, and what a CPU makes of the matrices anyway
    (`drafters.heads.layers.Linear`).
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point() and tensor.shape[1] % STEP == 0:
            codes, scales = nearest_codes(tensor)
            stored |= {name: codes, name + _SCALES: scales}
        else:
            stored[name] = tensor
    return stored


@dataclass(frozen=True)
class TargetWeights:
    """What a head borrows from the target. embedding: [vocab, hidden]. lm_head: [vocab, hidden], the
    embedding if tied.
    """

    embedding: Matrix
    lm_head: Matrix
    layers: int

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @classmethod
    def read(cls, path: str) -> TargetWeights:
        """Read the two tensors, and only those, from the target's (possibly sharded) files."""
        folder = unquantised(find_folder(path, "model"))
        config = read_config(folder, "model")
        config = config.get("text_config", config)
        embedding: Matrix | None
        lm_head: Matrix | None
        if (gguf := open_gguf(folder)) is not None:
            embedding, lm_head = _stored(gguf, "token_embd.weight"), _stored(gguf, "output.weight")
        else:
            embedding = _find_tensor(folder, path, "embed_tokens.weight")
            lm_head = _find_tensor(folder, path, "lm_head.weight")
        if embedding is None:
            raise ModelError(f"model={path}: no tensor named *embed_tokens.weight; draft heads need its embeddings")
        if lm_head is None and not config.get("tie_word_embeddings", True):  # transformers' default
            raise ModelError(
                f"model={path}: no tensor named lm_head.weight; the directory is incomplete, copy it again"
            )
        return cls(embedding, embedding if lm_head is None else lm_head, int(config["num_hidden_layers"]))


def find_folder(path: str, field: str) -> Path:
    """Return the directory itself, or the cached snapshot of a hub id."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise ModelError(
            f'{field}={path}: no such directory, and not in the hub cache: check the path or run "hf download {path}"'
            + suggestion(path)
        ) from None


def read_config(folder: Path, field: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{field}={folder}: config.json cannot be read ({error}): copy the directory again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{field}={folder}: config.json does not hold an object: copy the directory again")
    return config


def read_tensors(file: Path, field: str) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors file or of a pickle that holds nothing but tensors."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                # The tensors are copied out of the mapped file, which somebody may cut.
                return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (not a dict)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        raise ModelError(f"{field}={file}: cannot be read ({first_line(error)}): copy the file again") from None
    except Exception as error:
        raise ModelError(
            f"{field}={file}: is not a plain file of tensors ({type(error).__name__}): convert it to safetensors"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{field}={file}: holds more than named tensors: convert it to safetensors")
    return tensors


def _stored(gguf: GgufFile, name: str) -> Matrix | None:
    """Return a matrix of the file; None if there is none of that name."""
    if (tensor := gguf.tensor(name)) is None:
        return None
    if (matrix := file_matrix(gguf, tensor)) is not None:
        return matrix
    return StoredMatrix.of(tensor.kind.name, gguf.read(tensor), tensor.shape[0]).values()


def _find_tensor(folder: Path, path: str, suffix: str) -> Tensor | None:
    """Return the one tensor whose name ends in `suffix`."""
    for index in sorted(folder.glob("*.index.json")):
        for name, file in json.loads(index.read_text(encoding="utf8"))["weight_map"].items():
            if name.endswith(suffix):
                return _read_one(folder / file, name)
        return None
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError(f"model={path}: no safetensors or pytorch_model.bin in this directory: copy it again")
    for file in files:
        if (tensor := _read_one(file, suffix)) is not None:
            return tensor
    return None


def _read_one(file: Path, suffix: str) -> Tensor | None:
    if file.suffix != ".safetensors":
        tensors = read_tensors(file, "model")
        return next((tensor for name, tensor in tensors.items() if name.endswith(suffix)), None)
    try:
        with safe_open(file, framework="pt") as opened:
            name = next((name for name in opened.keys() if name.endswith(suffix)), None)  # noqa: SIM118
            return None if name is None else opened.get_tensor(name).clone()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model={file}: cannot be read ({error}): copy the file again") from None
