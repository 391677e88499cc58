"""Texts to learn from: prompts and their answers, as tokens, a file each in a cache folder, on a shelf for each owner.

A token takes four bytes. The server that keeps texts and the process that learns from them share the folder alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.files.cache_folder import CacheFolder
from engine.files.checked_file import Damaged, read_whole
from engine.files.removal import removed

_PROMPT_TOKENS = struct.Struct("<I")
_ENDING = ".talon"


class KeptText(NamedTuple):
    """The tokens of a prompt and of its answer."""

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]

    @property
    def name(self) -> str:
        """A name of the prompt, which tells it from others."""
        return hashlib.sha256(self.prompt.tobytes()).hexdigest()


def shelf_of(owner: str) -> str:
    """Return the name of an owner's texts and head on the disk."""
    return hashlib.blake2b(owner.encode("utf8", "surrogatepass"), digest_size=16).hexdigest()


def keep_text(folder: CacheFolder, owner: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Write a text in the background."""
    tokens = np.asarray([*prompt, *answer], "<i4").tobytes()
    content, shelf = _PROMPT_TOKENS.pack(len(prompt)) + tokens, shelf_of(owner)
    folder.keep(shelf, hashlib.sha256(shelf.encode() + content).digest(), lambda: [content])


def latest_texts(shelf: Path) -> Iterator[KeptText]:
    """Yield the texts of a shelf, the latest first. Damaged ones are removed."""
    for _, file in sorted(_files(shelf), reverse=True):
        try:
            content = read_whole(file, bytes.fromhex(file.stem))
        except Damaged:
            removed(file)
            continue
        except OSError:  # evicted meanwhile
            continue
        (prompt,) = _PROMPT_TOKENS.unpack_from(content)
        tokens = np.frombuffer(content[_PROMPT_TOKENS.size :], "<i4").astype(np.int32)
        yield KeptText(tokens[:prompt], tokens[prompt:])


def count_texts(shelf: Path, since_ns: int = 0) -> int:
    """Return how many texts a shelf has that were kept after that time."""
    return sum(kept_ns > since_ns for kept_ns, _ in _files(shelf))


def latest_ns(shelf: Path) -> int:
    """Return when the latest text of a shelf was kept; 0 if there is none."""
    return max((kept_ns for kept_ns, _ in _files(shelf)), default=0)


def _files(shelf: Path) -> list[tuple[int, Path]]:
    found = []
    for file in shelf.glob(f"*{_ENDING}"):
        with suppress(OSError, ValueError):  # evicted meanwhile, or no file of ours
            bytes.fromhex(file.stem)
            found.append((file.stat().st_mtime_ns, file))
    return found
