from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.verifier.bandit import Bandit
from engine.verifier.cost_model import NOTHING, Attended, CostModel

STEEP = {1: 0.010, 8: 0.020, 16: 0.040, 32: 0.080, 64: 0.160}
FLAT = {1: 0.010, 8: 0.0101, 16: 0.0102, 32: 0.0103, 64: 0.0104}


def chain(*chances: float) -> np.ndarray:
    """[nodes] float32: what the nodes of a chain are worth, the root first."""
    return np.cumprod([1.0, *chances]).astype(np.float32)


def at_rate(seconds: dict[int, float], tokens: int, around_s: float, requests: int = 1) -> CostModel:
    """A model that has seen many rounds."""
    model = CostModel(seconds)
    for _ in range(200):
        model.observe_round(requests, requests, requests * tokens, around_s)
    return model


def test_a_sure_chain_is_verified_whole() -> None:
    assert CostModel(STEEP).nodes_worth(chain(*[0.99] * 15), 1) == 16


def test_of_a_hopeless_tree_only_the_root_is_verified() -> None:
    assert CostModel(STEEP).nodes_worth(chain(0.01, 0.01), 1) == 1


def test_where_nodes_cost_nothing_all_are_verified() -> None:
    assert CostModel(FLAT).nodes_worth(chain(0.5, *[0.9] * 20), 1) == 22


def test_an_engine_with_more_tokens_a_second_verifies_less() -> None:
    """What a node costs is the text that could be written in its time."""
    slow, fast = at_rate(STEEP, 1, 0.1), at_rate(STEEP, 4, 0.0)
    worth = chain(*[0.8] * 12)
    assert slow.nodes_worth(worth, 1) > fast.nodes_worth(worth, 1)


def test_all_roots_are_verified_whatever_they_cost() -> None:
    worth = np.asarray([1.0] * 16 + [0.001] * 30, np.float32)
    assert CostModel(STEEP).nodes_worth(worth, 16) == 16


def test_trees_shrink_as_requests_become_many() -> None:
    """A node that fills up a cheap forward costs little, one that makes a full forward larger costs a whole step."""
    tree = chain(*[0.7] * 7)
    alone = CostModel(STEEP).nodes_worth(tree, 1)
    together = np.sort(np.tile(tree, 16))[::-1]
    assert alone > CostModel(STEEP).nodes_worth(together, 16) / 16


@given(st.lists(st.floats(0.001, 1), max_size=60), st.integers(1, 8))
def test_no_more_nodes_are_verified_than_there_are(chances: list[float], requests: int) -> None:
    worth = np.asarray([1.0] * requests + sorted(chances, reverse=True), np.float32)
    assert requests <= CostModel(STEEP).nodes_worth(worth, requests) <= len(worth)


def test_a_forward_between_two_sizes_costs_what_lies_between_theirs() -> None:
    model = CostModel(STEEP)
    expected = [0.010, 0.010 + 0.010 / 7, 0.020, 0.0225, 0.080]
    assert [model.seconds(n) for n in (1, 2, 8, 9, 32)] == pytest.approx(expected)
    assert model.seconds(128) == pytest.approx(0.320)


def test_a_key_costs_time_once_for_its_request_and_once_for_each_row_that_sees_it() -> None:
    model = CostModel(STEEP, read_s=2e-6, seen_s=1e-6)
    assert model.seconds(8, Attended(read=1000, seen=8 * 1000)) == pytest.approx(0.020 + 0.002 + 0.008)


def test_the_times_follow_what_forwards_take() -> None:
    model = CostModel(STEEP)
    for _ in range(100):
        model.observe_forward(7, NOTHING, 0.03)
    assert model.seconds(7) == pytest.approx(0.03, rel=1e-3)


def test_what_slows_one_forward_is_expected_to_slow_the_others() -> None:
    model = CostModel(STEEP)
    for _ in range(20):
        model.observe_forward(8, NOTHING, 1.2 * STEEP[8])
    assert STEEP[32] < model.seconds(32) < 1.2 * STEEP[32]


