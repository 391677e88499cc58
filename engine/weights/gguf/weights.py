"""The parameters of a model whose weights lie in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

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
        matrix = StoredMatrix.of(found.kind.name, self.gguf.read(found), found.shape[0])
        if has_layout(found.kind.name):
            return matrix
        try:
            return StoredMatrix.of_numbers(matrix.values())
        except NotImplementedError:
            raise ModelError(
                f"model={self.gguf.path}: tensor {tensor} is of type {found.kind.name}, which is not read; take "
                "another quantisation of the model"
            ) from None
