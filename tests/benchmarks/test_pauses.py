from __future__ import annotations

from rich.console import Console

from benchmarks.pauses import Arrival, Decoding, measure, table
from engine.config import load


async def test_pauses_are_told_apart_by_when_they_began(tiny: str) -> None:
    config = load({"model": tiny, "method": "none", "transport": "inproc"}, {"verifier.threads": 1})
    [arrival] = await measure(config, 2, 300, 1, Console(quiet=True))
    assert len(arrival.usual_s) == 2 * 24 and len(arrival.beside_s) >= 2 and arrival.read_s > 0


def test_a_pause_counts_beside_the_prompt_where_a_part_of_it_does() -> None:
    decoding = Decoding.__new__(Decoding)
    decoding.times = [[0.0, 1.0, 3.0, 6.0, 10.0], [0.5, 2.5, 6.5]]
    assert decoding.beside_s(2.0, 4.0) == [2.0, 3.0, 2.0, 4.0]


def test_usual_pauses_are_those_of_the_same_emissions_however_many_came() -> None:
    decoding = Decoding.__new__(Decoding)
    decoding.times = [[float(number) for number in range(100)], [2.0 * number for number in range(37)]]
    assert decoding.usual_s() == [1.0] * 24 + [2.0] * 24


def test_the_longest_pause_is_told_in_usual_ones() -> None:
    arrival = Arrival([0.01, 0.01, 0.02], [0.01, 0.025], 1.0)
    assert (arrival.longest, arrival.longest_usual) == (2.5, 2.0)
    assert table([arrival]).row_count == 1
