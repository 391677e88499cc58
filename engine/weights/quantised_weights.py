"""A checkpoint's matrices in blocks, quantised when they are read: `weights: q8_0` and others in the configuration.

The matrices of layers, the embedding and the output matrix are quantised; vectors stay numbers, and so do matrices
whose rows are not whole blocks. A part of a matrix is in memory as numbers at a time. Of a checkpoint whose experts
are packed, these are taken as they are, and all else stays numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.errors import ModelError
from engine.kernels.quant.layouts import STEP
from engine.kernels.quant.quantise import quantised
from engine.kernels.quant.stored import StoredMatrix, row_bytes
from engine.weights.checkpoint import CODES, NUMBERS, CheckpointTensor, read_checkpoint
from engine.weights.packed_experts import KIND, is_part, numbers_of, packed_place, packed_rows
from engine.weights.quantised import PACKED, QuantisedSource, quantised_source_of
from engine.weights.stored_weights import Place, StoredWeights, Unreadable, held, is_vector, named, stored_buffers

_AT_ONCE = 1 << 18  # numbers that a thread quantises at a time
_RENAMED = (("model.", "backbone."), (".self_attn.g_proj.", ".self_attn.gate_proj."), ("lm_head.", "embed_out."))
"""Parts of parameters' names, and what some families' tensors have in their place: Nemotron-H, LFM3, GPT-NeoX."""


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """A checkpoint whose matrices are quantised when they are read. folder: of the checkpoint. kind: the GGUF type that
    its matrices get, such as Q8_0, or the one that its experts have.
    """

    folder: Path
    kind: str
    tensors: dict[str, CheckpointTensor]

    @property
    def elements(self) -> int:
        return sum(numbers_of(one) if one.kind == CODES else one.elements for one in self.tensors.values())

    @property
    def size(self) -> int:
        """The bytes of all matrices in blocks."""
        packed = sum(tensor.elements for tensor in self.tensors.values() if tensor.kind == CODES)
        return packed + sum(
            tensor.shape[0] * row_bytes(self.kind_of(tensor), tensor.shape[1]) if len(tensor.shape) == 2 else 0
            for tensor in self.tensors.values()
        )

    @property
    def packed(self) -> bool:
        """Whether its experts are packed, and nothing else is quantised."""
        return self.kind == KIND

    def kind_of(self, tensor: CheckpointTensor) -> str:
        """Return the type that a matrix gets."""
        return "BF16" if self.packed or tensor.shape[1] % STEP else self.kind

    def matrix(self, tensor: CheckpointTensor) -> StoredMatrix:
        """Return [outputs, inputs] in blocks. Raises ModelError if the matrix holds NaN or infinity."""
        (outputs, inputs), kind = tensor.shape, self.kind_of(tensor)
        raw = np.empty((outputs, row_bytes(kind, inputs)), np.uint8)
        step = max(1, _AT_ONCE // inputs)

        def quantise_some(start: int) -> None:
            some = raw[start : start + step]
            numbers = _finite(tensor, start * inputs, len(some) * inputs).reshape(-1, inputs)
            some[:] = _rounded(numbers) if kind == "BF16" else quantised(numbers, kind)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for _ in threads.map(quantise_some, range(0, outputs, step)):
                pass
        return StoredMatrix(kind, raw)


class QuantisedWeights(StoredWeights):
    """The parameters of a checkpoint that is quantised as it loads. `places` and `vectors` come from `matched` or from
    an earlier start's proof.
    """

    def __init__(self, checkpoint: QuantisedCheckpoint, places: Mapping[str, Place], vectors: Mapping[str, Tensor]):
        super().__init__(checkpoint.size, checkpoint.kind.lower(), places, vectors)
        self.checkpoint = checkpoint

    def rows(self, tensor: str) -> StoredMatrix:
        if is_part(tensor):
            return packed_rows(tensor, self.checkpoint.tensors)
        return self.checkpoint.matrix(self.checkpoint.tensors[tensor])

    def experts(self, name: str, parts: int = 0) -> list[list[StoredMatrix]]:
        if not is_part(self.places[name].tensors[0]):
            raise Unreadable("experts are read from GGUF files, or packed as MXFP4")
        return super().experts(name, parts)

    def values(self, name: str) -> Tensor:
        if name in self.vectors or len(self.places[name].shape) == 2 or is_part(self.places[name].tensors[0]):
            return super().values(name)
        [tensor] = self.places[name].tensors
        return _numbers(self.checkpoint.tensors[tensor])


def matched(checkpoint: QuantisedCheckpoint, model: Any) -> tuple[dict[str, Place], dict[str, Tensor]]:
    """Return where the matrices of a stock model on the meta device are, and the values of its other parameters, by
    name: the parameters have the names of the checkpoint's tensors, but for how they may begin. Raises Unreadable
    otherwise.
    """
    places: dict[str, Place] = {}
    vectors: dict[str, Tensor] = {}
    for first, same in (named(model) | stored_buffers(model)).items():
        parameter = held(model, first)
        if (packed := packed_place(first, tuple(parameter.shape), checkpoint.tensors)) is not None:
            places |= dict.fromkeys(same, packed)
            continue
        stored = [*same, *(name.replace(*renamed, 1) for renamed in _RENAMED for name in same)]
        name = next((name for name in stored if name in checkpoint.tensors), None)
        if name is None:
            raise Unreadable(f"{first} is not stored under its name")
        tensor = checkpoint.tensors[name]
        if tensor.shape != tuple(parameter.shape):
            raise Unreadable(f"{name} is stored in another shape")
        if is_vector(parameter) or name.endswith("_bias"):  # of all experts
            vectors |= dict.fromkeys(same, _numbers(tensor))
        else:
            places |= dict.fromkeys(same, Place((name,), tuple(tensor.shape)))
    return places, vectors


def _numbers(tensor: CheckpointTensor) -> Tensor:
    """Return the tensor as bfloat16."""
    return torch.from_numpy(_finite(tensor, 0, tensor.elements)).view(tensor.shape).to(torch.bfloat16)


def _finite(tensor: CheckpointTensor, first: int, count: int) -> NDArray[np.float32]:
    numbers = tensor.numbers(first, count)
    if not np.isfinite(numbers).all():
        raise ModelError(f"model={tensor.path}: tensor {tensor.name} holds NaN or infinity; get the file again")
    return numbers


def _rounded(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return [rows, bytes]: bfloat16."""
    return StoredMatrix.of_numbers(torch.from_numpy(numbers)).raw


def open_quantised(folder: Path) -> QuantisedCheckpoint | None:
    """Open the checkpoint of a directory that `engine.weights.quantised` has made; None if it is another directory.

    Raises ModelError if the checkpoint is gone, or not what it was then.
    """
    if (source := quantised_source_of(folder)) is None:
        return None
    checkpoint = Path(source.checkpoint)
    if not checkpoint.is_dir():
        raise ModelError(f"model={folder}: its checkpoint {checkpoint} is gone; put it back, or name another model")
    if QuantisedSource.of(checkpoint, source.weights) != source:
        raise ModelError(
            f"model={folder}: its checkpoint has changed; name the checkpoint itself: model={checkpoint} and "
            f"weights={source.weights}"
        )
    kinds = (*NUMBERS, CODES) if source.weights == PACKED else NUMBERS
    tensors = read_checkpoint(checkpoint, f"model={checkpoint}", kinds)
    return QuantisedCheckpoint(checkpoint, source.weights.upper(), tensors)
