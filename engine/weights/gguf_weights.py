"""The parameters of a stock model on the meta device, read from a GGUF file one at a time.

llama.cpp renames tensors, permutes the rows of some and offsets the values of others. What undoes that are the names of
the package `gguf` and transformers' own processors, given the numbers of the rows instead of a matrix: the order of the
rows is then known without moving any. Experts are three tensors a layer, two of which transformers holds as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, dequantize, get_tensor_name_map
from torch import Tensor

from engine.core.errors import ModelError
from engine.kernels.quant.layouts import has_layout
from engine.kernels.quant.stored import StoredMatrix
from engine.weights.gguf_families import processor_of
from engine.weights.gguf_file import GgufFile
from engine.weights.gguf_header import GgufTensor
from engine.weights.stored_weights import StoredWeights, Unreadable

_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Of the parameters that hold the matrices of all experts of a layer: which tensors hold their outputs in turn."""


class GgufWeights(StoredWeights[list[GgufTensor]]):
    """Those of `model`."""

    def __init__(self, gguf: GgufFile, model: Any):
        super().__init__(model.dtype)
        self.gguf, self.size, self.kind = gguf, gguf.size, gguf.kind.lower()
        config = model.config.get_text_config()
        self._processor = processor_of(gguf.architecture, config)
        architecture = next((key for key, name in MODEL_ARCH_NAMES.items() if name == gguf.architecture), None)
        if architecture is None:
            raise Unreadable(f"gguf knows no {gguf.architecture}")
        names = get_tensor_name_map(architecture, config.num_hidden_layers)
        tensors = {tensor.name: tensor for tensor in gguf.tensors}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if found := _find(name, names, tensors):
                self.stored[id(parameter)] = found
        read = {tensor.name for found in self.stored.values() for tensor in found}
        if left := [name for name in tensors if name not in read and not name.startswith("rope_")]:
            raise Unreadable(f"{left[0]} is not of this model")
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.stored:
                raise Unreadable(f"{name} is not in the file")

    def matrix(self, parameter: Tensor) -> StoredMatrix:
        [tensor] = self.stored[id(parameter)]
        outputs, inputs = parameter.shape
        rows = np.arange(outputs)[:, None]
        made = self._processor.process(rows, name=tensor.name)
        if tensor.shape != (inputs, outputs) or made.name is None or made.weights.shape != rows.shape:
            raise Unreadable(f"{tensor.name} is stored in another shape")
        order = np.ascontiguousarray(made.weights[:, 0])
        if not np.array_equal(np.sort(order), rows[:, 0]):
            raise Unreadable(f"{tensor.name} is stored with other values")
        matrix = self._rows_of(tensor)
        return matrix if np.array_equal(order, rows[:, 0]) else matrix.reordered(order)

    def experts(self, parameter: Tensor) -> list[list[StoredMatrix]]:
        count, outputs, inputs = parameter.shape
        parts = self.stored[id(parameter)]
        each = outputs // len(parts)
        if any(tensor.shape != (inputs, each, count) for tensor in parts) or each * len(parts) != outputs:
            raise Unreadable(f"{parts[0].name} is stored in another shape")
        whole = [self._rows_of(tensor) for tensor in parts]
        return [[rows.row_slice(each * expert, each * (expert + 1)) for rows in whole] for expert in range(count)]

    def values(self, parameter: Tensor) -> Tensor:
        if parameter.dim() == 2:
            return self.matrix(parameter).values().to(self.dtype)
        if parameter.dim() == 3:
            experts = self.experts(parameter)
            return torch.stack([torch.cat([part.values() for part in parts]) for parts in experts]).to(self.dtype)
        [tensor] = self.stored[id(parameter)]
        raw = dequantize(self.gguf.read(tensor), tensor.kind).reshape(tensor.shape[::-1])
        made = self._processor.process(raw, name=tensor.name)
        if made.name is None or made.weights.shape != parameter.shape:
            raise Unreadable(f"{tensor.name} is stored in another shape")
        values = torch.from_numpy(np.ascontiguousarray(made.weights)).to(self.dtype)
        if not values.isfinite().all():
            raise ModelError(f"model={self.gguf.path}: tensor {tensor.name} holds NaN or infinity; get the file again")
        return values

    def _rows_of(self, tensor: GgufTensor) -> StoredMatrix:
        """The tensor's rows, of all experts one after the other."""
        matrix = StoredMatrix.of(tensor.kind.name, self.gguf.read(tensor), tensor.shape[0])
        if has_layout(tensor.kind.name):
            return matrix
        try:
            return StoredMatrix.of_numbers(matrix.values())
        except NotImplementedError:
            raise ModelError(
                f"model={self.gguf.path}: tensor {tensor.name} is of type {tensor.kind.name}, which is not read; take "
                "another quantisation of the model"
            ) from None


def _find(name: str, names: TensorNameMap, tensors: Mapping[str, GgufTensor]) -> list[GgufTensor]:
    """The tensors that hold a parameter, in their order; none if one of them is not there."""
    module, _, suffix = name.rpartition(".")
    sought = [f"{names.get_name(module)}.{suffix}"]
    if module.endswith(".experts"):
        sought = [f"{names.get_name(f'{module}.{part}')}.weight" for part in _EXPERTS.get(suffix, ())]
    return [tensors[stored] for stored in sought] if sought and all(stored in tensors for stored in sought) else []
