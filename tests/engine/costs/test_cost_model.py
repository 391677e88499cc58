from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs.cost_model import CostModel
from engine.costs.forward_time import Attended, ForwardTime


def costs(seconds: dict[int, float], mode: str = "sequential", **forward: Any) -> CostModel:
    """A model of forwards that take so long."""
    return CostModel(ForwardTime(seconds, **forward), mode)


STEEP = {1: 0.010, 8: 0.020, 16: 0.040, 32: 0.080, 64: 0.160}


FLAT = {1: 0.010, 8: 0.0101, 16: 0.0102, 32: 0.0103, 64: 0.0104}


def chain(*probs: float) -> np.ndarray:
    """[nodes] float32: what the nodes of a chain are worth, the root first."""
    return np.cumprod([1.0, *probs]).astype(np.float32)


def at_rate(seconds: dict[int, float], tokens: int, around_s: float, requests: int = 1) -> CostModel:
    """A model that has seen many rounds."""
    model = costs(seconds)
    for _ in range(200):
        model.observe_round(requests, requests, requests * tokens, around_s)
    return model


@pytest.mark.parametrize(
    ("seconds", "worth", "requests", "verified"),
    [
        (STEEP, chain(*[0.99] * 15), 1, 16),
        (STEEP, chain(0.01, 0.01), 1, 1),
        (FLAT, chain(0.5, *[0.9] * 20), 1, 22),
        (STEEP, np.array([1.0] * 16 + [0.001] * 30, np.float32), 16, 16),
    ],
    ids=["a sure chain", "a hopeless tree", "nodes that cost nothing", "all roots, whatever they cost"],
)
def test_as_many_nodes_are_verified_as_pay(
    seconds: dict[int, float], worth: np.ndarray, requests: int, verified: int
) -> None:
    assert costs(seconds).count_paying(worth, requests) == verified


def test_an_engine_with_more_tokens_a_second_verifies_less() -> None:
    """What a node costs is the text that could be written in its time."""
    slow, fast = at_rate(STEEP, 1, 0.1), at_rate(STEEP, 4, 0.0)
    worth = chain(*[0.8] * 12)
    assert slow.count_paying(worth, 1) > fast.count_paying(worth, 1)


@given(st.floats(0.0, 0.1), st.integers(1, 8), st.integers(1, 16))
def test_the_rate_is_that_of_the_rounds_seen(around_s: float, tokens: int, requests: int) -> None:
    model = at_rate(STEEP, tokens, around_s, requests)
    expected = requests * tokens / (model.forward.seconds(requests) + around_s)
    assert model.rate(requests) == pytest.approx(expected, rel=1e-2)


def test_a_round_behind_long_texts_yields_fewer_tokens_a_second() -> None:
    model = costs(STEEP, read_s=1e-6, seen_s=1e-6)
    for _ in range(200):
        model.observe_round(4, 4, 4, around_s=0.0, past=4 * 500)
    assert model.rate(4) == pytest.approx(4 / (model.forward.seconds(4) + 4 * 500 * 2e-6))
    assert model.rates(4, alone=True).round_s == pytest.approx(model.forward.seconds(4) + 4 * 500 * 2e-6)


def test_far_into_a_prompt_a_chunk_takes_at_least_as_long_as_its_keys_take_to_read() -> None:
    model = costs(STEEP, read_s=1e-5)
    assert model.chunk_rows(8, 512, past=3000) == 12  # 20 ms, 30 ms for 3,000 keys and as much for 12 rows
    assert model.chunk_rows(8, 512, past=6000) == 24
    assert model.chunk_rows(8, 512, past=500) == 6  # 2 * 20 ms less 5 ms for 500 keys, which count once: 14 rows


def test_a_wait_counts_as_no_longer_than_the_round_would_have_waited() -> None:
    model = costs(STEEP)
    waits = []
    for _ in range(2):
        model.observe_wait(10.0)
        waits.append(model.patience_s())
    assert waits == pytest.approx([2 * 0.0002 + 0.002, 2 * 0.00042 + 0.002])


def test_the_rate_counts_the_rows_that_rounds_had() -> None:
    model = costs(STEEP)
    for _ in range(200):
        model.observe_round(2, 8, 6, 0.0)
    assert model.rate(2) == pytest.approx(6 / STEEP[8], rel=1e-3)
    assert model.rate(4) == pytest.approx(12 / STEEP[16], rel=1e-3)


def test_behind_a_long_text_fewer_nodes_pay() -> None:
    model = costs(FLAT, seen_s=1e-4)
    worth = chain(*[0.9] * 20)
    assert model.count_paying(worth, 1) == 21
    assert model.count_paying(worth, 1, keys_each=1000) == 1
    assert costs(FLAT, seen_s=1.0).count_paying(worth, 1) == 21, "no text, no keys"


