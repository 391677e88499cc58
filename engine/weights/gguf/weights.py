"""The parameters of a model whose weights lie in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.core.errors import ModelError
from engine.kernels.quant.layouts import has_layout
from engine.kernels.quant.stored import StoredMatrix
from engine.weights.gguf.file import GgufFile
from engine.weights.stored_weights import Place, StoredWeights


class GgufWeights(StoredWeights):
    """The parameters of a model in a GGUF file. places, vectors: of `gguf.families.located`, or what an earlier start
    has kept of them.
    """

    def __init__(self, gguf: GgufFile, places: Mapping[str, Place], vectors: Mapping[str, Tensor]):
        super().__init__(gguf.packed_size, gguf.kind.lower(), places, vectors)
        self.gguf = gguf
        self._tensors = {tensor.name: tensor for tensor in gguf.tensors}

    def rows(self, tensor: str) -> StoredMatrix:
        found = self._tensors[tensor]
        return self._multiplied(tensor, StoredMatrix.of(found.kind.name, self.gguf.read(found), found.shape[0]))

    def some_rows(self, tensor: str, rows: NDArray[np.int64]) -> StoredMatrix:
        """Return these rows of a stored matrix, read from the file now."""
        found = self._tensors[tensor]
        return self._multiplied(tensor, StoredMatrix(found.kind.name, self.gguf.read_rows(found, rows.tolist())))

    def numbers(self, tensor: str, rows: NDArray[np.int64]) -> Tensor:
        """Return [rows, inputs] bfloat16: these rows of a stored matrix of any type, read from the file now."""
        found = self._tensors[tensor]
        return StoredMatrix(found.kind.name, self.gguf.read_rows(found, rows.tolist())).rows(np.arange(len(rows)))

    def _multiplied(self, tensor: str, matrix: StoredMatrix) -> StoredMatrix:
        """Return the matrix in a type that is packed: in its own, or as numbers. Raises ModelError."""
        if has_layout(matrix.kind):
            return matrix
        try:
            return StoredMatrix.of_numbers(matrix.values())
        except NotImplementedError:
            raise ModelError(
                f"{self.gguf.field}: tensor {tensor} is of type {matrix.kind}, which is not read; take "
                "another quantisation of the model"
            ) from None
