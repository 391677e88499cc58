"""`talon growth`: the TALON paper's experiments on its growth rule, with a real head and target.

A few greedy answers are decoded once, with the target's hidden states. Every policy then drafts for the same answers
(`known_answers`), so a policy costs only its drafting.

The experiments: the gate mu, the budget N, the number of ungated layers k; a tree's KV memory compared with fixed
trees; and whether calibration by verdicts corrects a head that is overconfident at depth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from drafters.calibration import Calibrator
from drafters.heads.growth.policies import EAGLE_25, MEDUSA_63, Adaptive, Dynamic, Frontier, Policy, Static, Talon
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from engine.core.errors import ConfigError
from engine.core.outcomes import Following
from engine.core.tree import TokenTree
from engine.model.target import Target

from ..report.records import Grown, GrownRound
from .known_answers import KnownAnswer, follow

MUS = (0.003, 0.01, 0.03, 0.1, 0.3)
BUDGETS = (16, 32, 60, 96, 128)
UNGATED = (0, 1, 2, 3)
OVERCONFIDENCE = 0.5  # at depth d a chance p becomes p ** (1 / (1 + 0.5 d))
_BUCKETS = 16  # of chances, for the calibrator
ROWS = (1, 8, 16, 32, 64, 128)  # numbers of nodes whose verification is timed


class PolicySetting(NamedTuple):
    """group: the experiment; value: what is varied in it. overconfident, calibrated: of the head."""

    group: str
    value: str
    policy: Policy
    overconfident: float = 0.0
    calibrated: bool = False


def settings() -> Iterator[PolicySetting]:
    for mu in MUS:
        yield PolicySetting("mu", f"{mu:g}", Talon(mu=mu))
    for budget in BUDGETS:
        yield PolicySetting("N", str(budget), Talon(budget=budget))
    for ungated in UNGATED:
        yield PolicySetting("k", str(ungated), Talon(ungated=ungated))
    yield PolicySetting("policy", "talon", Talon())
    yield PolicySetting("policy", "adaptive path", Adaptive())
    yield PolicySetting("policy", "adaptive layer", Adaptive(gate="layer"))
    yield PolicySetting("policy", "dynamic 60", Dynamic())
    yield PolicySetting("policy", "static 25", Static(EAGLE_25))
    yield PolicySetting("policy", "static 63", Static(MEDUSA_63))
    for policy, name in ((Talon(), "talon"), (Adaptive(), "adaptive")):
        yield PolicySetting("head", f"{name}, as it is", policy)
        yield PolicySetting("head", f"{name}, too sure", policy, OVERCONFIDENCE)
        yield PolicySetting("head", f"{name}, too sure, calibrated", policy, OVERCONFIDENCE, True)


class Doubt:
    """Changes the head's chances in a tree (`drafters.heads.growth.lockstep.Advice`): they are raised with the depth,
    then calibrated. said: (node, token) -> the depth and the bucket of a chance before it was calibrated.
    """

    def __init__(self, overconfident: float, calibrator: Calibrator | None):
        self.overconfident, self.calibrator = overconfident, calibrator
        self.begin()

    def begin(self) -> None:
        """The next tree."""
        self.said: dict[tuple[int, int], tuple[int, int]] = {}
        self._depth = {-1: -1}

    def worth_drafting(self, frontier: Frontier) -> bool:
        return True

    def candidates(self, node: int, parent: int, token: int, seen: Following | None) -> Following:
        depth = self._depth[node] = self._depth[parent] + 1
        if seen is None:
            return [], []
        chances = [chance ** (1 / (1 + self.overconfident * depth)) for chance in seen[1]]
        if self.calibrator is not None:
            for place, (candidate, chance) in enumerate(zip(seen[0], chances, strict=True)):
                kind = self.said[node, candidate] = depth, int(chance**0.5 * (_BUCKETS - 1e-9))
                chances[place] = self.calibrator.chance(*kind, chance)
        order = sorted(range(len(chances)), key=lambda place: -chances[place])
        return [seen[0][place] for place in order], [chances[place] for place in order]

    def learn(self, tree: TokenTree, path: Sequence[int], tokens: Sequence[int]) -> None:
        """The nodes of `path` were accepted, and after each the target chose one of `tokens`."""
        if self.calibrator is not None:
            for node, said in zip(path, tokens, strict=True):
                for child in tree.children(node):
                    token = int(tree.tokens[child])
                    if (kind := self.said.get((node, token))) is not None:
                        self.calibrator.observe(*kind, token == said)


def replay(head: Head, setting: PolicySetting, answers: Sequence[KnownAnswer]) -> Grown:
    """One policy over all answers."""
    drafter, rounds = HeadDrafter(head, setting.policy), list[GrownRound]()
    doubt = Doubt(setting.overconfident, Calibrator() if setting.calibrated else None)
    advice = [doubt] if setting.overconfident or setting.calibrated else []

    def propose(request: int) -> TokenTree:
        doubt.begin()
        trees: list[TokenTree] = drafter.propose_many([(request, ())], advice=advice)
        return trees[0]

    for number, known in enumerate(answers):
        steps = drafter.steps
        for verdict, draft_s in follow(drafter, number, known, propose):
            tree, emitted = verdict.tree, len(verdict.tokens)
            doubt.learn(tree, verdict.path, verdict.tokens)
            promised, depth = float(tree.confidence.sum()), int(tree.depths.max())
            rounds.append(GrownRound(known.suite, len(tree), depth, emitted, promised, draft_s, drafter.steps - steps))
            steps = drafter.steps
    return Grown(setting.group, setting.value, rounds)


def time_rounds(target: Target) -> dict[int, float]:
    """Seconds that the target takes to verify `ROWS` nodes after 256 tokens, by rows."""
    cache = target.new_cache(256 + ROWS[-1])
    target.prefill(cache, [1] * 256)
    found = {}
    for rows in ROWS:
        tree, took = TokenTree.chain(1, [1] * (rows - 1), [1.0] * (rows - 1)), []
        for _ in range(3):
            started = time.perf_counter()
            target.verify(cache, tree)
            took.append(time.perf_counter() - started)
        found[rows] = median(took)
    target.release(cache)
    return found


def speed(grown: Grown, round_s: Sequence[float]) -> float:
    """Tokens per second, drafting and verifying in turns, every tree verified whole. Uses the median of the drafting
    times, which a busy machine changes least.
    """
    verify_s = np.interp([r.nodes for r in grown.rounds], ROWS, round_s)
    return grown.mean("emitted") / (grown.draft_s + float(verify_s.mean()))


def position_bytes(target: Target) -> int:
    """Bytes of the keys and values of one position."""
    config = target.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width: int = 2 * config.num_hidden_layers * heads * size * target.model.dtype.itemsize
    return width


def table(grown: Sequence[Grown], round_s: Sequence[float], of_position: int) -> Table:
    """A line for each setting. KV: of a round's tree, mean and largest; unused: nodes that were not accepted."""
    lines = Table(title="TALON's rule: every policy on the same recorded answers")
    columns = ("", "", "MAT", "promised", "nodes", "depth", "KV KiB", "largest", "unused", "steps", "draft ms", "tok/s")
    for place, column in enumerate(columns):
        lines.add_column(column, justify="left" if place < 2 else "right")
    for before, one in pairwise([None, *grown]):
        assert one is not None
        nodes = one.mean("nodes")
        lines.add_row(
            "" if before is not None and before.group == one.group else one.group,
            one.value,
            f"{one.mean('emitted'):.2f}",
            f"{one.mean('promised'):.2f}",
            f"{nodes:.1f}",
            f"{one.mean('depth'):.1f}",
            f"{nodes * of_position / 1024:.0f}",
            f"{max(r.nodes for r in one.rounds) * of_position / 1024:.0f}",
            f"{1 - one.mean('emitted') / nodes:.0%}",
            f"{one.mean('steps'):.1f}",
            f"{1e3 * one.draft_s:.2f}",
            f"{speed(one, round_s):.1f}",
        )
    return lines


def write(out: Path, grown: Sequence[Grown], round_s: Sequence[float], of_position: int) -> None:
    """Print the table; write the figure and the rounds to the folder."""
    try:
        from ..report.tree_plots import growth_figure
    except ImportError as error:
        raise ConfigError(f"no picture: {error}; pip install 'talon-decoding[bench]'") from None
    Console(width=120).print(table(grown, round_s, of_position))
    kept: dict[str, Any] = {"rows": ROWS, "round_s": list(round_s), "position_bytes": of_position, "grown": grown}
    (out / "growth.json").write_bytes(msgspec.json.encode(kept))
    growth_figure(grown, {(g.group, g.value): speed(g, round_s) for g in grown}, of_position, out / "growth.png")