@pytest.mark.parametrize(
    ("seconds", "requests", "most", "rows"),
    [
        ({1: 0.010, 8: 0.012, 16: 0.030, 32: 0.040}, 1, 512, 11 - 1),
        ({1: 0.010, 8: 0.012, 16: 0.030, 32: 0.040}, 1, 3, 3),
        ({1: 0.010, 8: 0.020, 16: 0.040}, 1, 512, 8 - 1),  # just twice
        ({1: 0.010, 2: 0.015, 8: 0.050}, 1, 512, 1),
        ({1: 0.010, 8: 0.050}, 1, 512, 1),  # a prompt is never left unread
        (STEEP, 64, 512, 64),  # beyond the largest size in proportion
        ({1: 0.010, 8: 0.0125}, 1, 512, 12 - 1),
        (STEEP, 0, 512, 512),  # alone, in whole chunks
        ({1: 30.0}, 0, 512, 1),
    ],
)
def test_a_prompts_chunk_fills_up_what_twice_the_time_allows(
    seconds: dict[int, float], requests: int, most: int, rows: int
) -> None:
    assert costs(seconds).chunk_rows(requests, most) == rows


def test_a_chunk_has_to_look_at_what_stands_before_it() -> None:
    model = costs({1: 0.010, 64: 0.012}, seen_s=1e-6)
    for past in (0, 100, 1000, 5000):
        rows = model.chunk_rows(1, 512, past=past)
        taken_s = [model.forward.seconds(1 + n, Attended(past, n * (past + n / 2))) for n in (rows, rows + 1)]
        assert taken_s[0] <= 2 * model.forward.seconds(1) < taken_s[1]
    assert model.chunk_rows(1, 512, read=5000.0, past=1000) > model.chunk_rows(1, 512, past=1000), "they take time too"


def test_while_drafts_are_awaited_as_much_is_read_as_the_wait_has_time_for() -> None:
    model = costs({1: 0.010, 8: 0.012, 16: 0.030})
    assert model.rows_while_waiting(0.0, 512) == 0
    for _ in range(200):
        model.observe_wait(0.015)
    assert model.rows_while_waiting(0.0, 512) == 9
    assert model.rows_while_waiting(0.0, 5) == 5
    assert model.rows_while_waiting(0.004, 512) == 4
    assert model.rows_while_waiting(0.010, 512) == 0


def test_a_chunk_leaves_room_for_the_trees_that_are_verified_beside_it() -> None:
    model = costs(STEEP)
    for _ in range(200):
        model.observe_round(2, 8, 2, 0.0)
    assert model.chunk_rows(2, 512) == 16 - 8


def test_a_drafter_is_told_what_a_round_takes_and_brings() -> None:
    model = costs(STEEP)
    for _ in range(200):
        model.observe_round(2, 8, 6, 0.004)
    told = model.rates(2, alone=False)
    assert told.round_s == pytest.approx(STEEP[8] + 0.004, rel=1e-3)
    assert told.tokens == pytest.approx(3.0, rel=1e-3)
    assert told.token_s == pytest.approx((STEEP[8] + 0.004) / 6, rel=1e-3)


def test_a_round_of_roots_alone_takes_their_forward_and_nothing_is_waited_for() -> None:
    model = costs(STEEP)
    for _ in range(200):
        model.observe_round(1, 8, 3, 0.004)
    assert model.rates(1, alone=True).round_s == pytest.approx(STEEP[1])
    assert model.rates(8, alone=True).round_s == pytest.approx(STEEP[8])


def test_a_round_seen_before_the_next_draft_takes_no_time_less_than_none() -> None:
    model = costs(STEEP)
    for _ in range(200):
        model.observe_round(1, 1, 1, -0.004)
    assert model.rates(1, alone=False).round_s == pytest.approx(STEEP[1])
    assert model.rate(1) == pytest.approx(1 / STEEP[1])


def test_until_a_round_was_seen_it_takes_its_forward_and_brings_a_token() -> None:
    model = costs(STEEP)
    told = model.rates(1, alone=False)
    assert (told.round_s, told.tokens, told.token_s) == (STEEP[1], 1.0, STEEP[1])
    assert (model.rate(1), model.patience_s(), model.drafting_ahead) == (1 / STEEP[1], 0.002, False)
    assert model.forward.seconds(8, Attended(1000, 1000)) == STEEP[8]


@pytest.mark.parametrize(("mode", "ahead"), [("sequential", False), ("async", True), ("auto", False)])
def test_drafts_are_made_ahead_where_the_mode_says_so(mode: str, ahead: bool) -> None:
    assert costs(STEEP, mode=mode).drafting_ahead == ahead


def test_drafting_ahead_is_not_tried_where_little_is_to_be_gained() -> None:
    model = costs(STEEP, mode="auto")
    for _ in range(200):
        model.observe_round(1, 1, 1, 0.001)
        model.observe_mode(1, 1, 0.0101)
    assert not model.drafting_ahead


def test_a_chunk_at_the_beginning_of_a_prompt_looks_at_nothing_before_it() -> None:
    model = costs({1: 0.010, 64: 0.012}, seen_s=1e-5)
    assert model.chunk_rows(1, 512) == model.chunk_rows(1, 512, past=0) > model.chunk_rows(1, 512, past=5)


