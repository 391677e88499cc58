"""What a trial at load found, remembered for later starts with the same file, software and processor.

The trial compares the lean decoder with the stock forward, for which every weight is dequantised: seconds for each
billion; and a token's bits alone with those in a batch. What it found is the attention rule of each layer; that all
agreed is what the file's existence says.
"""

from __future__ import annotations

import contextlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import torch

from engine.config import Activations, KVType
from engine.files.whole_file import write_whole
from engine.kernels.attention.attention import Rule
from engine.kernels.simd import features
from engine.weights.gguf_source import source_of

_ENGINE = Path(__file__).parents[1]
_COMPARED = ("kernels", "model", "weights", "core")  # folders whose code takes part
_LIBRARIES = ("torch", "transformers", "numba", "llvmlite", "gguf", "numpy")


class _StoredRule(msgspec.Struct):
    """A `Rule`."""

    scale: float
    window: int
    softcap: float
    sinks: list[float] | None


class _Stored(msgspec.Struct):
    """under: the versions, and what else a bit may depend on."""

    under: list[str]
    rules: list[_StoredRule]


class Proof:
    """folder: the directory that describes the file, and is made anew when the file changes. layers: of its model.
    context: of the trial. activations: how products took their rows. kv_type: how keys and values were kept.
    """

    def __init__(self, folder: Path, layers: int, context: int, activations: Activations, kv_type: KVType):
        kept = "" if kv_type == "auto" else f"-{kv_type}"
        self._file, self._layers = folder / f"proof-{activations}{kept}.json", layers
        source = source_of(folder)
        self._under = [f"file {'' if source is None else source.key}", f"context {context}", *_versions()]

    def read(self) -> dict[int, Rule] | None:
        """The rule of each layer; None if the model has to be tried."""
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=_Stored)
        except (OSError, msgspec.MsgspecError):
            return None
        if found.under != self._under or len(found.rules) != self._layers:
            return None
        return {layer: _rule(stored) for layer, stored in enumerate(found.rules)}

    def write(self, rules: dict[int, Rule]) -> None:
        """Remember that the model agreed. It only saves time, so a folder that cannot be written is no error."""
        ordered = (rule for _, rule in sorted(rules.items()))
        stored = [
            _StoredRule(rule.scale, rule.window, rule.softcap, None if rule.sinks is None else rule.sinks.tolist())
            for rule in ordered
        ]
        with contextlib.suppress(OSError):
            write_whole(self._file, msgspec.json.encode(_Stored(self._under, stored)))


def _rule(stored: _StoredRule) -> Rule:
    sinks = None if stored.sinks is None else torch.tensor(stored.sinks)
    return Rule(stored.scale, stored.window, stored.softcap, sinks)


@cache
def _versions() -> list[str]:
    """Of all that may change a bit: our code, the libraries, the processor, the threads' number aside."""
    files = [file for folder in _COMPARED for file in sorted((_ENGINE / folder).rglob("*.py"))]
    ours = crc32(b"".join(file.read_bytes() for file in files))
    processor: Any = crc32(" ".join(sorted(features())).encode())
    return [
        f"talon {ours:x}",
        *(f"{name} {version(name)}" for name in _LIBRARIES),
        f"{platform.machine()} {processor:x}",
    ]
