"""A checkpoint's matrices in blocks, quantised when they are read: `weights: q8_0` and others in the configuration.

The matrices of layers and experts, the embedding and the output matrix are quantised; vectors stay numbers, and so do
matrices that choose experts and those whose rows are not whole blocks. A part of a matrix is in memory as numbers at a
time. Of a checkpoint whose experts are packed, these are taken as they are, and all else stays numbers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
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
from engine.weights.checkpoint_names import joined_tensors
from engine.weights.packed_experts import KIND, is_part, numbers_of, packed_place, packed_rows
from engine.weights.quantised import PACKED, QuantisedSource, quantised_source_of
from engine.weights.stored_weights import Place, StoredWeights, Unreadable, held, is_vector, named, stored_buffers

_AT_ONCE = 1 << 18  # numbers that a thread quantises at a time
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.")
"""In the names of matrices that choose experts."""


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
            prod(tensor.shape[:-1]) * row_bytes(self.kind_of(tensor), tensor.shape[-1])
            for tensor in self.tensors.values()
            if len(tensor.shape) > 1 and tensor.kind != CODES and 1 not in tensor.shape[1:-1]
        )

    @property
    def packed(self) -> bool:
        """Whether its experts are packed, and nothing else is quantised."""
        return self.kind == KIND

    def tensors_of(self, name: str) -> list[CheckpointTensor]:
        """Return the tensor of a name, or those of all experts if `*` stands in the place of an expert's number."""
        if "*" not in name:
            return [self.tensors[name]]
        names = (name.replace("*", str(expert)) for expert in itertools.count())
        return [self.tensors[one] for one in itertools.takewhile(self.tensors.__contains__, names)]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of what `tensors_of` returns, as one tensor; () if the experts' are not alike."""
        tensors = self.tensors_of(name)
        if "*" not in name:
            return tensors[0].shape
        alike = len({tensor.shape for tensor in tensors}) == 1
        return (len(tensors), *tensors[0].shape) if alike else ()

    def kind_of(self, tensor: CheckpointTensor) -> str:
        """Return the type that a matrix gets."""
        return "BF16" if self.packed or tensor.shape[-1] % STEP or _ROUTER.search(tensor.name) else self.kind

    def matrix(self, tensor: CheckpointTensor) -> StoredMatrix:
        """Return [outputs, inputs] in blocks, those of all experts one after the other. Raises ModelError if the matrix
        holds NaN or infinity.
        """
        outputs, inputs, kind = prod(tensor.shape[:-1]), tensor.shape[-1], self.kind_of(tensor)
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
        matrices = [self.checkpoint.matrix(one) for one in self.checkpoint.tensors_of(tensor)]
        if len(matrices) == 1:
            return matrices[0]
        return StoredMatrix(matrices[0].kind, np.concatenate([matrix.raw for matrix in matrices]))

    def experts(self, name: str, parts: int = 0) -> list[list[StoredMatrix]]:
        if parts and not self.places[name].in_turn:
            raise Unreadable("the experts' inputs lie before their outputs, so their rows are not blocks")
        return super().experts(name, parts)


def matched(checkpoint: QuantisedCheckpoint, model: Any) -> tuple[dict[str, Place], dict[str, Tensor]]:
    """Return where the matrices of a stock model on the meta device are, and the values of its other parameters, by
    name. Raises Unreadable if the checkpoint does not hold them, or in another order.
    """
    joined = joined_tensors(model, checkpoint.tensors)
    places: dict[str, Place] = {}
    vectors: dict[str, Tensor] = {}
    for first, same in (named(model) | stored_buffers(model)).items():
        parameter = held(model, first)
        if (packed := packed_place(first, tuple(parameter.shape), checkpoint.tensors)) is not None:
            places |= dict.fromkeys(same, packed)
            continue
        parts = next((joined[name] for name in same if name in joined), ())
        if not parts or (parameter.dim() == 2 and len(parts) > 1):
            raise Unreadable(f"{first} is not stored under its name")
        if is_vector(parameter) or first.endswith("_bias"):  # of all experts
            values = [_numbers(checkpoint.tensors[part]) for part in parts]
            value = values[0] if len(values) == 1 else torch.cat(values)
            vectors |= dict.fromkeys(same, value)
            fits = value.shape == parameter.shape
        else:
            *before, outputs, inputs = parameter.shape
            places |= dict.fromkeys(same, Place(parts, tuple(parameter.shape)))
            fits = all(checkpoint.shape_of(part) == (*before, outputs / len(parts), inputs) for part in parts)
        if not fits:
            raise Unreadable(f"{first} is stored in another shape")
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