def test_what_those_who_decode_look_at_counts_for_each_of_their_rows() -> None:
    model = costs({1: 0.010, 64: 0.012}, seen_s=1e-6)
    before = model.chunk_rows(2, 512, read=4000.0)
    for _ in range(200):
        model.observe_round(2, 16, 2, 0.0)
    assert model.chunk_rows(2, 512, read=4000.0) > before, "a longer round leaves more time"


def test_a_prompt_alone_is_read_in_parts_where_a_whole_chunk_would_take_many_seconds() -> None:
    model = costs({1: 0.5, 64: 4.0, 128: 8.0})
    rows = model.chunk_rows(0, 512)
    assert 64 < rows < 128 and model.forward.seconds(rows) <= 5.0


def test_what_one_more_row_costs_is_its_time_in_tokens() -> None:
    model = costs({1: 0.010, 33: 0.042})
    assert model.rates(1, alone=False).row_tokens == pytest.approx(0.001 / 0.010)
    assert model.rates(1, alone=True).row_tokens == pytest.approx(0.001 / 0.010), "of a usual round"
    assert model.rates(2, alone=False).row_tokens == pytest.approx(0.001 * 2 / 0.011), "a round for two has two rows"
    assert costs({1: 0.01, 64: 0.01}).rates(1, alone=False).row_tokens == 0
    assert costs({1: 0.01, 64: 0.01}, seen_s=1e-6).rates(1, alone=False).row_tokens == 0, "no text, no keys"


def test_a_row_that_costs_nothing_costs_no_less_after_rounding() -> None:
    """The time of four rows is interpolated, and is larger by a rounding than the equal one that was measured."""
    told = costs({1: 0.0088, 4: 0.0258, 64: 0.0258}).rates(4, alone=False)
    assert told.row_tokens == 0


STAIRCASE = {1: 0.010, 16: 0.0101, 64: 0.010, 128: 0.020, 256: 0.040}


def test_of_rows_that_run_in_slices_as_many_are_verified_as_fill_one() -> None:
    """A row after the 64th costs a whole slice, one before it nothing."""
    worth = np.array([1.0] * 4 + [0.05] * 96, np.float32)
    assert costs(STAIRCASE, forward_sizes=(64,)).count_paying(worth, 4) == 64


SIZES = (16, 64, 256)


def test_of_rows_that_are_padded_as_many_are_verified_as_fill_the_least_forward_worth_it() -> None:
    model = costs({16: 0.01, 64: 0.02, 256: 0.08}, forward_sizes=SIZES)
    assert model.count_paying(np.array([1.0] * 4 + [0.01] * 200, np.float32), 4) == 16
    assert model.count_paying(np.array([1.0] * 4 + [0.1] * 200, np.float32), 4) == 64


def test_a_prompt_takes_as_long_as_the_forwards_that_read_it() -> None:
    model = costs(STEEP, seen_s=1e-6, read_s=1e-5)
    chunks = [(16, 64), (80, 64), (144, 20)]
    expected = sum(model.forward.seconds(rows, Attended(past, rows * (past + rows / 2))) for past, rows in chunks)
    assert model.reading_s(148, 16, 64) == pytest.approx(expected)
    assert model.reading_s(0, 16, 64) == 0


# Which nodes of a round's trees are verified.

DEAR, CHEAP = CostModel(ForwardTime({1: 1.0, 64: 64.0})), CostModel(ForwardTime({1: 1.0, 64: 1.001}))
"""Forwards where each row takes as long as the first, and where further rows are nearly free."""


def worth(*probs: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(probs, np.float32)


def test_every_tree_keeps_its_root_even_if_another_trees_nodes_are_worth_as_much() -> None:
    kept = DEAR.paying_nodes([worth(1.0, 1.0, 1.0), worth(1.0)])
    assert [nodes.tolist() for nodes in kept] == [[0], [0]]


def test_rows_that_cost_nothing_are_all_kept_and_the_likeliest_first_where_they_cost() -> None:
    trees = [worth(1.0, 0.3, 0.2), worth(1.0, 0.9)]
    assert [nodes.tolist() for nodes in CHEAP.paying_nodes(trees)] == [[0, 1, 2], [0, 1]]
    steep = CostModel(ForwardTime({1: 1.0, 2: 1.0, 3: 1.4, 64: 64.0}))
    assert [nodes.tolist() for nodes in steep.paying_nodes(trees)] == [[0], [0, 1]]


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=8), min_size=1, max_size=4), st.floats(0.0, 1.0))
def test_a_kept_nodes_better_nodes_are_kept_too(probs: list[list[float]], row_s: float) -> None:
    """Worth never grows along a path, so a node's ancestors are among the better ones."""
    trees = [worth(1.0, *sorted(some, reverse=True)) for some in probs]
    for nodes in CostModel(ForwardTime({1: 1.0, 64: 1.0 + 63 * row_s})).paying_nodes(trees):
        assert nodes.tolist() == list(range(len(nodes))) and len(nodes)