def test_a_forward_that_was_interrupted_changes_little() -> None:
    model = CostModel(STEEP)
    model.observe_forward(16, NOTHING, 100 * STEEP[16])
    assert model.seconds(16) < 1.03 * STEEP[16] and model.seconds(32) < 1.01 * STEEP[32]


def test_a_smaller_forward_never_costs_more_than_a_larger_one() -> None:
    model = CostModel({1: 0.010, 8: 0.090, 16: 0.040})
    assert model.seconds(8) == model.seconds(16) == 0.040


@given(st.floats(0.0, 0.1), st.integers(1, 8), st.integers(1, 16))
def test_the_rate_is_that_of_the_rounds_seen(around_s: float, tokens: int, requests: int) -> None:
    model = at_rate(STEEP, tokens, around_s, requests)
    expected = requests * tokens / (model.seconds(requests) + around_s)
    assert model.rate(requests) == pytest.approx(expected, rel=1e-2)


def test_measuring_stops_where_time_grows_with_the_rows() -> None:
    tried: list[int] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append(rows)
        return max(0.1, 0.045 * rows)

    model = CostModel.measure(forward_s, largest=60)
    assert set(tried) == {1, 4, 8, 16}
    assert model.seconds(32) == pytest.approx(2 * 0.72)


def test_what_takes_long_is_measured_once_at_start_up() -> None:
    tried: list[int] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append(rows)
        return 0.4 if rows < 8 else 0.6

    CostModel.measure(forward_s, largest=8)
    assert [tried.count(size) for size in (1, 4, 8)] == [4 + 6, 4 + 6, 1], "keys behind 1 and 4 rows"
    tried.clear()
    CostModel.measure(lambda rows, past: forward_s(rows + 8, past), largest=4)
    assert [tried.count(size + 8) for size in (1, 4)] == [1 + 2, 1], "keys behind 1 row"


def test_one_slow_first_forward_does_not_end_the_measuring() -> None:
    tried: list[int] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append(rows)
        return 0.1 if tried.count(rows) == 1 and rows == 8 else 0.01

    model = CostModel.measure(forward_s, largest=64)
    assert 64 in tried and model.seconds(8) == pytest.approx(0.01)


def test_what_keys_cost_is_measured_behind_a_long_text() -> None:
    model = CostModel.measure(lambda rows, past: 0.01 + past * 3e-7 + rows * past * 1e-7, largest=32)
    keys_s = model.seconds(8, Attended(500, 8 * 500)) - model.seconds(8)
    assert keys_s == pytest.approx(500 * 3e-7 + 8 * 500 * 1e-7)


def test_where_only_one_row_count_is_quick_each_row_is_thought_to_pay_for_its_keys() -> None:
    model = CostModel.measure(lambda rows, past: rows * (1.0 + past * 1e-4), largest=8)
    assert model.seconds(4, Attended(1000, 4 * 1000)) - model.seconds(4) == pytest.approx(0.4)


def test_keys_are_measured_as_far_as_a_text_can_reach() -> None:
    def forward_s(rows: int, past: int) -> float:
        assert past <= 200
        return 0.01 + past * 3e-7 + rows * past * 1e-7

    model = CostModel.measure(forward_s, largest=32, longest=200)
    keys_s = model.seconds(8, Attended(500, 8 * 500)) - model.seconds(8)
    assert keys_s == pytest.approx(500 * 3e-7 + 8 * 500 * 1e-7)
    short = CostModel.measure(lambda rows, past: 0.01 + past, largest=32, longest=20)
    assert short.seconds(8, Attended(500, 8 * 500)) == short.seconds(8)


def test_long_texts_do_not_make_rows_seem_expensive() -> None:
    def forward_s(rows: int, past: int) -> float:
        return 0.001 * rows + past * 1e-6 + rows * past * 1e-7

    model = CostModel.measure(forward_s, largest=32)
    before_s = model.seconds(16)
    for rows in (1, 4, 16) * 30:
        model.observe_forward(rows, Attended(2000, rows * 2000), forward_s(rows, 2000))
    assert model.seconds(16) == pytest.approx(before_s)


