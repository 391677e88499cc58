"""`talon acceptance`: how far the target follows every method, at the same budget and cut to what pays, by replay.

The target answers once; every method then drafts for the same answers (`known_answers`). So a table of all heads takes
minutes. Speeds are computed, not measured: from the times of drafting in this process and the times of forwards, this
machine's or, for an accelerator to which further rows are free, simulated ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from rich.progress import Progress

from drafters.registry import build, check
from engine.config import Config, load
from engine.core.errors import ConfigError
from engine.core.methods import METHODS
from engine.core.tree import TokenTree
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import NOTHING, ForwardTime
from engine.model.target import Target

from ..report.tables import Table
from .contestants import AS_PUBLISHED
from .known_answers import KnownAnswer, follow

POSITIONS = 7  # drafted tokens of a chain
BUDGET = 60  # nodes of a tree, the root included
_CHAIN = {"drafter.growth.policy": "dynamic", "drafter.growth.top_k": 1, "drafter.growth.depth": POSITIONS - 1}
_TREE = {"drafter.growth.policy": "dynamic", "drafter.budget": BUDGET}
_ROWS = (1, 8, 16, 32, 64, 128)  # numbers of nodes whose verification is timed
_TITLES = {"tree": f"trees of {BUDGET}", "cut": "trees cut to what pays"}


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
        """Return the rounds of each suite, then all of them."""
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
        """The median time of a round's draft."""
        return median(r.draft_s for r in self.rounds)

    @property
    def speed_up(self) -> float:
        """The speed-up over plain decoding after the first round; rounds consist of drafting and the forward alone."""
        later = [r for r in self.rounds if not r.is_first] or self.rounds
        return sum(r.emitted * r.plain_s for r in later) / sum(r.draft_s + r.verify_s for r in later)

    def by_position(self) -> list[float]:
        """Return the share of right tokens at each position, given that all before were right."""
        found = []
        for position in range(1, POSITIONS + 1):
            asked = [r for r in self.rounds if r.emitted >= position and min(r.depth, r.room) >= position]
            if not asked:
                break
            found.append(mean(r.emitted > position for r in asked))
        return found


def simulation(found: Sequence[Accepted]) -> str:
    """Return what a title says where forwards are simulated; "" where they are this machine's."""
    simulated_ms = found[0].simulated_ms
    return "" if simulated_ms is None else f", simulated forwards of {simulated_ms:g} ms"


@dataclass(frozen=True)
class Way:
    """How a method drafts: a chain and a tree as published, or trees cut to the nodes that pay, as served."""

    method: str
    kind: str
    keys: Mapping[str, Any]

    @property
    def is_cut(self) -> bool:
        return self.kind == "cut"


def ways(methods: Sequence[str]) -> list[Way]:
    """List the ways of each method. A head drafts in three ways; merged heads (`name+suffix`) and methods without a
    model draft cut trees only.
    """
    found = []
    for name in methods:
        head, _, memory = name.partition("+")
        method = METHODS.get(head)
        if method is None or method.drafter is None or method.merges or (memory and not method.has_model):
            heads = [one for one, m in METHODS.items() if m.has_model and not m.merges]
            raise ConfigError(f"--methods: {name!r} drafts nothing that could be compared; heads: {', '.join(heads)}")
        if not method.has_model:
            found.append(Way(name, "cut", {"method": head}))
            continue
        if not memory:
            found.append(Way(name, "chain", AS_PUBLISHED | {"method": head} | _CHAIN))
            found.append(Way(name, "tree", AS_PUBLISHED | {"method": head} | _TREE))
        memories = memory.split("+") if memory else []
        found.append(Way(name, "cut", {"method": "hybrid", "drafter.head": head, "drafter.memories": memories}))
    return found


def layers_read(ways: Sequence[Way], config: Config) -> set[int]:
    """Return the hidden states that their heads read. ConfigError or ModelError for what cannot be compared."""
    settings = {way.method: load(config, dict(way.keys)) for way in ways if way.is_cut}
    for one in settings.values():
        check(one)
    layers: set[int] = set()
    for name, one in settings.items():
        drafter = build(one)
        if drafter.successors:
            raise ConfigError(
                f"--methods: {name!r} reads the target's likeliest tokens, which are not kept; leave it out"
            )
        layers.update(drafter.feature_layers)
    return layers


class Follower:
    """A method that drafts, in one way, for one answer after the other. costs: of this machine's forwards."""

    def __init__(self, way: Way, config: Config, seconds: Mapping[int, float]):
        """Load the method. seconds: of a forward, by its rows."""
        self.way, self.costs = way, CostModel(ForwardTime(dict(seconds)))
        self.drafter = build(load(config, dict(way.keys)))

    def rounds(self, request: int, known: KnownAnswer) -> Iterator[Drafted]:
        costs, room = self.costs, len(known.tokens) - 2

        def propose(request: int) -> TokenTree:
            tree = self.drafter.propose(request)
            return tree.keep(costs.paying_nodes([tree.confidence])[0]) if self.way.is_cut else tree

        followed = follow(self.drafter, request, known, propose, lambda: costs.rates(1, alone=False))
        for number, (verdict, draft_s) in enumerate(followed):
            tree, emitted = verdict.tree, len(verdict.tokens)
            costs.observe_round(1, len(tree), emitted, draft_s)
            shape = len(tree), int(tree.depths.max()), room, emitted
            verify_s, plain_s = costs.forward.seconds(len(tree)), costs.forward.seconds(1)
            yield Drafted(known.suite, *shape, draft_s, verify_s, plain_s, is_first=number == 0)
            room -= emitted


