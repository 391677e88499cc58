"""What a drafter has learned about its own reliability, kept in a file from one engine to the next.

The file also holds, for each source, the promised and the observed acceptance of its trees: the reliability that
`talon bench --calibration` draws.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafters.base import BetweenSteps, Drafter, Learned, Verdict, Wanted
from drafters.outcomes import Following
from drafters.registry import source_names
from engine.errors import ConfigError, first_line
from engine.sampling import SamplingParams
from engine.tree import TokenTree
from engine.whole_file import whole_file

VERSION = 2
BINS = 10
PROMISED, ACCEPTED, SEEN = 0, 1, 2
_COUNTS = "reliability: "  # followed by a source's name

Floats = NDArray[np.float64]


class Reliability:
    """counts: by source, [BINS, 3] float64, over the children of accepted nodes, binned by promised chance: the sum of
    the chances promised, how many were accepted, and how many were seen. A chance is c(v) / c(parent)."""

    def __init__(self, counts: Mapping[str, Floats] | None = None):
        self.counts: dict[str, Floats] = dict(counts or {})

    def add(self, verdict: Verdict) -> None:
        """Count a verdict's tree. The target's token after every accepted node is known, so every child of such a node
        was right or wrong, verified or not."""
        tree = verdict.tree
        drawn = np.full(len(tree), -1)
        drawn[verdict.path] = verdict.tokens
        judged = np.flatnonzero(drawn[tree.parents[1:]] >= 0) + 1
        above = tree.parents[judged]
        chance = np.clip(tree.confidence[judged] / np.maximum(tree.confidence[above], 1e-9), 0, 1)
        place = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
        seen = np.stack([chance, tree.tokens[judged] == drawn[above], np.ones(len(judged))], 1)
        for source in set(tree.source[judged].tolist()):
            mine, name = tree.source[judged] == source, " + ".join(source_names(source)) or "nobody"
            np.add.at(self.counts.setdefault(name, np.zeros((BINS, 3))), place[mine], seen[mine])

    def by_source(self) -> dict[str, Floats]:
        """[bins seen, 3] of each source seen."""
        return {name: counts[counts[:, SEEN] > 0] for name, counts in self.counts.items()}

    def plus(self, other: Reliability, sign: float = 1.0) -> Reliability:
        """The sum of both, or the difference."""
        none = np.zeros((BINS, 3))
        names = sorted(self.counts.keys() | other.counts.keys())
        return Reliability({n: self.counts.get(n, none) + sign * other.counts.get(n, none) for n in names})

    def arrays(self) -> Learned:
        """The counts as stored in the file."""
        return {_COUNTS + name: counts for name, counts in self.counts.items()}

    @classmethod
    def among(cls, arrays: Learned) -> Reliability:
        """The counts that a file holds."""
        return cls({name.removeprefix(_COUNTS): array for name, array in arrays.items() if name.startswith(_COUNTS)})


class Experienced(Drafter):
    """A drafter that starts from the file at `path`, if there is one; `save` writes what it has learned there."""

    def __init__(self, drafter: Drafter, path: Path):
        self.drafter, self.path = drafter, path
        self.feature_layers, self.successors = drafter.feature_layers, drafter.successors
        self.calibrated, self.together, self.source = drafter.calibrated, drafter.together, drafter.source
        self.rests = drafter.rests
        self.reliability, self._read = Reliability(), Reliability()  # all of it, and what the file held
        if (learned := check_file(path)) is not None:
            try:
                self._read = Reliability.among(learned)
                self.reliability = self._read.plus(self.reliability)
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
        if len(verdict.tokens) == len(verdict.path):  # not what rounds without a verdict emitted
            self.reliability.add(verdict)
        self.drafter.observe(request, verdict)

    def settle(self) -> None:
        self.drafter.settle()

    def finish(self, request: int) -> None:
        self.drafter.finish(request)

    def save(self) -> None:
        """Write the file atomically, merged with what other engines have written since it was read: what they learned
        about sources that this one lacks, and their counts. Where both have learned something, the last writer wins.
        """
        theirs = self._read.arrays()
        with suppress(ConfigError):
            theirs = read(self.path)
        self.reliability = self.reliability.plus(Reliability.among(theirs)).plus(self._read, -1)
        self._read = self.reliability.plus(Reliability())
        write(self.path, {**theirs, **self.drafter.learned(), **self.reliability.arrays()})


def check_file(path: Path) -> Learned | None:
    """The file's contents, None if it does not exist yet; ConfigError if it is not such a file or is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None
    return read(path) if path.exists() else None


def write(path: Path, learned: Learned) -> None:
    """Write an .npz file; a concurrent reader sees the old one or the new one."""
    arrays: dict[str, Any] = {"version": np.array(VERSION), **learned}
    try:
        with whole_file(path) as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise _unwritable(path, error) from None


def read(path: Path) -> Learned:
    """The arrays of a file that `write` wrote; ConfigError for any other."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # an invalid file may raise anything
        raise _refusal(path, first_line(error)) from None
    if arrays.pop("version", None) != VERSION:
        raise _refusal(path, "made by another version of the format")
    if wrong := [name for name, array in arrays.items() if array.dtype != np.float64 or not np.isfinite(array).all()]:
        raise _refusal(path, f"{wrong[0]} holds something that is no number")
    if any(counts.shape != (BINS, 3) for counts in Reliability.among(arrays).counts.values()):
        raise _refusal(path, "holds counts that are none")
    return arrays


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"drafter.calibration={path}: cannot be written: {error.strerror}: name another file")


def _refusal(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"drafter.calibration={path}: cannot be used ({problem}): delete it to start afresh")
