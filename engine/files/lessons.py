"""The folder of what a server learns, and what it and the process that trains say to each other.

texts/OWNER holds prompts and answers (`engine.files.kept_texts`), heads/OWNER the owner's head, what its last lesson
came to and which texts no lesson trains on, lessons/OWNER the lesson under way: one at a time, removed at its end.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.files.kept_texts import count_texts
from engine.files.removal import removed
from engine.files.whole_file import write_whole

LEAST_TEXTS = 32
"""New texts of an owner from which a lesson begins, and half as many as it knows already."""


class LessonPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A lesson. model: the target's directory; name: what it is called; identity: of its weights. folder: of what the
    server learns; owner: whose texts, by the name on the disk. general: the head that drafts where none is learned, ""
    if there is none. recipe: of the training. most_bytes: what the lesson may take on the disk.
    """

    model: str
    name: str
    identity: str
    folder: str
    owner: str
    general: str
    recipe: str
    most_bytes: int


class LessonOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a lesson came to. texts: that it used, of which held_out only measure; steps: of training. before, after:
    tokens a round of a chain on the texts held out, by the head so far (1 without one) and by the new one. installed:
    it is better.
    """

    texts: int
    held_out: int
    steps: int
    before: float
    after: float
    installed: bool


NOTHING_LEARNED = LessonOutcome(texts=0, held_out=0, steps=0, before=1.0, after=1.0, installed=False)


class LessonReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the process says at its end: what came of the lesson, or why nothing did."""

    outcome: LessonOutcome | None = None
    error: str = ""


@dataclass(frozen=True)
class LearnedFolder:
    """The folder at `path`, whose parts need not be there."""

    path: Path

    @property
    def texts(self) -> Path:
        return self.path / "texts"

    @property
    def heads(self) -> Path:
        return self.path / "heads"

    def lesson(self, owner: str) -> Path:
        return self.path / "lessons" / owner

    def lesson_texts(self, owner: str) -> Path:
        """Return the file of the texts that a lesson has read. Its time is that of the latest text there was then."""
        return self.lesson(owner) / "texts.jsonl"

    def boundary(self, owner: str) -> Path:
        """Return the file with the first place, in the order of all texts, that no lesson of the owner trains on."""
        return self.heads / owner / "boundary"

    def due(self) -> list[str]:
        """Return the owners of whom there is enough to learn: the one of an unfinished lesson first, then those with
        most new texts.
        """
        unfinished = [place.name for place in self.path.glob("lessons/*")]
        new = {shelf.name: self._new_texts(shelf) for shelf in self.texts.glob("*") if shelf.name not in unfinished}
        return [*unfinished, *sorted((owner for owner in new if new[owner]), key=lambda owner: -new[owner])]

    def _new_texts(self, shelf: Path) -> int:
        """Return how many texts were kept since the owner's last lesson read them; 0 if too few for another lesson."""
        record, known, since_ns = self._record(shelf.name), 0, 0
        with suppress(OSError, msgspec.DecodeError):
            known = msgspec.json.decode(record.read_bytes(), type=LessonOutcome).texts
            since_ns = record.stat().st_mtime_ns
        new = count_texts(shelf, since_ns)
        return new if new >= max(LEAST_TEXTS, known // 2) else 0

    def end_lesson(self, owner: str, outcome: LessonOutcome) -> None:
        """Keep what the lesson came to, and remove what it needed. The record gets the time of the texts: later ones,
        which came during the lesson, are new.
        """
        record = self._record(owner)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, msgspec.json.encode(outcome))
        with suppress(FileNotFoundError):
            read_ns = self.lesson_texts(owner).stat().st_mtime_ns
            os.utime(record, ns=(read_ns, read_ns))
        removed(self.lesson(owner))

    def drop_lesson(self, owner: str) -> None:
        """Give up a lesson: another begins once there are new texts."""
        removed(self.lesson(owner))
        with suppress(OSError):
            self.end_lesson(owner, NOTHING_LEARNED)

    def _record(self, owner: str) -> Path:
        return self.heads / owner / "lesson.json"
