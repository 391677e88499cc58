"""Which changes of prompts keep the text behind them from being found in the prefix cache."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from engine.server.reading.changes import ChangedSpan, ChangedText
from engine.server.serving import Serving

RNG = random.Random(1)


def words(count: int) -> list[int]:
    return RNG.choices(range(1000, 150_000), k=count)


HEAD, TOOLS, QUESTION = words(40), words(2000), words(30)


def after(*prompts: list[int]) -> ChangedSpan | None:
    """What is said of the last of these prompts."""
    changed = ChangedText()
    return [changed.compare(prompt) for prompt in prompts][-1]


@pytest.mark.parametrize(("before", "now"), [(5, 5), (5, 7), (7, 0), (0, 7), (300, 500)])
def test_a_changing_text_before_a_long_one_that_stays_is_found(before: int, now: int) -> None:
    changing = words(now)
    change = after([*HEAD, *words(before), *TOOLS, *QUESTION], [*HEAD, *changing, *TOOLS, *words(9)])
    assert change == ChangedSpan(len(HEAD), len(changing), len(TOOLS))


@pytest.mark.parametrize(
    "prompts",
    [
        ([*HEAD, *TOOLS, *QUESTION], [*HEAD, *TOOLS, *QUESTION, *words(500)]),
        ([*HEAD, *TOOLS, *QUESTION], [*HEAD, *TOOLS, *words(300)]),
        ([*HEAD, *TOOLS, *QUESTION], [*HEAD, *TOOLS, *QUESTION]),
        ([*HEAD, *words(3), *TOOLS[:100]], [*HEAD, *words(3), *TOOLS[:100]]),
        ([*HEAD, 1, *TOOLS[:100], *words(300)], [*HEAD, 2, *TOOLS[:100], *words(300)]),
        ([*HEAD, *words(3), *TOOLS], [*HEAD, *words(600), *TOOLS]),
        ([*HEAD, *TOOLS],),
        ([1], [2]),
    ],
    ids=["goes on", "other question", "the same", "short", "short, then others", "another text", "the first", "tiny"],
)
def test_what_costs_no_long_text_is_no_change(prompts: tuple[list[int], ...]) -> None:
    assert after(*prompts) is None


def test_what_another_prompt_has_brought_into_the_cache_is_not_lost() -> None:
    """The text of the first turns up again while a second one is remembered."""
    one, other = [*HEAD, 1, 2, 3, *TOOLS], [*HEAD, 4, 5, 6, *TOOLS]
    assert after(one, other, one) is None


def test_a_conversation_that_grows_takes_one_place_among_those_compared() -> None:
    changed, prompt = ChangedText(), [*HEAD, 1, *TOOLS]
    for _ in range(50):
        assert changed.compare(prompt) is None
        prompt = [*prompt, *words(20)]
    assert len(changed._prompts) == 1
    assert changed.compare([*HEAD, 2, *TOOLS]) == ChangedSpan(len(HEAD), 1, len(TOOLS))


def test_changes_are_counted_by_their_place_and_the_first_there_is_news() -> None:
    changed = ChangedText()
    assert [changed.add(ChangedSpan(at, 3, 500), "text") for at in (40, 40, 90)] == [True, False, True]
    assert changed.times == {40: 2, 90: 1} and changed.tokens == 1500
    for at in range(100, 200):
        changed.add(ChangedSpan(at, 1, 200), None)
    assert len(changed.times) == len(changed.latest) == 32 and 199 in changed.times


@pytest.mark.parametrize(("prompts", "keys"), [(True, ("key",)), (True, ()), (False, ())])
def test_a_text_is_shown_to_clients_only_where_the_log_may_hold_it_and_there_are_no_keys(
    prompts: bool, keys: tuple[str, ...]
) -> None:
    told: list[str] = []
    changed, log = ChangedText(), SimpleNamespace(prompts=prompts, warn=told.append)
    vocabulary, settings = SimpleNamespace(texts=lambda tokens: f"{tokens}"), SimpleNamespace(api_keys=keys)
    serving: Any = SimpleNamespace(changed=changed, log=log, vocabulary=vocabulary, settings=settings)
    for number in (1, 2):
        Serving._compare(serving, [*HEAD, number, *TOOLS])
    assert changed.latest[len(HEAD)][1] == ("[2]" if prompts and not keys else None)
    assert told[0].endswith(": '[2]'" if prompts else "come later")
