"""Which other engines to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rivals:
    """The other engines that take part.

    folder: of the engines' virtual environments. files: the model's weights in other types than its own file's, for
    engines that read GGUF. draft: a GGUF file of a smaller model of the same vocabulary.
    """

    folder: Path
    files: Sequence[Path] = ()
    draft: Path | None = None
