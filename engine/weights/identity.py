"""Which model it is: a hash of its files' names, lengths, times and beginnings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

_KINDS = (".safetensors", ".bin", ".pt", ".gguf", ".blocks", ".json", ".model")
_BEGINNING = 1 << 16
_PROOF = "proof"  # how the names of proofs begin: a first start writes one, and the model is the same


def model_identity(model: str, kinds: Sequence[str] = _KINDS) -> bytes:
    """The SHA-256 of a directory's or file's identity. The weights themselves are not read: that would take seconds.

    kinds: endings of the directory's files that count.
    """
    path = Path(model)
    of_kinds = (file for file in path.glob("*") if file.suffix in kinds and not file.name.startswith(_PROOF))
    files = [path] if path.is_file() else sorted(of_kinds)
    digest = hashlib.sha256(b"" if files else model.encode("utf8", "surrogateescape"))
    for file in files:
        status = file.stat()
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode("utf8", "surrogateescape"))
        with file.open("rb") as content:
            digest.update(content.read(_BEGINNING))
    return digest.digest()
