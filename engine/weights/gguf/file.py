"""The GGUF file of a model, or the files that it was split into: `NAME-00001-of-00003.gguf`.

The first part holds the metadata, every part some of the tensors.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.core.errors import ModelError, shown
from engine.core.processor import cores
from engine.weights.gguf import ternary
from engine.weights.gguf.header import GgufHeader, GgufTensor, read_header

_PART = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.DOTALL | re.IGNORECASE)
_SAME_MODEL = "get all parts of one model"
_COUNTS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "expert_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
)
_AT_ONCE = 4 << 20  # bytes that a thread reads at a time
_LARGEST = 1 << 24  # the largest of these counts
_SAME = ("general.architecture", "general.name", "split.tensors.count")  # the same in all parts that name them


class GgufFile:
    """The GGUF file, or files, of one model. parts: at least one, in their order. metadata: scalars and strings as they
    are, an array as its length. key: the one that names the file, for errors.
    """

    def __init__(self, parts: Sequence[GgufHeader], key: str = "model"):
        self.parts, self.key = parts, key
        self.metadata: dict[str, Any] = parts[0].metadata
        numbered = ((i, tensor) for i, part in enumerate(parts) for tensor in part.tensors)
        self.tensors: list[GgufTensor] = [replace(tensor, part=i) if i else tensor for i, tensor in numbered]

    @property
    def path(self) -> Path:
        """The file, or the first part."""
        return self.parts[0].path

    @property
    def field(self) -> str:
        """How errors begin that are about it."""
        return f"{self.key}={self.path}"

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def arrays(self) -> dict[str, tuple[Any, ...]]:
        """Short arrays of numbers in the metadata, by their keys."""
        return self.parts[0].arrays

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def packed_size(self) -> int:
        """Bytes of all tensors as they lie in memory."""
        from engine.kernels.quant.layouts import bits_in_memory

        return int(sum(tensor.elements * bits_in_memory(tensor.kind.name) / 8 for tensor in self.tensors))

    @property
    def elements(self) -> int:
        """The elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    def tensor(self, name: str) -> GgufTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def values(self, name: str) -> NDArray[np.float32] | None:
        """Return a tensor that is stored as float32; None if there is none of that name."""
        tensor = self.tensor(name)
        return None if tensor is None or tensor.kind != GGMLQuantizationType.F32 else self.read(tensor).view("<f4")

    def read(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return [bytes] a copy of the tensor's bytes of its `kind`, made on all cores. A mapping would end the process
        if the file were cut meanwhile; this raises ModelError.
        """
        part = self.parts[tensor.part]
        raw = np.empty(tensor.size, np.uint8)
        view, at = memoryview(raw.data), part.start + tensor.offset

        def read_some(done: int) -> None:
            stop = min(done + _AT_ONCE, len(view))
            while done < stop:
                if not (count := os.preadv(part.content.fileno(), [view[done:stop]], at + done)):
                    raise self._cut(part)
                done += count

        with ThreadPoolExecutor(cores()) as threads:  # starts no threads for an empty list
            rest = threads.map(read_some, range(_AT_ONCE, len(view), _AT_ONCE))
            read_some(0)
            for _ in rest:
                pass
        if tensor.one_scale:
            return ternary.blocks_of(raw[: -ternary.SCALE_BYTES], raw[-ternary.SCALE_BYTES :])
        return raw

    def read_rows(self, tensor: GgufTensor, rows: Sequence[int]) -> NDArray[np.uint8]:
        """Return [rows, bytes] some rows of a matrix. Raises ModelError if the file was cut meanwhile."""
        part, at = self.parts[tensor.part], self.parts[tensor.part].start + tensor.offset
        behind = ternary.SCALE_BYTES if tensor.one_scale else 0
        size = (tensor.size - behind) // tensor.shape[1]
        found = [os.pread(part.content.fileno(), size, at + row * size) for row in rows]
        scale = os.pread(part.content.fileno(), behind, at + tensor.size - behind)
        if any(len(row) < size for row in found) or len(scale) < behind:
            raise self._cut(part)
        joined = np.frombuffer(b"".join(found), np.uint8)
        if tensor.one_scale:
            joined = ternary.blocks_of(joined, np.frombuffer(scale, np.uint8))
        return joined.reshape(len(found), joined.size // max(1, len(found)))

    def _cut(self, part: GgufHeader) -> ModelError:
        return ModelError(f"{self.key}={part.path}: the GGUF file was cut short while it was read; get it again")

    @property
    def kind(self) -> str:
        """The type of most of the weights, such as Q4_K."""
        elements = Counter[str]()
        for tensor in self.tensors:
            elements[tensor.kind.name] += tensor.elements
        return elements.most_common(1)[0][0]

    @property
    def kinds(self) -> str:
        """How the tensors are stored: `210 Q4_1, 61 F32, 1 Q8_0`."""
        counts = Counter(tensor.stored_kind for tensor in self.tensors)
        return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def parts_of(path: Path) -> list[Path]:
    """Return the files that hold the model of this one, which is any of them: by their names alone."""
    if (named := _PART.fullmatch(path.name)) is None:
        return [path]
    ending = f"-of-{named['count']}{named['ending']}"
    paths = [path.with_name(f"{named['name']}-{number:05d}{ending}") for number in range(1, int(named["count"]) + 1)]
    return paths if path in paths else [path]


def read_gguf(path: Path, field: str) -> GgufFile:
    """Read the model in the file at `path`, or that it is a part of. field: `KEY=VALUE`, for errors.

    Raises ModelError if a file does not exist, is not a GGUF file, is cut short, or is of another model than the first.
    """
    paths, key = parts_of(path), re.split("[= ]", field, maxsplit=1)[0]
    if len(paths) == 1:
        whole = read_header(path, field)
        if isinstance(count := whole.metadata.get("split.count"), int) and count > 1:
            raise ModelError(
                f"{field}: is one of {count} parts, whose names have to end in -00001-of-{count:05d}.gguf and so on; "
                "rename them, or join them with llama-gguf-split --merge"
            )
        return _checked(GgufFile([whole], key), field)
    parts: list[GgufHeader] = []
    for number, name in enumerate(paths, 1):
        if not name.exists():
            raise ModelError(f"{field}: part {number} of {len(paths)} is missing: there is no {name}; get it too")
        part = read_header(name, field if name == path else f"{field}: part {name.name}")
        found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if found != (number - 1, len(paths)):
            raise _foreign(field, name, f"its header says split.no {shown(found[0])} of {shown(found[1])}, from 0")
        first = part if number == 1 else parts[0]
        for key in _SAME:
            if part.metadata.get(key, first.metadata.get(key)) != first.metadata.get(key):
                other = f"{key} is {shown(part.metadata[key])}, and {shown(first.metadata.get(key))} in the first part"
                raise _foreign(field, name, other)
        parts.append(part)
    return _checked(GgufFile(parts, key), field)


def _checked(file: GgufFile, field: str) -> GgufFile:
    """Return the file. Raises ModelError if the model has no name, or a tensor twice, or another number
    than it says.
    """
    if not isinstance(file.metadata.get("general.architecture"), str):
        raise ModelError(f"{field}: {file.path.name} names no general.architecture; get the file again")
    _check_counts(file, field)
    held: dict[str, int] = {}
    for tensor in file.tensors:
        if tensor.name in held:
            where = file.parts[held[tensor.name]].path.name
            raise _foreign(field, file.parts[tensor.part].path, f"tensor {shown(tensor.name)} is in {where} too")
        held[tensor.name] = tensor.part
    if (count := file.metadata.get("split.tensors.count", len(held))) != len(held):
        raise ModelError(f"{field}: its parts hold {len(held)} tensors, and {shown(count)} in all; {_SAME_MODEL}")
    return file


def _check_counts(file: GgufFile, field: str) -> None:
    """Raise ModelError for counts that the tensors contradict: trusting them would make a model of that size."""
    blocks = len({tensor.name.split(".")[1] for tensor in file.tensors if tensor.name.startswith("blk.")})
    if blocks == 1 and any(".nextn." in tensor.name for tensor in file.tensors):  # a draft head alone, the last block
        blocks = _LARGEST
    embedding = file.tensor("token_embd.weight")
    held = {"block_count": blocks} | ({} if embedding is None else {"embedding_length": embedding.shape[0]})
    for key in _COUNTS:
        count = file.metadata.get(f"{file.architecture}.{key}")
        if count is None or (isinstance(count, int) and 0 <= count <= min(_LARGEST, held.get(key, _LARGEST))):
            continue
        most = f"its tensors are of {held[key]}" if key in held else f"the most is {_LARGEST:,}"
        raise ModelError(f"{field}: {file.architecture}.{key} is {shown(count)}, and {most}; get the file again")


def _foreign(field: str, part: Path, why: str) -> ModelError:
    return ModelError(f"{field}: {part.name} is not this part of that model ({why}); {_SAME_MODEL}")
