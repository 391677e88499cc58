"""`talon acceptance`: how far the target follows every method, at the same budget and cut to what pays, by replay.

The target answers once; every method then drafts for the same answers (`known_answers`). So a table of all heads takes
minutes. Speeds are computed, not measured: from the times of drafting in this process and the times of forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from rich.progress import Progress

from drafters.base import Drafter
from drafters.registry import METHODS, build, check
from engine.config import Config, load
from engine.cost_model import CostModel
from engine.errors import ConfigError
from engine.round import paying
from engine.target import Target
from engine.tree import TokenTree
from engine.trust import Trust

from .contestants import AS_PUBLISHED
from .growth import ROWS, time_rounds
from .known_answers import Known, follow
from .tables import Table

POSITIONS = 7  # drafted tokens of a chain
BUDGET = 60  # nodes of a tree, the root included
_CHAIN = {"drafter.growth.policy": "dynamic", "drafter.growth.top_k": 1, "drafter.growth.depth": POSITIONS - 1}
_TREE = {"drafter.growth.policy": "dynamic", "drafter.budget": BUDGET}


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
    """Heads draft in all three ways, `name+suffix` is a head merged with retrieval; what has no model is cut only."""
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
    """The target's hidden states that their heads read. Raises what a head that cannot be loaded raises."""
    settings = [load(config, dict(way.keys)) for way in ways]
    for one in settings:
        check(one)
    return {layer for one in settings if METHODS[one.method].merges for layer in build(one).feature_layers}


class Drafted(msgspec.Struct, frozen=True):
    """One round. nodes, depth: of the tree verified; room: the most tokens it could have accepted before the answer
    ended; emitted: the bonus included. verify_s: the forward of `nodes` rows, by the cost model."""

    suite: str
    nodes: int
    depth: int
    room: int
    emitted: int
    draft_s: float
    verify_s: float


class Accepted(msgspec.Struct, frozen=True):
    """A method's rounds, in one way and at one temperature. plain_s: a round of plain decoding."""

    method: str
    way: str
    temperature: float
    plain_s: float
    rounds: list[Drafted]

    def by_suite(self) -> list[Accepted]:
        """The rounds of each suite, then all of them."""
        suites = dict.fromkeys(r.suite for r in self.rounds)
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
        """Over plain decoding, rounds consisting of drafting and the forward alone."""
        taken_s = sum(r.draft_s + r.verify_s for r in self.rounds)
        return sum(r.emitted for r in self.rounds) * self.plain_s / taken_s

    def by_position(self) -> list[float]:
        """The share of right tokens at each position, given that all before were right."""
        found = []
        for position in range(1, POSITIONS + 1):
            asked = [r for r in self.rounds if r.emitted >= position and min(r.depth, r.room) >= position]
            if not asked:
                break
            found.append(mean(r.emitted > position for r in asked))
        return found


def accept(way: Way, config: Config, answers: Sequence[Known], seconds: Mapping[int, float]) -> Accepted:
    """One method, in one way, over all answers. seconds: of a forward, by its rows."""
    drafter, costs = build(load(config, dict(way.keys))), CostModel(dict(seconds))
    plain_s, rounds = costs.seconds(1), list[Drafted]()
    for request, known in enumerate(answers):
        rounds += _rounds(drafter, request, known, costs, way.is_cut)
    return Accepted(way.method, way.kind, answers[0].sampling.temperature, plain_s, rounds)


def _rounds(drafter: Drafter, request: int, known: Known, costs: CostModel, cut: bool) -> Iterator[Drafted]:
    trust = Trust()

    def propose(request: int) -> TokenTree:
        tree = drafter.propose(request)
        return tree.keep(paying([trust.worth(tree)], costs)[0]) if cut else tree

    room = len(known.tokens) - 2
    for verdict, draft_s in follow(drafter, request, known, propose):
        tree, emitted = verdict.tree, len(verdict.tokens)
        trust.learn(float(trust.worth(tree).sum()), emitted)
        costs.observe_round(1, len(tree), emitted, draft_s)
        yield Drafted(known.suite, len(tree), int(tree.depths.max()), room, emitted, draft_s, costs.seconds(len(tree)))
        room -= emitted


def accept_all(
    ways: Sequence[Way], config: Config, target: Target, answers: Mapping[float, Sequence[Known]], progress: Progress
) -> list[Accepted]:
    """answers: by temperature. Forwards are timed before each way, since a machine's speed changes."""
    asked = [(way, some) for some in answers.values() for way in ways]
    task, found = progress.add_task("drafting", total=len(asked)), []
    for way, some in asked:
        seconds = dict(zip(ROWS, time_rounds(target), strict=True))
        found.append(accept(way, config, some, seconds))
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
    columns = ("head", "T", *map(str, range(1, POSITIONS + 1)), "chain", "tree", "ms", "tree ms")
    return Table(f"Accepted by position of a chain; tokens a round of a chain and of a tree of {BUDGET}", columns, rows)


def suites_table(found: Sequence[Accepted], way: str) -> Table:
    """Tokens a round, suite by suite."""
    rows = [
        [one.method, f"{one.temperature:g}", *[f"{part.mat:.2f}" for part in one.by_suite()], f"{one.nodes:.1f}"]
        for one in found
        if one.way == way
    ]
    title = f"Tokens a round, trees of {BUDGET}" if way == "tree" else "Tokens a round, trees cut to what pays"
    return Table(title, ("method", "T", *_suites(found), "all", "nodes"), rows)


def speeds_table(found: Sequence[Accepted]) -> Table:
    """The computed speed-up of trees that are cut, suite by suite."""
    rows = []
    for one in (one for one in found if one.way == "cut"):
        speeds = [f"{part.speed_up:.2f}x" for part in one.by_suite()]
        rows.append([one.method, f"{one.temperature:g}", *speeds, f"{1e3 * one.draft_s:.1f}"])
    title = "Computed speed-up over plain decoding, trees cut to what pays"
    return Table(title, ("method", "T", *_suites(found), "all", "draft ms"), rows)


def _suites(found: Sequence[Accepted]) -> list[str]:
    return list(dict.fromkeys(r.suite for r in found[0].rounds))


def write(out: Path, found: Sequence[Accepted]) -> list[Table]:
    """The tables; the rounds and a picture go to the folder."""
    tables = [positions_table(found), suites_table(found, "tree"), suites_table(found, "cut"), speeds_table(found)]
    tables = [table for table in tables if table.rows]
    try:
        from .tree_plots import acceptance_figure
    except ImportError as error:
        raise ConfigError(f"no picture: {error}; pip install 'talon-decoding[bench]'") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "acceptance.json").write_bytes(msgspec.json.encode(found))
        (out / "acceptance.md").write_text("\n\n".join(f"{t.title}\n\n{t.markdown()}" for t in tables) + "\n", "utf8")
        acceptance_figure(found, out / "acceptance.png")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}): name another folder") from None
    return tables
