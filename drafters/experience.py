"""What a drafter has learned of its own worth, kept in a file from one engine to the next.

The file also holds, for each source, what its trees promised and what came of it: the reliability that
`talon bench --calibration` draws.
"""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drafters.base import BetweenSteps, Drafter, Learned, Verdict, Wanted
from drafters.outcomes import Following
from engine.errors import ConfigError
from engine.sampling import SamplingParams
from engine.tree import TokenTree
from engine.whole_file import whole_file

VERSION = 1
BINS = 10
PROMISED, ACCEPTED, SEEN = 0, 1, 2
NAMES = {1: "pld", 2: "suffix", 4: "sps", 8: "head", 16: "recycling", 32: "datastore", 64: "hybrid", 128: "lookahead"}

Floats = NDArray[np.float64]


def source_name(source: int) -> str:
    """Who proposed a node; several agreed where several bits are set."""
    return " + ".join(name for bit, name in NAMES.items() if source & bit) or "nobody"


class Reliability:
    """counts: [256 sources, BINS, 3] float64, of the nodes below accepted ones, by promised chance: the sum of the
    chances promised, how many were accepted, and how many there were. A chance is c(v) / c(parent)."""

    def __init__(self, counts: Floats | None = None):
        self.counts = np.zeros((256, BINS, 3)) if counts is None else counts

    def add(self, verdict: Verdict) -> None:
        """What a verdict says of its tree. The target's token behind every accepted node is known, so every child of
        one was right or wrong, verified or not."""
        tree = verdict.tree
        if len(tree) < 2:
            return
        drawn = np.full(len(tree), -1)
        drawn[verdict.path] = verdict.tokens
        above = tree.parents[1:]
        judged = np.flatnonzero(drawn[above] >= 0) + 1
        above = tree.parents[judged]
        chance = np.clip(tree.confidence[judged] / np.maximum(tree.confidence[above], 1e-9), 0, 1)
        place = tree.source[judged], np.minimum((chance * BINS).astype(np.int64), BINS - 1)
        accepted = tree.tokens[judged] == drawn[above]
        np.add.at(self.counts, place, np.stack([chance, accepted, np.ones(len(judged))], 1))

    def by_source(self) -> dict[str, Floats]:
        """[bins seen, 3] of each source seen."""
        return {
            source_name(source): self.counts[source][self.counts[source, :, SEEN] > 0]
            for source in np.flatnonzero(self.counts[:, :, SEEN].any(1)).tolist()
        }


class Experienced(Drafter):
    """A drafter that begins with what the file at `path` holds, if there is one; `save` puts there what it knows."""

    def __init__(self, drafter: Drafter, path: Path):
        self.drafter, self.path = drafter, path
        self.feature_layers, self.successors = drafter.feature_layers, drafter.successors
        self.calibrated = drafter.calibrated
        self.reliability = Reliability()
        self._read = self.reliability.counts.copy()
        if (learned := check_file(path)) is not None:
            try:
                self.reliability = Reliability(learned.pop("reliability"))
                self._read = self.reliability.counts.copy()
                drafter.recall(learned)
            except (ValueError, KeyError) as error:
                raise _refusal(path, str(error)) from None

    @property
    def forward_s(self) -> float:  # type: ignore[override]
        return self.drafter.forward_s

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.drafter.start(request, prompt, sampling)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return self.drafter.propose(request, continuation)

    def propose_many(self, wanted: Sequence[Wanted], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        return self.drafter.propose_many(wanted, between_steps)

    def following(self, wanted: Sequence[Wanted]) -> list[Following]:
        return self.drafter.following(wanted)

    def observe(self, request: int, verdict: Verdict) -> None:
        self.reliability.add(verdict)
        self.drafter.observe(request, verdict)

    def settle(self) -> None:
        self.drafter.settle()

    def finish(self, request: int) -> None:
        self.drafter.finish(request)

    def save(self) -> None:
        """Write the file, all or nothing, with what other engines have put there since it was read: what they know of
        sources that this one lacks, and their counts. Of what both have learned the last one's stays.
        """
        theirs: Learned = {"reliability": self._read}
        with suppress(ConfigError):
            theirs = read(self.path)
        self.reliability.counts += theirs["reliability"] - self._read
        self._read = self.reliability.counts.copy()
        write(self.path, {**theirs, **self.drafter.learned(), "reliability": self._read})


def check_file(path: Path) -> Learned | None:
    """What the file holds, None if there is none yet; ConfigError if it is no such file, or could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None
    return read(path) if path.exists() else None


def write(path: Path, learned: Learned) -> None:
    """An .npz file; whoever reads it meanwhile sees the old one or the new one."""
    try:
        with whole_file(path) as file:
            np.savez(file, version=np.array(VERSION), allow_pickle=False, **learned)
    except OSError as error:
        raise _unwritable(path, error) from None


def read(path: Path) -> Learned:
    """The arrays of a file that `write` wrote; ConfigError for any other."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        raise _refusal(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    if arrays.pop("version", None) != VERSION:
        raise _refusal(path, "made by another version of the format")
    if wrong := [name for name, array in arrays.items() if array.dtype != np.float64 or not np.isfinite(array).all()]:
        raise _refusal(path, f"{wrong[0]} holds something that is no number")
    if arrays.get("reliability", np.empty(0)).shape != (256, BINS, 3):
        raise _refusal(path, "holds no reliability")
    return arrays


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"drafter.calibration={path}: cannot be written: {error.strerror}: name another file")


def _refusal(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"drafter.calibration={path}: cannot be used ({problem}): delete it to start afresh")