def test_a_round_behind_long_texts_yields_fewer_tokens_a_second() -> None:
    model = CostModel(STEEP, read_s=1e-6, seen_s=1e-6)
    for _ in range(200):
        model.observe_round(4, 4, 4, around_s=0.0, past=4 * 500)
    assert model.rate(4) == pytest.approx(4 / (model.seconds(4) + 4 * 500 * 2e-6))
    assert model.rates(4, alone=True).round_s == pytest.approx(model.seconds(4) + 4 * 500 * 2e-6)


def drafted(model: CostModel, wait_s: float, gained: int, rounds: int = 50) -> CostModel:
    """The model after rounds of four requests that waited so long, whose drafts brought so many tokens at no cost."""
    for _ in range(rounds):
        model.observe_wait(wait_s)
        model.observe_drafts(4, 4, 4, 4 + gained)
    return model


def test_drafts_that_come_quickly_and_bring_much_are_waited_for() -> None:
    model = drafted(at_rate(STEEP, 1, 0.001), 0.0005, 4)
    assert model.worth_waiting(4, 2)
    assert model.patience_s() > 0.0005


def test_drafts_that_bring_nothing_are_not_waited_for() -> None:
    assert not drafted(at_rate(STEEP, 1, 0.001), 0.02, 0).worth_waiting(4, 2)


def test_drafts_whose_rows_cost_more_than_they_bring_are_not_waited_for() -> None:
    model = at_rate(STEEP, 1, 0.001)
    for _ in range(50):
        model.observe_wait(0.0005)
        model.observe_drafts(4, 4, 64, 5)
    assert not model.worth_waiting(4, 4)
    assert any(model.worth_waiting(4, 4) for _ in range(2000))  # but they are tried again


@pytest.mark.parametrize("gained", [0, 2])
def test_drafts_not_waited_for_are_tried_again_some_time(gained: int) -> None:
    model = drafted(at_rate(STEEP, 1, 0.001), 0.02, gained)
    assert any(model.worth_waiting(8, 1) for _ in range(500))


def test_where_waiting_does_not_pay_it_is_tried_as_often_as_that_loses_a_hundredth() -> None:
    model = drafted(at_rate(STEEP, 1, 0.001), 0.02, 0)
    wait_s = (model.patience_s() - 0.002) / 2
    tried = sum(model.worth_waiting(4, 2) for _ in range(2000))
    assert tried * wait_s * model.rate(4) == pytest.approx(0.01 * 2000 * 4, rel=0.1)
    cheap = drafted(at_rate(STEEP, 1, 0.001), 0.0004, 0)
    assert sum(cheap.worth_waiting(4, 2) for _ in range(2000)) > 5 * tried


def test_a_draft_that_never_comes_is_waited_for_longer_and_longer_up_to_a_point() -> None:
    """A round that waits in vain cannot know how long it would have been."""
    model = at_rate(STEEP, 1, 0.001)
    before_s = model.patience_s()
    for _ in range(20):
        model.observe_wait(model.patience_s())
    assert model.patience_s() > before_s


def test_a_prompt_alone_is_read_in_whole_chunks() -> None:
    assert CostModel(STEEP).chunk_rows(0, 512) == 512


@pytest.mark.parametrize("requests", [1, 4, 8])
def test_a_prompt_holds_up_those_who_decode_at_most_twofold(requests: int) -> None:
    model = CostModel(STEEP)
    rows = model.chunk_rows(requests, 512)
    assert rows >= 1
    assert model.seconds(requests + rows) <= 2 * model.seconds(requests)


def test_a_prompt_is_read_in_smaller_chunks_the_more_of_it_lies_before_them() -> None:
    model = CostModel(STEEP, read_s=1e-6, seen_s=1e-6)
    chunks = [model.chunk_rows(8, 512, read=8 * 100, past=past) for past in (0, 500, 2000)]
    assert chunks == sorted(chunks, reverse=True) and chunks[0] > chunks[2] >= 1


def test_far_into_a_prompt_a_chunk_takes_at_least_as_long_as_its_keys_take_to_read() -> None:
    model = CostModel(STEEP, read_s=1e-5)
    assert model.chunk_rows(8, 512, past=3000) == 12  # 20 ms, 30 ms for 3,000 keys and as much for 12 rows
    assert model.chunk_rows(8, 512, past=6000) == 24


