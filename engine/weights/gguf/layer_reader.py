"""Finds the parameters of one layer in a GGUF file that holds them in another way than transformers' tables say."""

from __future__ import annotations

import torch
from gguf import dequantize
from torch import Tensor

from engine.core.errors import ModelError
from engine.weights.gguf.file import GgufFile
from engine.weights.stored_weights import Place, Unreadable


class LayerReader:
    """places, vectors: of the parameters that were found; read: the tensors that hold them. prefix, block: before the
    names of parameters and of tensors. Methods raise Unreadable if a tensor is not there.
    """

    def __init__(self, file: GgufFile, prefix: str, block: str):
        self.file, self.prefix, self.block = file, prefix, block
        self.places: dict[str, Place] = {}
        self.vectors: dict[str, Tensor] = {}
        self.read: set[str] = set()

    def decay(self, heads: int) -> Tensor:
        """Return minus the exponential of transformers' `A_log`, [heads]."""
        decay = self.numbers("ssm_a", heads)
        if not bool((decay < 0).all()):
            raise ModelError(f"{self.file.field}: tensor {self.block}ssm_a is not negative; get the file again")
        return decay

    def numbers(self, name: str, count: int) -> Tensor:
        """Return a tensor as float32, [count, ...], or [count] if it has so many numbers: llama.cpp's tools drop last
        dimensions of one.
        """
        stored = self.found(name, None)
        tensor = self.file.tensor(stored)
        assert tensor is not None
        values = torch.from_numpy(dequantize(self.file.read(tensor), tensor.kind).copy()).view(tensor.shape[::-1])
        values = values.flatten() if values.numel() == count else values
        if len(values) != count:
            raise Unreadable(f"{stored} is stored in another shape")
        if not values.isfinite().all():
            raise ModelError(f"{self.file.field}: tensor {stored} holds NaN or infinity; get the file again")
        return values

    def found(self, name: str, shape: tuple[int, ...] | None) -> str:
        """Return the whole name of a tensor, which is noted as read."""
        tensor = self.file.tensor(stored := f"{self.block}{name}")
        if tensor is None:
            raise Unreadable(f"{stored} is not in the file")
        if shape is not None and tensor.shape != shape:
            raise Unreadable(f"{stored} is stored in another shape")
        self.read.add(stored)
        return stored
