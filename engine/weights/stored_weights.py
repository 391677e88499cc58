"""The parameters of a stock model on the meta device, read one at a time from where they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from engine.kernels.quant.stored import StoredMatrix

Stored = TypeVar("Stored")


class Unreadable(Exception):
    """A parameter is stored in a way that is not read here, but perhaps by transformers."""


class StoredWeights(ABC, Generic[Stored]):
    """The model's parameters, known by identity, are those that the methods take. dtype: the model's.

    size: bytes of all matrices as they are multiplied. kind: the type of most weights, in lower case. stored: where
    each parameter is, by its id.
    """

    size: int
    kind: str

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.stored: dict[int, Stored] = {}

    @abstractmethod
    def matrix(self, parameter: Tensor) -> StoredMatrix:
        """A matrix [outputs, inputs] in blocks."""

    def experts(self, parameter: Tensor) -> list[list[StoredMatrix]]:
        """For each expert of a parameter [experts, outputs, inputs], the parts of its matrix, one after the other."""
        raise Unreadable("experts are read from GGUF files alone")

    @abstractmethod
    def values(self, parameter: Tensor) -> Tensor:
        """A parameter in the model's type."""

    def fill_small(self, model: nn.Module) -> None:
        """Read every parameter but matrices into the model."""
        self._fill(model, matrices=False)

    def fill(self, model: nn.Module) -> None:
        """Read every parameter into the model."""
        self._fill(model, matrices=True)

    def _fill(self, model: nn.Module, matrices: bool) -> None:
        filled: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() >= 2 and not matrices:
                    continue
                if (made := filled.get(id(parameter))) is None:
                    made = filled[id(parameter)] = nn.Parameter(self.values(parameter), requires_grad=False)
                    self.stored[id(made)] = self.stored[id(parameter)]
                setattr(module, name, made)
