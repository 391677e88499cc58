"""A matrix as a GGUF file stores it: rows of blocks, which are read where they lie and only when they are needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.quant.dequantise import dequantise
from engine.kernels.quant.layouts import Bytes, QuantLayout, has_layout, layout_of

_AT_ONCE = 1 << 20  # weights that a thread dequantises together, which bounds the memory


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [outputs, inputs]. kind: the GGUF type's name. raw: [rows, row bytes] uint8, possibly memory-mapped.
    order: the row of `raw` that each output is; None if they are the same.
    """

    kind: str
    raw: Bytes
    order: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, kind: str, raw: NDArray[Any], inputs: int) -> StoredMatrix:
        """Return the matrix that these bytes hold, of any shape. Raises ValueError if they are not whole rows of it."""
        flat, row = raw.reshape(-1).view(np.uint8), row_bytes(kind, inputs)
        if flat.size % row:
            raise ValueError(f"{flat.size} bytes are not rows of {row}")
        return cls(kind, flat.reshape(-1, row))

    @classmethod
    def of_numbers(cls, weight: Tensor) -> StoredMatrix:
        """Return the matrix of these numbers as bfloat16, without a copy if they are."""
        return cls("BF16", weight.detach().to(torch.bfloat16).contiguous().view(torch.uint8).numpy())

    @property
    def shape(self) -> tuple[int, int]:
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return len(self.raw if self.order is None else self.order), self.raw.shape[1] // size * numbers

    @property
    def layout(self) -> QuantLayout:
        """The layout that it is packed in. Raises KeyError if its type has none."""
        return layout_of(self.kind)

    def reordered(self, order: NDArray[np.int64]) -> StoredMatrix:
        """Return the matrix whose output i is output `order[i]` of this one."""
        return StoredMatrix(self.kind, self.raw, order if self.order is None else self.order[order])

    def row_slice(self, start: int, stop: int) -> StoredMatrix:
        """Return some outputs, without a copy where they lie together."""
        if self.order is not None:
            return StoredMatrix(self.kind, self.raw, self.order[start:stop])
        return StoredMatrix(self.kind, self.raw[start:stop])

    def input_slice(self, start: int, stop: int) -> StoredMatrix:
        """Return the matrix of some inputs. Raises ValueError if they are not whole blocks."""
        raw = self.raw[:, row_bytes(self.kind, start) : row_bytes(self.kind, stop)]
        return StoredMatrix(self.kind, np.ascontiguousarray(raw), self.order)

    def bytes_of_rows(self) -> Bytes:
        """Return [outputs, row bytes]."""
        return self.raw if self.order is None else self.raw[self.order]

    def rows(self, indices: NDArray[np.int64] | Tensor) -> Tensor:
        """Return [indices, inputs] bfloat16: these outputs, rounded once from the file's numbers."""
        at = np.asarray(indices)
        made = np.empty((len(at), self.shape[1]), np.uint16)
        _fill(made, self.raw[at if self.order is None else self.order[at]], self.kind)
        return torch.from_numpy(made).view(torch.bfloat16)

    def values(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return [outputs, inputs] bfloat16, or the file's numbers as float32."""
        outputs, inputs = self.shape
        step = max(1, _AT_ONCE // inputs)
        wide = dtype == torch.float32
        # threads may not write to tensors of inference mode
        made = np.empty((outputs, inputs), np.float32 if wide else np.uint16)

        def make_some(start: int) -> None:
            _fill(made[start : start + step], self.row_slice(start, start + step).bytes_of_rows(), self.kind)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for _ in threads.map(make_some, range(0, outputs, step)):
                pass
        return torch.from_numpy(made).view(dtype)


def row_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of a row of `inputs` numbers of that type. Raises ValueError if they are not whole blocks."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if inputs % numbers:
        raise ValueError(f"{inputs} inputs are not blocks of {numbers}")
    size_of_row: int = inputs // numbers * size
    return size_of_row


def _fill(made: NDArray[Any], raw: Bytes, kind: str) -> None:
    """Fill `made` [rows, inputs] with the numbers of these rows: float32, or uint16, the bits of bfloat16."""
    wide = made.dtype == np.float32
    if kind == "BF16":
        bits = np.ascontiguousarray(raw).view(np.uint16)
        made[:] = (bits.astype(np.uint32) << 16).view(np.float32) if wide else bits
    elif not wide and has_layout(kind) and (layout := layout_of(kind)).coded:
        dequantise(layout, raw, made)
    else:
        numbers = torch.from_numpy(dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[kind]))
        made[:] = (numbers if wide else numbers.to(torch.bfloat16).view(torch.uint16)).numpy()
