"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK = 1 << 20


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
