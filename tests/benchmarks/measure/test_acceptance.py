"""Acceptance by replay: rounds are those of the target, figures are those of the rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from benchmarks.measure.acceptance import (
    POSITIONS,
    Accepted,
    Drafted,
    accept_all,
    layers_read,
    positions_table,
    speeds_table,
    suites_table,
    tables,
    ways,
    write,
)
from benchmarks.measure.known_answers import KnownAnswer, accepted, answer, follow, record
from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Dynamic
from drafters.heads.head_drafter import HeadDrafter
from drafters.lookup.prompt_lookup import PromptLookup
from engine.config import load
from engine.core.errors import ConfigError, ModelError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.target import Target
from tests.drafters.conftest import _float32_heads, target, target_dir  # noqa: F401
from tests.drafters.heads.test_eagle import eagle3

PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]
CHEAP, DEAR = {1: 1.0, 64: 1.0 + 1e-6}, {1: 1.0, 64: 64.0}
"""Seconds of a forward where further rows are free, and where each costs as much as the first."""
BY_SUITE = (suites_table, speeds_table)
REPEATING = KnownAnswer("one", [1, 2, 3], [4, 1, 2, 3, 4, 1, 2, 3, 4, 9], SamplingParams(max_tokens=16))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_follows_a_known_answer_has_the_rounds_that_the_target_gives(
    temperature: float,
    tmp_path: Path,
    target_dir: Path,  # noqa: F811
    target: TargetWeights,  # noqa: F811
) -> None:
    model, head = Target.load(str(target_dir), "float32"), eagle3(tmp_path, target)
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    layers = (*head.feature_layers, 0)
    (known,) = record(model, layers, {"one": [PROMPT]}, sampling, Progress(disable=True))
    true = list(answer(model, HeadDrafter(head, Dynamic(budget=20)), PROMPT, sampling, 20))
    assert known.tokens == [token for verdict in true for token in verdict.tokens]
    drafter = HeadDrafter(head, Dynamic(budget=20))
    rounds = [(len(v.tree), v.path, v.tokens) for v, _ in follow(drafter, 0, known, drafter.propose)]
    assert rounds == [(len(verdict.tree), verdict.path, verdict.tokens) for verdict in true[1:]]


def test_a_prompt_that_leaves_no_room_is_left_out_and_that_none_fits_is_an_error(target_dir: Path) -> None:  # noqa: F811
    model = Target.load(str(target_dir), "float32")
    suites, given = {"one": [[1] * (model.context - 8), PROMPT]}, (SamplingParams(max_tokens=4), Progress(disable=True))
    assert [known.prompt for known in record(model, (), suites, *given)] == [PROMPT]
    with pytest.raises(ConfigError, match="--questions: no prompt fits"):
        record(model, (), {"one": [[1] * model.context]}, *given)


def test_a_verdict_carries_the_states_of_the_layers_that_its_drafter_reads() -> None:
    states = np.arange(2 * 3 * 1, dtype=np.uint16).reshape(2, 3, 1)
    known = KnownAnswer("one", [1], [2, 3], SamplingParams(), (0, 4, 8), states)
    assert (found := known.features((8, 0), 1, 2)) is not None and found.tolist() == [[[5], [3]]]
    assert known.features((), 0, 2) is None


def test_the_last_token_of_an_answer_is_a_bonus() -> None:
    chain = TokenTree.chain(7, [1, 2, 3], [0.9, 0.8, 0.7])
    assert accepted(chain, [1, 2, 3]) == [0, 1, 2]
    assert accepted(chain, [1, 5, 3]) == [0, 1]
    assert accepted(chain, [1]) == [0]


def test_rounds_of_an_answer_add_up_to_it() -> None:
    drafter = PromptLookup()
    verdicts = [verdict for verdict, _ in follow(drafter, 0, REPEATING, drafter.propose)]
    assert [token for verdict in verdicts for token in verdict.tokens] == REPEATING.tokens[1:]
    assert max(len(verdict.tokens) for verdict in verdicts) > 2


def test_trees_are_cut_to_what_forwards_of_this_machine_make_worth_it() -> None:
    config, (way,) = load({"model": "any"}), ways(["pld"])
    (cheap,), (dear,) = (
        accept_all([way], config, [REPEATING] * 2, lambda seconds=seconds: seconds, Progress(disable=True))
        for seconds in (CHEAP, DEAR)
    )
    assert cheap.nodes > dear.nodes and cheap.mat > dear.mat
    assert (
        sum(r.emitted for r in cheap.rounds) == sum(r.emitted for r in dear.rounds) == 2 * (len(REPEATING.tokens) - 1)
    )


def test_simulated_forwards_take_the_same_time_whatever_their_rows_and_every_figure_says_so() -> None:
    config, (way,) = load({"model": "any"}), ways(["pld"])
    (cheap,), (simulated,) = (
        accept_all([way], config, [REPEATING] * 2, lambda seconds=seconds: seconds, Progress(disable=True), ms)
        for seconds, ms in ((CHEAP, None), (DEAR, 20.0))
    )
    assert [r.nodes for r in simulated.rounds] == [r.nodes for r in cheap.rounds]
    assert {r.verify_s for r in simulated.rounds} == {r.plain_s for r in simulated.rounds} == {0.02}
    assert simulated.simulated_ms == 20 and cheap.simulated_ms is None
    assert all(table([simulated], "cut").title.endswith(", simulated forwards of 20 ms") for table in BY_SUITE)
    assert not any("simulated" in table([cheap], "cut").title for table in BY_SUITE)


def test_forwards_are_timed_again_for_every_answer_for_all_methods() -> None:
    plain_s = iter([1.0, 1.0, 1.25])
    config, both = load({"model": "any"}), ways(["pld", "pld"])
    found = accept_all(both, config, [REPEATING] * 2, lambda: {1: next(plain_s), 64: 2.0}, Progress(disable=True))
    for one in found:
        assert one.rounds[0].plain_s == 1.0 < one.rounds[-1].plain_s <= 1.25


def test_the_first_round_of_an_answer_does_not_count_for_speed() -> None:
    first = Drafted("one", 1, 0, 9, 1, draft_s=9.0, verify_s=1.0, plain_s=1.0, is_first=True)
    later = Drafted("one", 2, 1, 8, 2, draft_s=0.0, verify_s=1.0, plain_s=1.0)
    assert Accepted("head", "cut", 0.0, [first, later]).speed_up == 2.0
    (found,) = accept_all(ways(["pld"]), load({"model": "any"}), [REPEATING] * 2, lambda: CHEAP, Progress(disable=True))
    assert sum(r.is_first for r in found.rounds) == 2 and found.rounds[0].is_first


def test_the_speed_up_counts_drafting_and_the_rows_of_a_forward() -> None:
    rounds = [Drafted("one", 4, 3, 9, emitted, draft_s=0.5, verify_s=1.5, plain_s=1.0) for emitted in (1, 3)]
    one = Accepted("head", "cut", 0.0, rounds)
    assert (one.mat, one.nodes, one.draft_s, one.speed_up) == (2.0, 4.0, 0.5, 1.0)


def test_a_position_counts_rounds_whose_tokens_before_it_were_right_and_that_could_have_held_it() -> None:
    def drafted(emitted: int, depth: int = 3, room: int = 9) -> Drafted:
        return Drafted("one", depth + 1, depth, room, emitted, 0.0, 1.0, 1.0)

    # of four, three are right at once; of these one goes on, one is too shallow and one answer ends
    one = Accepted("head", "chain", 0.0, [drafted(1), drafted(3), drafted(2, depth=1), drafted(2, room=1)])
    assert one.by_position() == [0.75, 1.0, 0.0]


def test_a_head_drafts_in_three_ways_and_merged_or_without_a_model_only_cut() -> None:
    assert [way.kind for way in ways(["eagle3"])] == ["chain", "tree", "cut"]
    (merged,), (memory,) = ways(["block+suffix"]), ways(["suffix"])
    assert merged.keys["drafter.memories"] == ["suffix"] and merged.keys["drafter.head"] == "block"
    assert memory.keys == {"method": "suffix"} and merged.is_cut and memory.is_cut


@pytest.mark.parametrize("name", ["none", "hybrid", "pld+suffix", "nobody", ""])
def test_what_is_no_method_that_drafts_is_refused_with_the_heads_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--methods: .* heads: .*eagle3"):
        ways(["pld", name])


def test_what_cannot_be_replayed_and_a_head_without_weights_are_refused_before_the_target_answers() -> None:
    with pytest.raises(ConfigError, match="--methods: 'recycling' reads the target's likeliest tokens"):
        layers_read(ways(["pld", "recycling"]), load({"model": "any"}))
    with pytest.raises((ConfigError, ModelError), match="drafter"):
        layers_read(ways(["eagle3"]), load({"model": "any", "drafter": {"path": "/gone"}}))


def test_tables_name_every_head_and_suite(tmp_path: Path) -> None:
    rounds = [Drafted(suite, 8, 7, 9, emitted, 0.002, 0.01, 0.01) for suite in ("gsm8k", "qa") for emitted in (1, 2, 4)]
    found = [Accepted(way.method, way.kind, 0.0, rounds) for way in ways(["block", "eagle3", "block+suffix"])]
    positions = positions_table(found)
    assert [row[0] for row in positions.rows] == ["block", "eagle3"]
    assert all(len(row) == len(positions.columns) for row in positions.rows)
    assert positions.rows[0][2 : 2 + POSITIONS] == ["0.67", "0.50", "1.00", "0.00", "-", "-", "-"]
    cut, speeds = suites_table(found, "cut"), speeds_table(found, "cut")
    assert [row[0] for row in cut.rows] == ["block", "eagle3", "block+suffix"] and cut.columns[2:4] == ("gsm8k", "qa")
    assert [row[2:5] for row in cut.rows] == [["2.33"] * 3] * 3 and [row[2:5] for row in speeds.rows] == [
        ["1.94x"] * 3
    ] * 3
    assert [row[0] for row in speeds_table(found, "tree").rows] == ["block", "eagle3"]
    shown = tables(found)
    assert len(shown) == 5
    write(tmp_path, found, shown)
    assert {file.name for file in tmp_path.iterdir()} == {"acceptance.json", "acceptance.md"}
