"""The matrices that heads multiply with and look rows up in: numbers, or what a GGUF file stores.

On a CPU a file's matrix is packed in the file's own bits: a draft step over a few rows takes as long as reading its
matrices. A table of embeddings stays in the file, where the rows of a few tokens are read when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.gemm.matmul import gate_and_up
from engine.kernels.quant.layouts import has_layout, layout_of
from engine.kernels.quant.nearest import nearest
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.header import GgufTensor


@dataclass(frozen=True)
class FileMatrix:
    """A matrix [outputs, inputs] of a GGUF file in codes, read when it is asked for. order: the row of the file that
    each output is; None if they are the same.
    """

    file: GgufFile
    tensor: GgufTensor
    order: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[1] if self.order is None else len(self.order), self.tensor.shape[0]

    def reordered(self, order: Tensor) -> FileMatrix:
        """Return the matrix whose output i is output `order[i]` of this one."""
        rows = order.numpy()
        return replace(self, order=rows if self.order is None else self.order[rows])

    def stored(self) -> StoredMatrix:
        """Read all of it."""
        whole = StoredMatrix.of(self.tensor.kind.name, self.file.read(self.tensor), self.tensor.shape[0])
        return whole if self.order is None else whole.reordered(self.order)

    def numbers(self) -> Tensor:
        """Return [outputs, inputs] bfloat16."""
        return self.stored().values()

    def rows(self, outputs: Tensor) -> Tensor:
        """Return [n, inputs] bfloat16: these outputs alone, read from the file now."""
        few, places = np.unique(outputs.numpy() if self.order is None else self.order[outputs], return_inverse=True)
        return StoredMatrix(self.tensor.kind.name, self.file.read_rows(self.tensor, few.tolist())).rows(places)


Matrix: TypeAlias = "Tensor | FileMatrix"
Multiplied: TypeAlias = "Tensor | list[StoredMatrix]"
"""What `Linear` multiplies with: numbers on the head's device, or parts whose outputs lie one after the other."""


def file_matrix(file: GgufFile, tensor: GgufTensor) -> FileMatrix | None:
    """Return the matrix that this tensor is, None if it is none that is packed in its own bits."""
    kind = tensor.kind.name
    coded = len(tensor.shape) == 2 and has_layout(kind) and layout_of(kind).coded
    return FileMatrix(file, tensor) if coded else None


def numbers(matrix: Matrix) -> Tensor:
    """Return the matrix as numbers."""
    return matrix if isinstance(matrix, Tensor) else matrix.numbers()


def rows_of(matrix: Matrix, outputs: Tensor) -> Tensor:
    """Return [n, inputs] these outputs, where the matrix lies."""
    if isinstance(matrix, Tensor):
        return matrix.index_select(0, outputs.to(matrix.device))
    return matrix.rows(outputs.cpu())


def some_of(matrix: Matrix, outputs: Tensor) -> Matrix:
    """Return the matrix of these outputs, on the CPU."""
    return matrix[outputs] if isinstance(matrix, Tensor) else matrix.reordered(outputs)


@dataclass(frozen=True)
class Joins:
    """Joins matrices of the same inputs to what `Linear` takes, on the head's device and in its type."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, *parts: Matrix, gated: bool = False) -> Multiplied:
        """Return the matrix of all outputs. gated: the parts are a gate and an up projection."""
        packed = self.device.type == "cpu" and self.dtype == torch.bfloat16
        if packed and any(isinstance(part, FileMatrix) for part in parts):
            stored = [part.stored() if isinstance(part, FileMatrix) else nearest(part) for part in parts]
            if all(part.shape[0] % LANES == 0 for part in stored) and (not gated or gate_and_up(stored)):
                return stored
        whole = [numbers(part).to(self.device, self.dtype) for part in parts]
        return whole[0] if len(whole) == 1 else torch.cat(whole)

    def table(self, matrix: Matrix) -> Matrix:
        """Return a matrix whose rows are looked up: on a CPU it stays in the file."""
        if isinstance(matrix, FileMatrix) and self.device.type == "cpu":
            return matrix
        return numbers(matrix).to(self.device, self.dtype)


@dataclass(frozen=True)
class HeadTensors:
    """A checkpoint's tensors of names that begin with `prefix`, as a head computes with them. take: returns the tensor
    of a name and shape; take_matrix: the same, which may stay in the file.
    """

    take: Callable[..., Tensor]
    take_matrix: Callable[..., Matrix]
    joined: Joins
    prefix: str = ""

    def under(self, prefix: str) -> HeadTensors:
        """Return the tensors of names that also begin with this."""
        return replace(self, prefix=self.prefix + prefix)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Take a tensor as numbers on the head's device."""
        return self.take(self.prefix + name, *shape).to(self.joined.device, self.joined.dtype)

    def matrix(self, name: str, outputs: int, inputs: int) -> Multiplied:
        """Take a matrix."""
        return self.matrices({name: outputs}, inputs)

    def matrices(self, outputs: dict[str, int], inputs: int, gated: bool = False) -> Multiplied:
        """Take the matrices of these names and numbers of outputs, one after the other."""
        found = [self.take_matrix(self.prefix + name, count, inputs) for name, count in outputs.items()]
        return self.joined(*found, gated=gated)


def last_outputs(weight: Multiplied, parts: int, outputs: int) -> Multiplied:
    """Return the last `parts` parts, which have so many outputs together."""
    return weight[-outputs:].contiguous() if isinstance(weight, Tensor) else weight[-parts:]


def split_inputs(weight: Multiplied, width: int) -> tuple[Multiplied, Multiplied]:
    """Return the matrix of the first `width` inputs, and of the others."""
    if not isinstance(weight, Tensor):
        inputs = weight[0].shape[1]
        try:
            return [part.input_slice(0, width) for part in weight], [part.input_slice(width, inputs) for part in weight]
        except ValueError:  # blocks have inputs of both
            weight = as_numbers(weight)
    return weight[:, :width].contiguous(), weight[:, width:].contiguous()


def as_numbers(weight: Multiplied | Sequence[StoredMatrix]) -> Tensor:
    """Return [outputs, inputs] numbers."""
    return weight if isinstance(weight, Tensor) else torch.cat([part.values() for part in weight])
