"""The tensors of a directory of safetensors files: https://github.com/huggingface/safetensors#format

They are read without a mapping, which would end the process if a file were cut meanwhile.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError, printable, shown

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_TYPES |= {"U8": np.dtype("u1")}
NUMBERS = ("F32", "F16", "BF16")
CODES = "U8"
_LARGEST_HEADER = 100_000_000  # bytes, as in safetensors itself


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a safetensors file, which is read when it is needed. kind: of `NUMBERS`, or CODES. start: its first
    byte in the file, which stays open.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    content: BinaryIO
    path: Path

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def numbers(self, first: int, count: int) -> NDArray[np.float32]:
        """Return `count` of its elements, from element `first` on. Raises ModelError if the file has been cut."""
        stored = self.stored(first, count)
        wide: NDArray[Any] = stored.astype(np.uint32) << 16 if self.kind == "BF16" else stored
        return wide.view(np.float32) if self.kind == "BF16" else wide.astype(np.float32, copy=False)

    def stored(self, first: int, count: int) -> NDArray[Any]:
        """Return `count` of its elements as the file has them. See `numbers`."""
        stored: NDArray[Any] = np.empty(count, _TYPES[self.kind])
        view, done = memoryview(stored.data).cast("B"), 0
        at = self.start + first * stored.itemsize
        while done < len(view):
            if not (read := os.preadv(self.content.fileno(), [view[done:]], at + done)):
                raise ModelError(f"model={self.path}: the file was cut short while it was read; get it again")
            done += read
        return stored


def read_checkpoint(folder: Path, field: str, kinds: tuple[str, ...] = NUMBERS) -> dict[str, CheckpointTensor]:
    """Read the tensors of a directory, by name. field: `KEY=VALUE`, for errors. kinds: of tensors that it may hold.

    Raises ModelError if there are no safetensors files, or one is damaged or cut short or holds other types.
    """
    tensors = dict[str, CheckpointTensor]()
    for file in weight_files(folder):
        try:
            content = file.open("rb")
            tensors |= _tensors_of(file, content, os.fstat(content.fileno()).st_size, field, kinds)
        except OSError as error:
            raise ModelError(f"{field}: {file.name} cannot be read: {error.strerror}; get it again") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(f"{field}: {file.name} is damaged or cut short; get it again") from error
    if not tensors:
        raise ModelError(f"{field}: takes a checkpoint of safetensors files, and {folder} has none; leave it out")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold the model: those of the index, if there is one."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not single.is_file() and index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values())
            return sorted(folder / Path(name).name for name in names)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(f"model={folder}: {index.name} is damaged; get it again") from error
    return [single] if single.is_file() else []


def _tensors_of(
    file: Path, content: BinaryIO, size: int, field: str, kinds: tuple[str, ...]
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a file. Raises ValueError if what the header says does not fit the file."""
    length = int.from_bytes(content.read(8), "little")
    if not 0 < length <= min(size - 8, _LARGEST_HEADER):
        raise ValueError
    header: dict[str, Any] = json.loads(content.read(length))
    found = dict[str, CheckpointTensor]()
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if (kind := about["dtype"]) not in kinds:
            raise ModelError(
                f"{field}: tensor {printable(name, 100)} is stored as {shown(kind)}, and only F32, F16 and BF16 are "
                "quantised; leave it out"
            )
        start, end = about["data_offsets"]
        tensor = CheckpointTensor(name, kind, tuple(map(int, about["shape"])), 8 + length + start, content, file)
        whole = min(tensor.shape, default=0) >= 0 and 0 <= start <= end <= size - 8 - length
        if not whole or end - start != tensor.elements * _TYPES[kind].itemsize:
            raise ValueError
        found[name] = tensor
    return found
