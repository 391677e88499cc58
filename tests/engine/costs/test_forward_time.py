from __future__ import annotations

import pytest

from engine.costs.forward_time import NOTHING, Attended, ForwardTime

STEEP = {1: 0.010, 8: 0.020, 16: 0.040, 32: 0.080, 64: 0.160}


def test_a_forward_between_two_sizes_costs_what_lies_between_theirs() -> None:
    model = ForwardTime(STEEP)
    expected = [0.010, 0.010 + 0.010 / 7, 0.020, 0.0225, 0.080]
    assert [model.seconds(n) for n in (1, 2, 8, 9, 32)] == pytest.approx(expected)
    assert model.seconds(128) == pytest.approx(0.320)


def test_a_key_costs_time_once_for_its_request_and_once_for_each_row_that_sees_it() -> None:
    model = ForwardTime(STEEP, read_s=2e-6, seen_s=1e-6)
    assert model.seconds(8, Attended(read=1000, seen=8 * 1000)) == pytest.approx(0.020 + 0.002 + 0.008)


def test_the_times_follow_what_forwards_take() -> None:
    model = ForwardTime(STEEP)
    for _ in range(100):
        model.observe(7, NOTHING, 0.03)
    assert model.seconds(7) == pytest.approx(0.03, rel=1e-3)


def test_a_forward_that_was_interrupted_changes_little() -> None:
    model = ForwardTime(STEEP)
    model.observe(16, NOTHING, 100 * STEEP[16])
    assert model.seconds(16) < 1.03 * STEEP[16] and model.seconds(32) < 1.01 * STEEP[32]


def test_a_smaller_forward_never_costs_more_than_a_larger_one() -> None:
    model = ForwardTime({1: 0.010, 8: 0.090, 16: 0.040})
    assert model.seconds(8) == model.seconds(16) == 0.040


def test_measuring_stops_where_time_grows_with_the_rows() -> None:
    tried: list[int] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append(rows)
        return max(0.1, 0.045 * rows)

    model = ForwardTime.measure(forward_s, largest=60)
    assert set(tried) == {1, 4, 8}
    assert model.seconds(32) == pytest.approx(4 * 0.36)


def test_what_takes_long_is_measured_twice_at_start_up_and_keys_once() -> None:
    tried: list[tuple[int, int]] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append((rows, past))
        return 0.03

    ForwardTime.measure(forward_s, largest=8)
    assert tried == [(1, 0)] * 2 + [(4, 0)] * 2 + [(8, 0)] * 2 + [(1, 0), (8, 0), (1, 1024), (8, 1024)]


def test_one_slow_first_forward_does_not_end_the_measuring() -> None:
    tried: list[int] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append(rows)
        return 0.1 if tried.count(rows) == 1 and rows == 8 else 0.01

    model = ForwardTime.measure(forward_s, largest=64)
    assert 64 in tried and model.seconds(8) == pytest.approx(0.01)


def test_where_only_one_row_count_is_quick_each_row_is_thought_to_pay_for_its_keys() -> None:
    model = ForwardTime.measure(lambda rows, past: rows * (1.0 + past * 1e-4), largest=8)
    assert model.seconds(4, Attended(1000, 4 * 1000)) - model.seconds(4) == pytest.approx(0.4)


def test_keys_are_measured_as_far_as_a_text_can_reach() -> None:
    def forward_s(rows: int, past: int) -> float:
        assert past <= 200
        return 0.01 + past * 3e-7 + rows * past * 1e-7

    model = ForwardTime.measure(forward_s, largest=32, longest=200)
    keys_s = model.seconds(8, Attended(500, 8 * 500)) - model.seconds(8)
    assert keys_s == pytest.approx(500 * 3e-7 + 8 * 500 * 1e-7)
    short = ForwardTime.measure(lambda rows, past: 0.01 + past, largest=32, longest=0)
    assert short.seconds(8, Attended(500, 8 * 500)) == short.seconds(8)


