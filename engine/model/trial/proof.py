"""The findings of a first start about a model whose weights stay where they are stored, kept for later starts.

The trial at load compares the lean decoder with the stock forward, for which every weight is dequantised: seconds for
each billion; and a token's bits alone with those in a batch. The file's existence says that all agreed. With it goes
all that was read from the stock model, whose code takes seconds to import: the decoder is built from the same values,
by the same code, at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from engine.config import Activations, KVType
from engine.files.checked_file import Damaged, read_whole, write_checked
from engine.kernels.attention.attention import Rule
from engine.kernels.simd import features
from engine.model.loading import Facts
from engine.model.structure import DecoderStructure
from engine.weights.gguf.source import SOURCE
from engine.weights.stored_weights import Place

_ENGINE = Path(__file__).parents[2]
_COMPARED = ("kernels", "model", "weights", "core")  # folders whose code takes part
_LIBRARIES = ("torch", "transformers", "numba", "llvmlite", "gguf", "numpy")
_READ = (SOURCE, "config.json", "generation_config.json")  # files of the folder that say what the model is


class ProvedModel(NamedTuple):
    """What is kept of a model that agreed with the stock forward. rules: the attention rule of each layer that attends.
    places, vectors: see `StoredWeights`.
    """

    facts: Facts
    structure: DecoderStructure
    rules: dict[int, Rule]
    places: Mapping[str, Place]
    vectors: Mapping[str, Tensor]


class _StoredRule(msgspec.Struct):
    """A `Rule`."""

    scale: float
    window: int
    softcap: float
    sinks: list[float] | None


class _StoredVector(msgspec.Struct):
    """The bits of bfloat16 numbers or, if it is wide, of float32 ones."""

    bits: bytes
    shape: list[int]
    wide: bool


class _Stored(msgspec.Struct):
    """A `ProvedModel`."""

    facts: Facts
    structure: DecoderStructure
    rules: dict[int, _StoredRule]
    places: dict[str, Place]
    vectors: dict[str, _StoredVector]


class Proof:
    """The file that says that a model agreed, and holds what was read from it.

    folder: the directory that names the weights, and is made anew when they change. dtype: as in the configuration.
    activations: how products took their rows. kv_type: how keys and values were kept.
    """

    def __init__(self, folder: Path, dtype: str, activations: Activations, kv_type: KVType):
        kept = "" if kv_type == "auto" else f"-{kv_type}"
        self._file = folder / f"proof-{activations}{kept}.msgpack"
        self._key = hashlib.sha256(repr((described_by(folder), dtype, *_versions())).encode()).digest()

    def read(self) -> ProvedModel | None:
        """Return what is known; None if the model has to be tried."""
        try:
            found = msgspec.msgpack.decode(read_whole(self._file, self._key), type=_Stored)
        except (OSError, Damaged, msgspec.MsgspecError):
            return None
        rules = {layer: _rule(stored) for layer, stored in found.rules.items()}
        vectors = {name: _vector(stored) for name, stored in found.vectors.items()}
        return ProvedModel(found.facts, found.structure, rules, found.places, vectors)

    def write(self, proved: ProvedModel) -> None:
        """Remember that the model agreed. It only saves time, so a folder that cannot be written is no error."""
        rules = {
            layer: _StoredRule(
                rule.scale, rule.window, rule.softcap, None if rule.sinks is None else rule.sinks.tolist()
            )
            for layer, rule in proved.rules.items()
        }
        vectors = {name: _stored_vector(vector) for name, vector in proved.vectors.items()}
        stored = _Stored(proved.facts, proved.structure, rules, dict(proved.places), vectors)
        with contextlib.suppress(OSError):
            write_checked(self._file, self._key, [msgspec.msgpack.encode(stored)])


def _rule(stored: _StoredRule) -> Rule:
    sinks = None if stored.sinks is None else torch.tensor(stored.sinks)
    return Rule(stored.scale, stored.window, stored.softcap, sinks)


def described_by(folder: Path) -> list[bytes]:
    """Return what says which model a folder names."""
    return [_content(folder / name) for name in _READ]


def _vector(stored: _StoredVector) -> Tensor:
    dtype = torch.float32 if stored.wide else torch.bfloat16
    return torch.frombuffer(bytearray(stored.bits), dtype=dtype).view(stored.shape)


def _stored_vector(vector: Tensor) -> _StoredVector:
    bits = vector.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _StoredVector(bits, [*vector.shape], vector.dtype == torch.float32)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@cache
def _versions() -> list[str]:
    """Return the versions of all that may change a bit: our code, the libraries, the processor; the number of threads
    does not.
    """
    files = [file for folder in _COMPARED for file in sorted((_ENGINE / folder).rglob("*.py"))]
    ours = crc32(b"".join(file.read_bytes() for file in files))
    processor = crc32(" ".join(sorted(features())).encode())
    return [
        f"talon {ours:x}",
        *(f"{name} {version(name)}" for name in _LIBRARIES),
        f"{platform.machine()} {processor:x}",
    ]
