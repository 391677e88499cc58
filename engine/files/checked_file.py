"""A file of the cache folder: a header that says what the content is, and the content with its checksum.

The header holds a magic number, a version, the CRC-32 of the content, its bytes, and its key, a SHA-256 of everything
that the content depends on. A file is written under another name and renamed, so it is whole or absent; there is no
fsync, since a checksum shows what a power cut has left. Files are read, not mapped: the kernel ends a process that
reads the map of a file that somebody cuts.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.files.whole_file import whole_file

_HEADER = struct.Struct("<8sIIQ32s")
_MAGIC, _VERSION = b"TALONKV\n", 1
_LARGEST = 1 << 28  # most bytes of a file that is read whole
Buffer = Any
"""Contiguous bytes: bytes, or an array."""


class Damaged(Exception):
    """The file is not what was written under its name."""


def write_checked(path: Path, key: bytes, parts: Sequence[Buffer]) -> int:
    """Write a file of these parts, one after the other, which only its owner may read, and return its bytes."""
    size, crc = 0, 0
    for part in parts:
        size, crc = size + memoryview(part).nbytes, zlib.crc32(part, crc)
    with whole_file(path, 0o600, durable=False) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, crc, size, key))
        for part in parts:
            file.write(part)
    return _HEADER.size + size


def read_checked(path: Path, key: bytes, room: memoryview) -> memoryview:
    """Read the content of the file of that key into the first bytes of `room`, and return them. Raises
    FileNotFoundError if there is none, Damaged if it is cut, changed, of another key, or longer than the room, and
    OSError if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # O_NONBLOCK does not wait for the writer of a pipe
    try:
        length = os.fstat(descriptor).st_size
        if not _HEADER.size <= length <= _HEADER.size + room.nbytes:
            raise Damaged(f"has {length} bytes")
        header, content = bytearray(_HEADER.size), room[: length - _HEADER.size]
        if os.readv(descriptor, [header, content]) != length:
            raise Damaged("is shorter than it was")
    finally:
        os.close(descriptor)
    magic, version, crc, size, found = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise Damaged("is no file of Talon's cache")
    if (version, found) != (_VERSION, key):
        raise Damaged("is another file of the cache")
    if content.nbytes != size or zlib.crc32(content) != crc:
        raise Damaged("is damaged")
    return content


def read_whole(path: Path, key: bytes) -> memoryview:
    """Read a file whose length is not known, as `read_checked` does. Raises Damaged if it is longer than any."""
    if (length := path.stat().st_size) > _LARGEST:
        raise Damaged(f"has {length} bytes")
    return read_checked(path, key, memoryview(bytearray(length)))
