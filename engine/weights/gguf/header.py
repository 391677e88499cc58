"""The header of a GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

It is read here, with every length checked, before the file is given to code that trusts it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.core.errors import ModelError, shown
from engine.weights.gguf import ternary

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TOKEN_KINDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_MOST_DIMENSIONS = 4
_ALIGNMENTS = {2**power for power in range(3, 17)}
_SHORT_ARRAY = 1000  # numbers of an array that is kept
_CHUNK = 4 << 20  # bytes of the header that are read together
_LARGEST = 1 << 28  # most bytes of a header: a damaged one may claim to be as long as the file


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, as the header describes it. shape: in ggml's order, the fastest dimension first. offset:
    from the start of the data. part: which of the files that the model is in, from 0. one_scale: it is stored as I2_S,
    and read as its `kind` (`engine.weights.gguf.ternary`).
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    part: int = 0
    one_scale: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_kind(self) -> str:
        """The name of the type in the file."""
        return "I2_S" if self.one_scale else self.kind.name

    @property
    def size(self) -> int:
        """The number of bytes in the file."""
        if self.one_scale:
            return ternary.stored_bytes(self.elements)
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(self.elements // block * block_bytes)


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a GGUF file says. metadata: scalars and strings as they are, an array as its length. start:
    the byte where the data begins. arrays: short arrays of numbers, by their keys.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    start: int
    content: BinaryIO  # stays open, so that a file that takes the name later is not read instead
    arrays: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def read_header(path: Path, field: str) -> GgufHeader:
    """Read the header of the file at `path`. field: `KEY=VALUE`, for errors.

    Raises ModelError if the file does not exist, is not a GGUF file, or is cut short.
    """
    try:
        file = path.open("rb")
        size = os.fstat(file.fileno()).st_size
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelError(f"{field}: is no GGUF file; give a .gguf file or a Hugging Face directory")
        return _Reader(path, field, file, size).read()
    except OSError as error:
        raise ModelError(f"{field}: cannot be read: {error.strerror}; name a GGUF file that is there") from error


class _Reader:
    """Walks through the header. at: the byte that is read next; size: of the file."""

    def __init__(self, path: Path, field: str, content: BinaryIO, size: int):
        self.path, self.field, self.content, self.size = path, field, content, size
        self.head = bytearray(_MAGIC)
        self.at = len(_MAGIC)
        self.arrays: dict[str, tuple[Any, ...]] = {}

    def read(self) -> GgufHeader:
        try:
            (version,) = self._unpack("<I")
            if version not in _VERSIONS:
                raise ModelError(
                    f"{self.field}: is GGUF version {version}, or of the other byte order; convert the model again "
                    "with a current llama.cpp"
                )
            tensor_count, values = self._unpack("<QQ")
            metadata = dict(self._pair() for _ in range(values))
            alignment = metadata.get("general.alignment", 32)
            if type(alignment) is not int or alignment not in _ALIGNMENTS:
                raise self._broken(f"general.alignment is {shown(alignment)}")
            self._check_tokens(metadata)
            tensors = [self._tensor() for _ in range(tensor_count)]
            if len(names := {tensor.name for tensor in tensors}) < len(tensors):
                raise self._broken(f"{len(tensors)} tensors have {len(names)} names")
        except struct.error:
            raise self._cut("its head is not complete") from None
        start = -(-self.at // alignment) * alignment
        end = max((start + tensor.offset + tensor.size for tensor in tensors), default=0)
        if end > self.size:
            raise self._cut(f"{self.size:,} of {end:,} bytes")
        return GgufHeader(self.path, metadata, tensors, start, self.content, self.arrays)

    def _check_tokens(self, metadata: dict[str, Any]) -> None:
        """Refuse the ids of tokens that do not exist."""
        count = metadata.get("tokenizer.ggml.tokens")
        for key in (f"tokenizer.ggml.{kind}_token_id" for kind in _TOKEN_KINDS):
            token = metadata.get(key)
            if isinstance(token, int) and isinstance(count, int) and not 0 <= token < count:
                raise ModelError(
                    f"{self.field}: {key} is {token}, and the file has {count} tokens; correct it with "
                    "gguf-set-metadata, or get the file again"
                )

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        (kind,) = self._unpack("<I")
        return key, self._value(kind, key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._unpack("<IQ")
            if kind in _SCALARS and count <= _SHORT_ARRAY:
                self.arrays[key] = self._unpack(f"<{count}{_SCALARS[kind][1]}")
            elif kind in _SCALARS:
                self._skip(count * struct.calcsize(_SCALARS[kind]))
            elif kind == _STRING:
                self._skip_strings(count)
            else:
                raise self._broken(f"holds an array of the unknown type {kind}")
            return count
        if kind not in _SCALARS:
            raise self._broken(f"holds a value of the unknown type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _tensor(self) -> GgufTensor:
        name = self._string()
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._broken(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        one_scale = kind == ternary.I2_S
        try:
            of_kind = ternary.READ_AS if one_scale else GGMLQuantizationType(kind)
            tensor = GgufTensor(name, shape, of_kind, offset, one_scale=one_scale)
        except ValueError:
            raise self._broken(f"tensor {shown(name)} is of the unknown type {kind}") from None
        if not tensor.elements or shape[0] % GGML_QUANT_SIZES[tensor.kind][0]:
            raise self._broken(f"tensor {shown(name)} of type {tensor.stored_kind} has shape {list(shape)}")
        return tensor

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start = self.at
        self._skip(length)
        return self.head[start : self.at].decode("utf8", "replace")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        start = self.at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self.head, start)

    def _skip_strings(self, count: int) -> None:
        """Skip strings, of which a tokenizer has hundreds of thousands."""
        head, at, length_of = self.head, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(head):
                self.at = at
                self._skip(8)
            at += 8 + length_of(head, at)[0]
        self.at = at
        self._skip(0)

    def _skip(self, size: int) -> None:
        self.at += size
        while self.at > len(self.head):
            if self.at > self.size or not (more := self.content.read(_CHUNK)):
                raise struct.error
            if self.at > _LARGEST:
                raise self._broken(f"its head has {self.at:,} bytes")
            self.head += more

    def _cut(self, what: str) -> ModelError:
        return ModelError(f"{self.field}: the GGUF file is cut short ({what}); download it again")

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"{self.field}: the GGUF file is damaged or newer than Talon ({what}); download it again")
