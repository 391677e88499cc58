"""What measurements find, as rows: reports and pictures read these and no measurement."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

import msgspec
import numpy as np

from engine.wire.messages import Tokens

POSITIONS = 7  # drafted tokens of a chain


class Drafted(msgspec.Struct, frozen=True):
    """One round. nodes, depth: of the tree verified; room: the most tokens it could have accepted before the answer
    ended; emitted: the bonus included. verify_s, plain_s: forwards of `nodes` rows and of one, between measured sizes.
    is_first: of its answer, in which a head reads the prompt.
    """

    suite: str
    nodes: int
    depth: int
    room: int
    emitted: int
    draft_s: float
    verify_s: float
    plain_s: float
    is_first: bool = False


class Accepted(msgspec.Struct, frozen=True):
    """A method's rounds, in one way and at one temperature. simulated_ms: the time of every forward, if simulated."""

    method: str
    way: str
    temperature: float
    rounds: list[Drafted]
    simulated_ms: float | None = None

    def by_suite(self, suites: Sequence[str]) -> list[Accepted]:
        """The rounds of each suite, then all of them."""
        parts = [msgspec.structs.replace(self, rounds=[r for r in self.rounds if r.suite == s]) for s in suites]
        return [*parts, self]

    @property
    def mat(self) -> float:
        """Mean tokens a round, the bonus included."""
        return mean(r.emitted for r in self.rounds)

    @property
    def nodes(self) -> float:
        return mean(r.nodes for r in self.rounds)

    @property
    def draft_s(self) -> float:
        """Median of a round."""
        return median(r.draft_s for r in self.rounds)

    @property
    def speed_up(self) -> float:
        """Over plain decoding, after the first round, rounds consisting of drafting and the forward alone."""
        later = [r for r in self.rounds if not r.is_first] or self.rounds
        return sum(r.emitted * r.plain_s for r in later) / sum(r.draft_s + r.verify_s for r in later)

    def by_position(self) -> list[float]:
        """The share of right tokens at each position, given that all before were right."""
        found = []
        for position in range(1, POSITIONS + 1):
            asked = [r for r in self.rounds if r.emitted >= position and min(r.depth, r.room) >= position]
            if not asked:
                break
            found.append(mean(r.emitted > position for r in asked))
        return found


def simulation(found: Sequence[Accepted]) -> str:
    """What a title says where forwards are simulated; "" where they are this machine's."""
    simulated_ms = found[0].simulated_ms
    return "" if simulated_ms is None else f", simulated forwards of {simulated_ms:g} ms"


class GrownRound(msgspec.Struct, frozen=True):
    """nodes: of the tree, the root included; promised: the tokens its confidences add up to."""

    suite: str
    nodes: int
    depth: int
    emitted: int
    promised: float
    draft_s: float
    steps: int


class Grown(msgspec.Struct, frozen=True):
    group: str
    value: str
    rounds: list[GrownRound]

    @property
    def draft_s(self) -> float:
        """Median seconds to draft a round's tree."""
        return median(r.draft_s for r in self.rounds)

    def mean(self, name: str, suite: str | None = None) -> float:
        return float(np.mean([getattr(r, name) for r in self.rounds if suite in (None, r.suite)] or [0.0]))


class Shape(msgspec.Struct, frozen=True):
    """One round. widths: drafted nodes at depth 1, 2, ...; emitted: tokens, the bonus included."""

    widths: list[int]
    emitted: int

    @property
    def nodes(self) -> int:
        """Number of nodes, root included, as a budget counts them."""
        return 1 + sum(self.widths)

    @property
    def depth(self) -> int:
        return len(self.widths)


class Forward(msgspec.Struct):
    """Milliseconds of a forward of `rows` rows: in total, in each part, and the least that the machine's memory and
    arithmetic allow.
    """

    rows: int
    total_ms: float
    products_ms: float
    attention_ms: float
    other_ms: float
    gaps_ms: float
    memory_ms: float
    arithmetic_ms: float
    int8_ms: float | None = None

    @property
    def outside(self) -> float:
        """Share of the forward that is not products."""
        return 1 - self.products_ms / self.total_ms


class Profile(msgspec.Struct):
    """weights_mb: the matrices that a forward reads, as stored in memory. behind: tokens of text before the rows."""

    model: str
    dtype: str
    device: str
    threads: int
    forward: str
    behind: int
    weights_mb: float
    read_gb_per_s: float
    multiply_adds_per_s: float
    forwards: list[Forward]
    activations: str = "bfloat16"
    int8_multiply_adds_per_s: float | None = None


class TimedAnswer(msgspec.Struct, frozen=True):
    """One answer and its timings. seconds: from the call to the last token. token_ms: for every token but the first,
    its share of the time since the last emission, as several may come at once. exact, inexact,
    activations: as in engine.answer.
    """

    token_ids: list[int]
    seconds: float
    rounds: int | None
    mean_accepted_tokens: float | None
    time_to_first_token_s: float | None
    verifier_busy: float | None
    draft_hit_rate: float | None
    log: list[Tokens]
    token_ms: list[float] = []
    exact: bool = False
    inexact: str = ""
    cached_tokens: int | None = None
    activations: str | None = None