def test_the_keys_that_a_chunk_reads_count_once() -> None:
    model = CostModel(STEEP, read_s=1e-5)
    assert model.chunk_rows(8, 512, past=500) == 6  # 2 * 20 ms less 5 ms for 500 keys: 14 rows


def test_where_rows_cost_little_a_prompt_is_read_quickly() -> None:
    assert CostModel(FLAT).chunk_rows(4, 512) > 64


def test_until_something_was_measured_a_round_is_one_token_and_a_draft_is_worth_trying() -> None:
    model = CostModel(STEEP)
    assert model.rate(1) == 1 / STEEP[1]
    assert model.seconds(8, Attended(1000, 1000)) == STEEP[8]
    assert model.patience_s() == 0.002 and model.worth_waiting(1, 1)


def test_a_draft_is_at_first_thought_to_gain_half_a_token() -> None:
    model = CostModel(STEEP)
    while model.worth_waiting(1, 1):
        longest_s = model.patience_s()
        model.observe_wait(longest_s)
    assert longest_s == pytest.approx(2 * 0.5 * STEEP[1] + 0.002, abs=0.003)


def test_a_wait_counts_as_no_longer_than_the_round_would_have_waited() -> None:
    model = CostModel(STEEP)
    waits = []
    for _ in range(2):
        model.observe_wait(10.0)
        waits.append(model.patience_s())
    assert waits == pytest.approx([2 * 0.0002 + 0.002, 2 * 0.00042 + 0.002])


def test_a_draft_that_costs_nothing_is_waited_for() -> None:
    assert CostModel(STEEP).worth_waiting(1, 0)


def test_gains_are_averaged_over_the_requests_drafted_for() -> None:
    model = CostModel(STEEP)
    for _ in range(100):
        model.observe_drafts(2, 2, 2, 2 + 6)
    while model.patience_s() < 0.02:
        model.observe_wait(model.patience_s())
    assert model.worth_waiting(1, 1), "3 tokens for the time of 1"


def test_sizes_are_measured_in_turns_and_keys_in_turns_with_none_on_one_row_and_up_to_32() -> None:
    tried: list[tuple[int, int]] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append((rows, past))
        return 0.05

    CostModel.measure(forward_s, largest=32)
    behind = [(1, 0), (1, 1024), (32, 0), (32, 1024)]
    assert tried == [(rows, 0) for rows in (1, 4, 8, 16, 32)] * 4 + behind * 3
    tried.clear()
    CostModel.measure(forward_s, largest=33)
    assert tried[-12:] == behind * 3
    tried.clear()
    CostModel.measure(forward_s, largest=65)
    assert (tried.count((64, 0)), tried.count((65, 0))) == (4, 1)


def test_what_keys_take_is_not_what_the_machine_lost_earlier() -> None:
    seconds = iter([0.010] * 4 + [0.020, 0.030] + [0.011, 0.018] * 2)  # slow for a while, with and without keys
    model = CostModel.measure(lambda *_: next(seconds), largest=1)
    assert model.seconds(1, Attended(1024, 1024)) == pytest.approx(0.010 + 0.007)


def test_a_forward_that_takes_what_its_keys_cost_changes_nothing() -> None:
    model = CostModel(STEEP, seen_s=1e-5)
    model.observe_forward(8, Attended(1000, 8000), STEEP[8] + 0.08)
    assert model.seconds(8) == pytest.approx(STEEP[8])


def test_the_rate_counts_the_rows_that_rounds_had() -> None:
    model = CostModel(STEEP)
    for _ in range(200):
        model.observe_round(2, 8, 6, 0.0)
    assert model.rate(2) == pytest.approx(6 / STEEP[8], rel=1e-3)
    assert model.rate(4) == pytest.approx(12 / STEEP[16], rel=1e-3)


def test_behind_a_long_text_fewer_nodes_pay() -> None:
    model = CostModel(FLAT, seen_s=1e-4)
    worth = chain(*[0.9] * 20)
    assert model.nodes_worth(worth, 1) == 21
    assert model.nodes_worth(worth, 1, keys_each=1000) == 1
    assert CostModel(FLAT, seen_s=1.0).nodes_worth(worth, 1) == 21, "no text, no keys"