def accept_all(
    ways: Sequence[Way],
    config: Config,
    answers: Sequence[KnownAnswer],
    round_s: Callable[[], Mapping[int, float]],
    progress: Progress,
    simulated_ms: float | None = None,
) -> list[Accepted]:
    """Let all methods draft for every answer in turn, since a machine's speed changes. answers: of one temperature;
    round_s: times a forward of each of some numbers of rows; simulated_ms: the same for all of them instead.
    """

    def forward_s() -> Mapping[int, float]:
        return round_s() if simulated_ms is None else dict.fromkeys((1, 2 * BUDGET), simulated_ms / 1e3)

    temperature, seconds = answers[0].sampling.temperature, forward_s()
    followers = [Follower(way, config, seconds) for way in ways]
    found = [Accepted(way.method, way.kind, temperature, [], simulated_ms) for way in ways]
    task = progress.add_task(f"drafting, T = {temperature:g}", total=len(answers))
    for request, known in enumerate(answers):
        seconds = forward_s()
        for follower, accepted in zip(followers, found, strict=True):
            for rows, taken in seconds.items():
                follower.costs.forward.observe(rows, NOTHING, taken)
            accepted.rounds.extend(follower.rounds(request, known))
        progress.advance(task)
    return found


def time_forwards(target: Target) -> dict[int, float]:
    """Return the seconds that the target takes to verify some numbers of nodes after 256 tokens, by rows."""
    cache = target.new_cache(256 + _ROWS[-1])
    target.prefill(cache, [1] * 256)
    found = {}
    for rows in _ROWS:
        tree, took = TokenTree.chain(1, [1] * (rows - 1), [1.0] * (rows - 1)), []
        for _ in range(3):
            started = time.perf_counter()
            target.verify(cache, tree)
            took.append(time.perf_counter() - started)
        found[rows] = median(took)
    target.release(cache)
    return found


def positions_table(found: Sequence[Accepted]) -> Table:
    """Make a line for each head: what a chain accepts at each position, what a tree does, and what they
    take to draft.
    """
    rows = []
    for chain in (one for one in found if one.way == "chain"):
        tree = next(o for o in found if (o.method, o.temperature, o.way) == (chain.method, chain.temperature, "tree"))
        shares = [f"{share:.2f}" for share in chain.by_position()]
        rows.append(
            [
                chain.method,
                f"{chain.temperature:g}",
                *[*shares, *["-"] * POSITIONS][:POSITIONS],
                f"{chain.mat:.2f}",
                f"{tree.mat:.2f}",
                f"{1e3 * chain.draft_s:.1f}",
                f"{1e3 * tree.draft_s:.1f}",
            ]
        )
    columns = ("head", "T", *map(str, range(1, POSITIONS + 1)), "chain", "tree", "chain ms", "tree ms")
    return Table(f"Accepted by position of a chain; tokens a round of a chain and of a tree of {BUDGET}", columns, rows)


def suites_table(found: Sequence[Accepted], way: str) -> Table:
    """Make the table of tokens a round, suite by suite."""
    title = f"Tokens a round, {_TITLES[way]}"
    return _by_suite(title, found, way, lambda one: f"{one.mat:.2f}", "nodes", lambda one: f"{one.nodes:.1f}")


def speeds_table(found: Sequence[Accepted], way: str) -> Table:
    """Make the table of computed speed-ups, suite by suite."""
    draft_ms = ("draft ms", lambda one: f"{1e3 * one.draft_s:.1f}")
    title = f"Computed speed-up over plain decoding, {_TITLES[way]}"
    return _by_suite(title, found, way, lambda one: f"{one.speed_up:.2f}x", *draft_ms)


Cell = Callable[[Accepted], str]


def _by_suite(title: str, found: Sequence[Accepted], way: str, cell: Cell, last: str, last_cell: Cell) -> Table:
    """Make a line for each method: `cell` of each suite and of all rounds, then the column `last`."""
    suites = list(dict.fromkeys(r.suite for one in found for r in one.rounds))
    rows = []
    for one in (one for one in found if one.way == way):
        cells = [cell(part) if part.rounds else "-" for part in one.by_suite(suites)]
        rows.append([one.method, f"{one.temperature:g}", *cells, last_cell(one)])
    return Table(title + simulation(found), ("method", "T", *suites, "all", last), rows)


def tables(found: Sequence[Accepted]) -> list[Table]:
    """Return all tables that hold anything."""
    all_ = [positions_table(found), *(table(found, way) for table in (suites_table, speeds_table) for way in _TITLES)]
    return [table for table in all_ if table.rows]


def write(out: Path, found: Sequence[Accepted], shown: Sequence[Table]) -> None:
    """Write the rounds and the tables to the folder."""
    (out / "acceptance.json").write_bytes(msgspec.json.encode(found))
    (out / "acceptance.md").write_text("\n\n".join(f"{t.title}\n\n{t.markdown()}" for t in shown) + "\n", "utf8")
