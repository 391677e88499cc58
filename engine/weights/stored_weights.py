"""The parameters of a model by their names, read one at a time from where they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from engine.kernels.quant.stored import StoredMatrix

OWN = "file:"
"""Precedes the name of a parameter as the file holds it, where that differs from what the stock model has."""


class Unreadable(Exception):
    """A parameter is stored in a way that is not read here, but perhaps by transformers."""


class Place(msgspec.Struct, frozen=True):
    """Where a matrix [outputs, inputs] is stored, or those of all experts [experts, outputs, inputs].

    tensors: names; a matrix's outputs are those of each, one after the other. in_turn: the parameter has inputs before
    outputs, and the outputs of its tensors in turn. shape: of the parameter. order, columns: int64, the
    stored row that each output is and the stored column that each input is; empty if they are the same. heads: the
    parameter has some outputs of each in turn, those of the first tensor, which has its inputs before its outputs, then
    those of the second; 0: it does not.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    order: bytes = b""
    columns: bytes = b""
    in_turn: bool = False
    heads: int = 0

    @property
    def outputs(self) -> int:
        """The number of outputs of all tensors."""
        return self.shape[-1] if self.in_turn else self.shape[-2]


class StoredWeights(ABC):
    """size: bytes of all matrices as they are multiplied. kind: the type of most weights, in lower case. places: of
    matrices. vectors: all other parameters, bfloat16, or float32 where the file holds numbers that need it.
    """

    def __init__(self, size: int, kind: str, places: Mapping[str, Place], vectors: Mapping[str, Tensor]):
        self.size, self.kind, self.places, self.vectors = size, kind, places, vectors

    @abstractmethod
    def rows(self, tensor: str) -> StoredMatrix:
        """Return all rows of a stored tensor, in blocks, of all experts one after the other."""

    @property
    def own_vectors(self) -> dict[str, Tensor]:
        """The vectors that a decoder reads: all but those of the stock model that the file holds in another way."""
        return {name: vector for name, vector in self.vectors.items() if OWN + name not in self.vectors}

    def holds(self, name: str) -> bool:
        return name in self.places or name in self.vectors

    def matrix(self, name: str) -> StoredMatrix:
        """Return a matrix [outputs, inputs] in blocks, of a place with one tensor whose columns are the parameter's."""
        place = self.places[name]
        [tensor] = place.tensors
        matrix = self.rows(tensor)
        return matrix.reordered(np.frombuffer(place.order, np.int64)) if place.order else matrix

    def experts(self, name: str, parts: int = 0) -> list[list[StoredMatrix]]:
        """Return, for each expert of a parameter [experts, outputs, inputs], the parts of its matrix, one after the
        other. parts: how the parameter holds them, which does not matter here.
        """
        place = self.places[name]
        count, outputs = place.shape[0], place.outputs
        whole, each = [self.rows(tensor) for tensor in place.tensors], outputs // len(place.tensors)
        return [[rows.row_slice(each * expert, each * (expert + 1)) for rows in whole] for expert in range(count)]

    def vector(self, name: str) -> Tensor:
        """Return a parameter that is no matrix."""
        return self.vectors[name]

    def values(self, name: str) -> Tensor:
        """Return a parameter as the stock model has it: bfloat16, but for vectors that the file holds
        with more bits.
        """
        if name in self.vectors:
            return self.vectors[name]
        place = self.places[name]
        if place.heads:
            first, second = (self.rows(tensor).values().unflatten(0, (place.heads, -1)) for tensor in place.tensors)
            return torch.cat([first.transpose(1, 2), second], dim=1).flatten(0, 1)
        if len(place.shape) == 2:
            whole = torch.cat([self.rows(tensor).values() for tensor in place.tensors])
            whole = whole[torch.frombuffer(bytearray(place.order), dtype=torch.int64)] if place.order else whole
            return whole[:, torch.frombuffer(bytearray(place.columns), dtype=torch.int64)] if place.columns else whole
        each = [self.rows(tensor).values().unflatten(0, (place.shape[0], -1)) for tensor in place.tensors]
        if place.in_turn:
            # A view: with AVX2 alone torch multiplies bfloat16 fifty times as fast if the inputs lie side by side.
            return (each[0] if len(each) == 1 else torch.stack(each, dim=2).flatten(1, 2)).transpose(1, 2)
        return each[0] if len(each) == 1 else torch.cat(each, dim=1)

    def fill_small(self, model: nn.Module) -> None:
        """Put every parameter but matrices into a model on the meta device."""
        self._fill(model, self.vectors)

    def fill(self, model: nn.Module) -> None:
        """Put every parameter into a model on the meta device."""
        self._fill(model, {**self.vectors, **self.places})

    def _fill(self, model: nn.Module, names: Mapping[str, object]) -> None:
        filled: dict[int, nn.Parameter] = {}  # by the parameter on the meta device, which may have several names
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if name not in names:
                continue
            if id(parameter) not in filled:
                filled[id(parameter)] = nn.Parameter(self.values(name), requires_grad=False)
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, filled[id(parameter)])
        for name in [name for name, _ in model.named_buffers() if name in names]:
            module, _, attribute = name.rpartition(".")
            model.get_submodule(module).register_buffer(attribute, self.values(name), persistent=False)


def is_vector(parameter: Tensor) -> bool:
    """Return whether a parameter is no matrix: a convolution of each channel by itself is none."""
    return parameter.dim() < 2 or 1 in parameter.shape[1:-1]


def stored_buffers(model: nn.Module) -> dict[str, list[str]]:
    """Return the buffers that a checkpoint holds, as `named` returns parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: [name] for name in model.state_dict() if name not in parameters}


def held(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of that name."""
    module, _, part = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(module), part)
    return found


def named(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter of a model, by the first."""
    first: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in first.values()}
