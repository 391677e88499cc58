"""Keeps finished answers in a cache folder: a file each, with the owner whose memory it belongs to."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from engine.files.cache_folder import CacheFolder

_OWNER_BYTES = struct.Struct("<I")
_MOST = 1 << 24  # bytes of a file


class SavedAnswers:
    """The finished answers of one model in a cache folder. identity: names the model that gave the answers; those of
    other models are not read.
    """

    def __init__(self, folder: CacheFolder, identity: bytes):
        self.folder, self._identity = folder, identity
        self._shelf = f"answers-{identity.hex()[:16]}"

    def keep(self, owner: str, answer: NDArray[np.int32]) -> None:
        """Write an answer in the background."""
        name = owner.encode("utf8", "surrogatepass")
        content = _OWNER_BYTES.pack(len(name)) + name + answer.astype("<i4").tobytes()
        key = hashlib.sha256(self._identity + content).digest()
        self.folder.keep(self._shelf, key, lambda: [content])

    def latest(self, capacity: int) -> list[tuple[str, NDArray[np.int32]]]:
        """Return the latest answers, at most `capacity` tokens of them, with their owners; the earliest first."""
        found: list[tuple[str, NDArray[np.int32]]] = []
        room = np.empty(_MOST, np.uint8).data  # memory becomes resident only as it fills
        for key in self.folder.keys(self._shelf):
            if (content := self.folder.read(self._shelf, key, room)) is None:
                continue
            begin = _OWNER_BYTES.size + _OWNER_BYTES.unpack_from(content)[0]
            answer = np.frombuffer(content[begin:], "<i4").astype(np.int32)
            if (capacity := capacity - len(answer)) < 0:
                break
            found.append((str(content[_OWNER_BYTES.size : begin], "utf8", "surrogatepass"), answer))
        return found[::-1]
