from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.text.stream import StopText


class Counted(str):
    """A text that counts how often a character of it is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> str:
        Counted.looks += 1
        return super().__getitem__(index)


@given(st.text("ab", min_size=1, max_size=5), st.lists(st.text("ab", max_size=4), max_size=8))
def test_what_is_matched_is_the_longest_end_of_the_text_that_may_become_the_stop_text(
    wanted: str, pieces: list[str]
) -> None:
    stop, text = StopText(wanted), ""
    for piece in pieces:
        found, before = stop.find(piece), len(text)
        text += piece
        at = text.find(wanted, max(0, before - len(wanted) + 1))
        assert found == (None if at < 0 else at - before)
        if found is not None:
            return
        assert stop.matched == max(n for n in range(len(wanted)) if text.endswith(wanted[:n]))


def test_a_stop_text_that_did_not_count_may_still_begin_the_next_one() -> None:
    stop = StopText("aba")
    assert stop.find("aba", counts=False) is None and stop.matched == 1
    assert stop.find("ba") == -1


def test_a_long_stop_text_costs_no_more_than_the_text_that_can_match() -> None:
    """The worst of cases: all of it may match until the last character."""
    stop = StopText(Counted("a" * 1000 + "b"))
    Counted.looks = 0
    for _ in range(500):
        assert stop.find("aaaa") is None
    assert Counted.looks <= 3 * 2000
    assert stop.find("b") == -1000
