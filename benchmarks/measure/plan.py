"""What a measurement asks, of whom, and where its rows go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.core.params import SamplingParams
from engine.text.encode import encode_text
from engine.weights.resolve import resolved
from engine.weights.tokenizer import tokenizer_of

from ..inputs.questions import AskedQuestion, Question
from ..report.about import write_about
from ..report.figures import PLAIN
from ..report.out_folder import RowFile


@dataclass(frozen=True)
class MeasurementPlan:
    """A measurement that was asked for.

    names: of contestants. limit: questions of each file, or of each kind. samplings: one after the other, `repeats`
    times, each time with new engines: a drafter that remembers answers must not see a question twice. minutes: for all
    of it; None: until everything has been asked. heads: a folder with the drafters' weights. resume: what an earlier
    run into the same folder has asked is not asked again.
    """

    config: Config
    names: Sequence[str]
    files: Sequence[Path]
    out: Path
    samplings: Sequence[SamplingParams]
    limit: int | None = None
    repeats: int = 1
    minutes: float | None = None
    heads: Path | None = None
    resume: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.samplings[0]

    @property
    def contestants(self) -> list[str]:
        """Plain decoding, with which the others are compared, and then these, each once."""
        return list(dict.fromkeys([PLAIN, *self.names]))

    def resolved(self) -> MeasurementPlan:
        """Find the model's files, which may take a download."""
        return dataclasses.replace(self, config=resolved(self.config))

    def encoded(self, suite: str, question: Question) -> AskedQuestion:
        return AskedQuestion(suite, question, encode_text(tokenizer_of(self.config), question.prompt))

    def row_file(self, name: str, others: Sequence[str] = ()) -> RowFile:
        """Return a file of the folder for rows; with the first one, what is run and on which machine is recorded.
        others: further packages that are measured, with their versions.
        """
        return RowFile(
            self.out / name, lambda: write_about(self.out, self.config, self.samplings, self.repeats, others)
        )
