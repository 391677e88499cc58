"""`talon acceptance`: how far the target follows every method, at the same budget and cut to what pays, by replay.

The target answers once; every method then drafts for the same answers (`known_answers`). So a table of all heads takes
minutes. Speeds are computed, not measured: from the times of drafting in this process and the times of forwards, this
machine's or, for an accelerator to which further rows are free, simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import Progress

from drafters.registry import build, check
from engine.config import Config, load
from engine.core.errors import ConfigError
from engine.core.methods import METHODS
from engine.core.tree import TokenTree
from engine.verifier.cost_model import CostModel
from engine.verifier.forward_time import NOTHING, ForwardTime
from engine.verifier.step_input import paying

from ..measure.contestants import AS_PUBLISHED
from ..report.records import POSITIONS, Accepted, Drafted, simulation
from ..report.tables import Table
from .known_answers import KnownAnswer, follow

BUDGET = 60  # nodes of a tree, the root included
_CHAIN = {"drafter.growth.policy": "dynamic", "drafter.growth.top_k": 1, "drafter.growth.depth": POSITIONS - 1}
_TREE = {"drafter.growth.policy": "dynamic", "drafter.budget": BUDGET}
_TITLES = {"tree": f"trees of {BUDGET}", "cut": "trees cut to what pays"}


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
    """A head drafts in three ways. Merged heads (`name+suffix`) and methods without a model: cut only."""
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
    """The hidden states that their heads read. ConfigError or ModelError for what cannot be compared."""
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
        """seconds: of a forward, by its rows."""
        self.way, self.costs = way, CostModel(ForwardTime(dict(seconds)))
        self.drafter = build(load(config, dict(way.keys)))

    def rounds(self, request: int, known: KnownAnswer) -> Iterator[Drafted]:
        costs, room = self.costs, len(known.tokens) - 2

        def propose(request: int) -> TokenTree:
            tree = self.drafter.propose(request)
            return tree.keep(paying([tree.confidence], costs)[0]) if self.way.is_cut else tree

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
    """Every answer by all methods in turn, since a machine's speed changes. answers: of one temperature; round_s: times
    a forward of each of some numbers of rows; simulated_ms: the same for all of them instead.
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


def positions_table(found: Sequence[Accepted]) -> Table:
    """A line for each head: what a chain accepts at each position, what a tree does, and what they take to draft."""
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
    """Tokens a round, suite by suite."""
    title = f"Tokens a round, {_TITLES[way]}"
    return _by_suite(title, found, way, lambda one: f"{one.mat:.2f}", "nodes", lambda one: f"{one.nodes:.1f}")


def speeds_table(found: Sequence[Accepted], way: str) -> Table:
    """The computed speed-up, suite by suite."""
    draft_ms = ("draft ms", lambda one: f"{1e3 * one.draft_s:.1f}")
    title = f"Computed speed-up over plain decoding, {_TITLES[way]}"
    return _by_suite(title, found, way, lambda one: f"{one.speed_up:.2f}x", *draft_ms)


Cell = Callable[[Accepted], str]


def _by_suite(title: str, found: Sequence[Accepted], way: str, cell: Cell, last: str, last_cell: Cell) -> Table:
    """A line for each method: `cell` of each suite and of all rounds, then the column `last`."""
    suites = list(dict.fromkeys(r.suite for one in found for r in one.rounds))
    rows = []
    for one in (one for one in found if one.way == way):
        cells = [cell(part) if part.rounds else "-" for part in one.by_suite(suites)]
        rows.append([one.method, f"{one.temperature:g}", *cells, last_cell(one)])
    return Table(title + simulation(found), ("method", "T", *suites, "all", last), rows)


def tables(found: Sequence[Accepted]) -> list[Table]:
    """All that hold anything."""
    all_ = [positions_table(found), *(table(found, way) for table in (suites_table, speeds_table) for way in _TITLES)]
    return [table for table in all_ if table.rows]


def write(out: Path, found: Sequence[Accepted], shown: Sequence[Table]) -> None:
    """The rounds, the tables and a picture go to the folder."""
    (out / "acceptance.json").write_bytes(msgspec.json.encode(found))
    (out / "acceptance.md").write_text("\n\n".join(f"{t.title}\n\n{t.markdown()}" for t in shown) + "\n", "utf8")
    try:
        from ..report.tree_plots import acceptance_figure
    except ImportError as error:
        raise ConfigError(f"no picture: {error}; pip install 'talon-decoding[bench]'") from None
    acceptance_figure(found, out / "acceptance.png")