def test_a_prompts_chunk_fills_up_what_twice_the_time_allows() -> None:
    model = CostModel({1: 0.010, 8: 0.012, 16: 0.030, 32: 0.040})
    assert model.chunk_rows(1, 512) == 11 - 1
    assert model.chunk_rows(1, 3) == 3
    assert CostModel({1: 0.010, 8: 0.020, 16: 0.040}).chunk_rows(1, 512) == 8 - 1, "just twice"
    assert CostModel({1: 0.010, 2: 0.015, 8: 0.050}).chunk_rows(1, 512) == 1
    assert CostModel({1: 0.010, 8: 0.050}).chunk_rows(1, 512) == 1, "a prompt is never left unread"
    assert CostModel(STEEP).chunk_rows(64, 512) == 64, "beyond the largest size in proportion"


def test_a_chunk_has_to_look_at_what_stands_before_it() -> None:
    model = CostModel({1: 0.010, 64: 0.012}, seen_s=1e-6)
    for past in (0, 100, 1000, 5000):
        rows = model.chunk_rows(1, 512, past=past)
        taken_s = [model.seconds(1 + n, Attended(past, n * (past + n / 2))) for n in (rows, rows + 1)]
        assert taken_s[0] <= 2 * model.seconds(1) < taken_s[1]
    assert model.chunk_rows(1, 512, read=5000.0, past=1000) > model.chunk_rows(1, 512, past=1000), "they take time too"


def test_while_drafts_are_awaited_as_much_is_read_as_the_wait_has_time_for() -> None:
    model = CostModel({1: 0.010, 8: 0.012, 16: 0.030})
    assert model.rows_while_waiting(0.0, 512) == 0
    for _ in range(200):
        model.observe_wait(0.015)
    assert model.rows_while_waiting(0.0, 512) == 9
    assert model.rows_while_waiting(0.0, 5) == 5
    assert model.rows_while_waiting(0.004, 512) == 4
    assert model.rows_while_waiting(0.010, 512) == 0


def test_where_the_largest_forward_is_cheap_a_chunk_goes_on_in_proportion() -> None:
    assert CostModel({1: 0.010, 8: 0.0125}).chunk_rows(1, 512) == 12 - 1


def test_a_chunk_leaves_room_for_the_trees_that_are_verified_beside_it() -> None:
    model = CostModel(STEEP)
    for _ in range(200):
        model.observe_round(2, 8, 2, 0.0)
    assert model.chunk_rows(2, 512) == 16 - 8


def test_a_drafter_is_told_what_a_round_takes_and_brings() -> None:
    model = CostModel(STEEP)
    for _ in range(200):
        model.observe_round(2, 8, 6, 0.004)
    told = model.rates(2, alone=False)
    assert told.round_s == pytest.approx(STEEP[8] + 0.004, rel=1e-3)
    assert told.tokens == pytest.approx(3.0, rel=1e-3)
    assert told.token_s == pytest.approx((STEEP[8] + 0.004) / 6, rel=1e-3)


def test_a_round_of_roots_alone_takes_their_forward_and_nothing_is_waited_for() -> None:
    model = CostModel(STEEP)
    for _ in range(200):
        model.observe_round(1, 8, 3, 0.004)
    assert model.rates(1, alone=True).round_s == pytest.approx(STEEP[1])
    assert model.rates(8, alone=True).round_s == pytest.approx(STEEP[8])


def test_a_round_seen_before_the_next_draft_takes_no_time_less_than_none() -> None:
    model = CostModel(STEEP)
    for _ in range(200):
        model.observe_round(1, 1, 1, -0.004)
    assert model.rates(1, alone=False).round_s == pytest.approx(STEEP[1])
    assert model.rate(1) == pytest.approx(1 / STEEP[1])


def test_until_a_round_was_seen_it_takes_its_forward_and_brings_a_token() -> None:
    told = CostModel(STEEP).rates(1, alone=False)
    assert (told.round_s, told.tokens, told.token_s) == (STEEP[1], 1.0, STEEP[1])


