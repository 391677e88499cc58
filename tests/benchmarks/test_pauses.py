from __future__ import annotations

from rich.console import Console

from benchmarks.pauses import Arrival, measure, table
from engine.config import load


async def test_pauses_are_told_apart_by_when_they_began(tiny: str) -> None:
    config = load({"model": tiny, "method": "none", "transport": "inproc"}, {"verifier.threads": 1})
    [arrival] = await measure(config, 2, 300, 1, Console(quiet=True))
    assert len(arrival.usual_s) >= 40 and len(arrival.beside_s) >= 4
    assert arrival.read_s > 0 and max(arrival.beside_s) <= arrival.read_s + max(arrival.usual_s)


def test_the_longest_pause_is_told_in_usual_ones() -> None:
    arrival = Arrival([0.01, 0.01, 0.02], [0.01, 0.025], 1.0)
    assert (arrival.longest, arrival.longest_usual) == (2.5, 2.0)
    assert table([arrival]).row_count == 1
