"""Rounds of tokens become an answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.answer import Answer
from engine.core.params import SamplingParams
from engine.text.stream import TextStream
from engine.wire.messages import Ready, Tokens
from tests.conftest import tiny_tokenizer

TOKENIZER = tiny_tokenizer()  # a token is a byte


def round_of(text: str, finish_reason: str | None = None, **more: Any) -> Tokens:
    """A round that brought the tokens of `text`."""
    counts = {"request": 1, "round": 0, "nodes": 1, "hit": False, "round_us": 1, "forward_us": 1, "draft_us": 0}
    tokens = tuple(TOKENIZER(text)["input_ids"])
    more = {"sources": (0,) * len(tokens), **more}
    return Tokens(tokens=tokens, finish_reason=finish_reason, busy_us=1, at_us=1, **counts, **more)


@pytest.mark.parametrize("rounds", [["a", "b", "c", "a", "b", "c"], ["ab", "cabc"], ["abcabc"]])
@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "abca"), (6, "abcabc")])
def test_a_stop_string_counts_if_it_ends_after_min_tokens_whatever_a_round_brings(
    rounds: list[str], min_tokens: int, text: str
) -> None:
    answer = Answer(TextStream(TOKENIZER, ("bc",)), 1, 0.0, Ready(), SamplingParams(min_tokens=min_tokens))
    shown = ""
    for number, brought in enumerate(rounds, 1):
        shown += answer.add(round_of(brought, "length" if number == len(rounds) else None)).text
        if answer.finish_reason is not None:
            break
    assert shown == answer.result().text == text
    assert answer.finish_reason == ("length" if text == "abcabc" else "stop")


@pytest.mark.parametrize("first", ["<|unused|>", "\u2581"])
def test_the_stop_string_that_ended_an_answer_is_named_whatever_tokens_came_before(first: str) -> None:
    answer = Answer(TextStream(TOKENIZER, ("x", "bc", "c")), 1, 0.0, Ready(), SamplingParams())
    answer.add(round_of(f"{first}ab"))
    answer.add(round_of("c"))
    assert (answer.result().finish_reason, answer.result().stop_text) == ("stop", "bc")


def test_an_answer_whose_end_token_is_a_stop_string_too_has_ended_by_itself() -> None:
    end, *_ = TOKENIZER("<|end|>")["input_ids"]
    for brought, reason, ending in (
        ("ab<|end|>", "eos", ("eos", "")),
        ("ab<|end|>", None, ("stop", "<|end|>")),  # the end token is ignored
        ("ab<|user|>c<|end|>", "eos", ("stop", "<|user|>")),
    ):
        stops = TextStream(TOKENIZER, ("<|end|>", "<|user|>"))
        answer = Answer(stops, 1, 0.0, Ready(eos_tokens=(end,)), SamplingParams())
        assert answer.add(round_of(brought, reason)).text == answer.result().text == "ab"
        assert (answer.result().finish_reason, answer.result().stop_text) == ending


def test_a_verifier_that_was_replaced_counts_its_busy_time_from_nothing() -> None:
    answer = Answer(TextStream(TOKENIZER), 1, 0.0, Ready(), SamplingParams())
    for text, at_us, busy_us in (("a", 0, 50), ("b", 100, 110), ("c", 200, 5), ("d", 300, 65)):
        round_ = round_of(text, "length" if text == "d" else None)
        answer.add(msgspec.structs.replace(round_, at_us=at_us, busy_us=busy_us))
    assert answer.result().metrics.verifier_busy == pytest.approx((60 + 60) / 300)