@pytest.mark.parametrize(("mode", "ahead"), [("sequential", False), ("async", True), ("auto", False)])
def test_drafts_are_made_ahead_where_the_mode_says_so(mode: str, ahead: bool) -> None:
    assert CostModel(STEEP, mode=mode).ahead.second == ahead
    assert CostModel.measure(lambda rows, past: 0.01, largest=8, mode=mode).ahead.second == ahead


def test_in_turns_unless_told_otherwise() -> None:
    for model in (CostModel(STEEP), CostModel.measure(lambda rows, past: 0.01, largest=8)):
        for _ in range(200):
            model.observe_ways(1, 1, 0.5, rests=False)
        assert not model.ahead.second


def rounds_until_a_change(model: CostModel, choice: Bandit, round_s: float) -> int:
    before = choice.second
    for count in range(1, 500):
        model.observe_ways(1, 1, round_s, rests=True)
        if choice.second != before:
            return count
    raise AssertionError("it never changes")


def test_only_where_nothing_is_settled_the_ways_are_tried_in_turns() -> None:
    """Behind the first 24 rounds, in blocks of 16; whether a draft model rests, in blocks of 4."""
    model = CostModel(STEEP, mode="auto")
    model.observe_round(1, 1, 1, 10.0)  # much of a round is not the forward, so drafting ahead may pay
    assert rounds_until_a_change(model, model.ahead, 0.02) == 24 + 16
    model = CostModel(STEEP, mode="async")
    assert rounds_until_a_change(model, model.rest, 0.02) == 4
    for _ in range(200):
        model.observe_ways(1, 1, 0.5, rests=False)
    assert model.ahead.second


def test_drafting_ahead_is_not_tried_where_little_is_to_be_gained() -> None:
    model = CostModel(STEEP, mode="auto")
    for _ in range(200):
        model.observe_round(1, 1, 1, 0.001)
        model.observe_ways(1, 1, 0.0101, rests=False)
    assert not model.ahead.second


def test_a_way_that_brings_the_same_in_half_the_time_is_gone() -> None:
    model = CostModel(STEEP)
    for _ in range(400):
        model.observe_ways(8, 16, 0.02 if model.rest.second else 0.04, rests=True)
    assert model.rest.second


def test_rounds_of_other_sizes_are_compared_by_what_plain_decoding_takes() -> None:
    """Each way is gone with another number of requests, at the same ease."""
    model = CostModel({1: 0.010, 8: 0.040})
    seen = []
    for _ in range(400):
        requests = 8 if model.rest.second else 1
        model.observe_ways(requests, requests, 0.040 if model.rest.second else 0.012, rests=True)
        seen.append(model.rest.second)
    assert sum(seen[200:]) > 150, "8 in the time of plain decoding are better than one in 1.2 times its time"


def test_a_forward_between_two_sizes_says_as_much_of_each_as_it_is_near_to_it() -> None:
    model = CostModel({1: 0.010, 9: 0.020, 64: 0.050})
    model.observe_forward(3, NOTHING, 1.2 * model.seconds(3))
    moved = [model.seconds(size) / took - 1 for size, took in ((1, 0.010), (9, 0.020), (64, 0.050))]
    assert moved == pytest.approx([0.2 * (0.03 + 0.07 * 0.75), 0.2 * (0.03 + 0.07 * 0.25), 0.2 * 0.03])


def test_a_chunk_at_the_beginning_of_a_prompt_looks_at_nothing_before_it() -> None:
    model = CostModel({1: 0.010, 64: 0.012}, seen_s=1e-5)
    assert model.chunk_rows(1, 512) == model.chunk_rows(1, 512, past=0) > model.chunk_rows(1, 512, past=5)


def test_what_those_who_decode_look_at_counts_for_each_of_their_rows() -> None:
    model = CostModel({1: 0.010, 64: 0.012}, seen_s=1e-6)
    before = model.chunk_rows(2, 512, read=4000.0)
    for _ in range(200):
        model.observe_round(2, 16, 2, 0.0)
    assert model.chunk_rows(2, 512, read=4000.0) > before, "a longer round leaves more time"