def test_short_forwards_are_measured_in_turns_and_keys_in_turns_with_none_on_one_row_and_up_to_32() -> None:
    tried: list[tuple[int, int]] = []

    def forward_s(rows: int, past: int) -> float:
        tried.append((rows, past))
        return 0.01

    ForwardTime.measure(forward_s, largest=32)
    sizes, behind = [(rows, 0) for rows in (1, 4, 8, 16, 32)], [(1, 0), (32, 0), (1, 1024), (32, 1024)]
    assert tried == [size for size in sizes for _ in range(2)] + sizes * 3 + behind * 3
    tried.clear()
    ForwardTime.measure(forward_s, largest=33)
    assert tried[-12:] == behind * 3
    tried.clear()
    ForwardTime.measure(forward_s, largest=65)
    assert (tried.count((64, 0)), tried.count((65, 0))) == (5, 5)


def test_what_keys_take_is_not_what_the_machine_lost_earlier() -> None:
    seconds = iter([0.010] * 5 + [0.020, 0.030] + [0.011, 0.018] * 2)  # slow for a while, with and without keys
    model = ForwardTime.measure(lambda *_: next(seconds), largest=1)
    assert model.seconds(1, Attended(1024, 1024)) == pytest.approx(0.010 + 0.007)


def test_a_forward_that_takes_what_its_keys_cost_changes_nothing() -> None:
    model = ForwardTime(STEEP, seen_s=1e-5)
    model.observe(8, Attended(1000, 8000), STEEP[8] + 0.08)
    assert model.seconds(8) == pytest.approx(STEEP[8])


def test_a_forward_between_two_sizes_says_as_much_of_each_as_it_is_near_to_it() -> None:
    model = ForwardTime({1: 0.010, 9: 0.020, 64: 0.050})
    model.observe(3, NOTHING, 1.2 * model.seconds(3))
    moved = [model.seconds(size) / took - 1 for size, took in ((1, 0.010), (9, 0.020), (64, 0.050))]
    assert moved == pytest.approx([0.2 * (0.03 + 0.07 * 0.75), 0.2 * (0.03 + 0.07 * 0.25), 0.2 * 0.03])


STAIRCASE = {1: 0.010, 16: 0.0101, 64: 0.010, 128: 0.020, 256: 0.040}


@pytest.mark.parametrize(("rows", "slices"), [(1, 1), (64, 1), (65, 2), (300, 5)])
def test_rows_that_run_in_slices_take_the_time_of_whole_slices(rows: int, slices: int) -> None:
    assert ForwardTime(STAIRCASE, forward_sizes=(64,)).seconds(rows) == pytest.approx(0.010 * slices)


def test_a_forward_of_few_rows_tells_what_a_whole_slice_takes() -> None:
    model = ForwardTime(STAIRCASE, forward_sizes=(64,))
    for _ in range(200):
        model.observe(5, NOTHING, 0.012)
    assert model.seconds(64) == pytest.approx(0.012, rel=0.01) and model.seconds(1) == model.seconds(64)


def test_a_largest_size_within_the_first_slice_is_known_as_that_slice() -> None:
    model = ForwardTime.measure(lambda rows, past: 0.010, largest=40, forward_sizes=(64,))
    assert model.seconds(40) == pytest.approx(0.010) and model.seconds(65) == pytest.approx(0.020)


SIZES = (16, 64, 256)


@pytest.mark.parametrize(
    ("rows", "taken_s"),
    [(1, 0.01), (16, 0.01), (17, 0.02), (64, 0.02), (65, 0.03), (256, 0.03), (300, 0.03 * 320 / 256), (512, 0.06)],
)
def test_rows_take_the_time_of_the_least_forward_that_holds_them(rows: int, taken_s: float) -> None:
    model = ForwardTime({4: 0.01, 16: 0.011, 64: 0.02, 128: 0.03}, forward_sizes=SIZES)
    assert model.seconds(rows) == pytest.approx(taken_s)


def test_every_size_that_a_forward_may_have_is_measured() -> None:
    seen: set[int] = set()

    def forward_s(rows: int, past: int) -> float:
        seen.add(rows)
        return 0.010

    ForwardTime.measure(forward_s, largest=1024, forward_sizes=(16, 64, 256, 512, 1024))
    assert {16, 64, 256, 512, 1024} <= seen
