"""Tells which model it is: a hash of its files' names, lengths, times and samples, or of all that is in a GGUF file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from engine.files.digest import sha256_of
from engine.weights.gguf.source import SOURCE, source_of

_KINDS = (".safetensors", ".bin", ".pt", ".gguf", ".blocks", ".json", ".model")
_BEGINNING = 1 << 16
_SAMPLES, _SAMPLE = 256, 1 << 12  # pieces of a file, and bytes of each
_PROOF = "proof"  # names of proofs begin so: a first start writes one, and the model is the same


def model_identity(model: str, kinds: Sequence[str] = _KINDS) -> bytes:
    """Return the SHA-256 of a directory's or file's identity. Samples of the weights are read: all of them would take
    seconds.

    kinds: endings of the directory's files that count.
    """
    path = Path(model)
    if (source := source_of(path)) is not None:  # a copied cache has the same model, whatever times are then
        return hashlib.sha256(source.content.encode() + _settings(path)).digest()
    of_kinds = (file for file in path.glob("*") if file.suffix in kinds and not file.name.startswith(_PROOF))
    files = [path] if path.is_file() else sorted(file for file in of_kinds if file.is_file())
    digest = hashlib.sha256(b"" if files else model.encode("utf8", "surrogateescape"))
    for file in files:
        status = file.stat()
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode("utf8", "surrogateescape"))
        with file.open("rb", buffering=0) as content:
            digest.update(content.read(_BEGINNING))
            for number in range(1, _SAMPLES + 1 if status.st_size > _BEGINNING else 0):
                content.seek(max(0, status.st_size * number // _SAMPLES - _SAMPLE))
                digest.update(content.read(_SAMPLE))
    return digest.digest()


def _settings(folder: Path) -> bytes:
    """Hash what a directory says of a model besides its weights: configuration and tokenizer."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.json")):
        if file.name != SOURCE and file.is_file():
            digest.update(f"{file.name} {sha256_of(file)}\n".encode("utf8", "surrogateescape"))
    return digest.digest()