def test_a_prompt_alone_is_read_in_parts_where_a_whole_chunk_would_take_many_seconds() -> None:
    model = CostModel({1: 0.5, 64: 4.0, 128: 8.0})
    rows = model.chunk_rows(0, 512)
    assert 64 < rows < 128 and model.seconds(rows) <= 5.0
    assert CostModel({1: 30.0}).chunk_rows(0, 512) == 1, "a prompt is never left unread"


def test_what_one_more_row_costs_is_its_time_in_tokens() -> None:
    model = CostModel({1: 0.010, 33: 0.042})
    assert model.rates(1, alone=False).row_tokens == pytest.approx(0.001 / 0.010)
    assert model.rates(1, alone=True).row_tokens == pytest.approx(0.001 / 0.010), "of a usual round"
    assert model.rates(2, alone=False).row_tokens == pytest.approx(0.001 * 2 / 0.011), "a round for two has two rows"
    assert CostModel({1: 0.01, 64: 0.01}).rates(1, alone=False).row_tokens == 0
    assert CostModel({1: 0.01, 64: 0.01}, seen_s=1e-6).rates(1, alone=False).row_tokens == 0, "no text, no keys"


STAIRCASE = {1: 0.010, 16: 0.0101, 64: 0.010, 128: 0.020, 256: 0.040}


@pytest.mark.parametrize(
    ("rows", "slices"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3), (192, 3), (300, 5)]
)
def test_rows_that_run_in_slices_take_the_time_of_whole_slices(rows: int, slices: int) -> None:
    assert CostModel(STAIRCASE, forward_sizes=(64,)).seconds(rows) == pytest.approx(0.010 * slices)


def test_of_rows_that_run_in_slices_as_many_are_verified_as_fill_one() -> None:
    """A row after the 64th costs a whole slice, one before it nothing."""
    worth = np.array([1.0] * 4 + [0.05] * 96, np.float32)
    assert CostModel(STAIRCASE, forward_sizes=(64,)).nodes_worth(worth, 4) == 64


def test_a_forward_of_few_rows_tells_what_a_whole_slice_takes() -> None:
    model = CostModel(STAIRCASE, forward_sizes=(64,))
    for _ in range(200):
        model.observe_forward(5, NOTHING, 0.012)
    assert model.seconds(64) == pytest.approx(0.012, rel=0.01) and model.seconds(1) == model.seconds(64)


def test_a_largest_size_within_the_first_slice_is_known_as_that_slice() -> None:
    model = CostModel.measure(lambda rows, past: 0.010, largest=40, forward_sizes=(64,))
    assert model.seconds(40) == pytest.approx(0.010) and model.seconds(65) == pytest.approx(0.020)


SIZES = (16, 64, 256)


@pytest.mark.parametrize(
    ("rows", "taken_s"),
    [(1, 0.01), (16, 0.01), (17, 0.02), (64, 0.02), (65, 0.03), (256, 0.03), (300, 0.03 * 320 / 256), (512, 0.06)],
)
def test_rows_take_the_time_of_the_least_forward_that_holds_them(rows: int, taken_s: float) -> None:
    model = CostModel({4: 0.01, 16: 0.011, 64: 0.02, 128: 0.03}, forward_sizes=SIZES)
    assert model.seconds(rows) == pytest.approx(taken_s)


def test_of_rows_that_are_padded_as_many_are_verified_as_fill_the_least_forward_worth_it() -> None:
    model = CostModel({16: 0.01, 64: 0.02, 256: 0.08}, forward_sizes=SIZES)
    assert model.nodes_worth(np.array([1.0] * 4 + [0.01] * 200, np.float32), 4) == 16
    assert model.nodes_worth(np.array([1.0] * 4 + [0.1] * 200, np.float32), 4) == 64


def test_every_size_that_a_forward_may_have_is_measured() -> None:
    seen: set[int] = set()

    def forward_s(rows: int, past: int) -> float:
        seen.add(rows)
        return 0.010

    CostModel.measure(forward_s, largest=1024, forward_sizes=(16, 64, 256, 512, 1024))
    assert {16, 64, 256, 512, 1024} <= seen
