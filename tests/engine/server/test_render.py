"""What the engine emits, as OpenAI's objects."""

from __future__ import annotations

from typing import Any

import pytest

from engine.answer import Answer, Piece, Result
from engine.config import Config
from engine.core.params import SamplingParams
from engine.server.render import TextRenderer, unnamed_sources
from engine.server.schema import CompletionRequest
from engine.server.translate import ChoiceRequest
from engine.server.vocabulary import Vocabulary
from engine.text.stream import TextStream
from engine.wire.messages import Ready, TokenLogprob
from tests.conftest import tiny_tokenizer
from tests.engine.test_answer import round_of

TOKENIZER = tiny_tokenizer()  # a token is a byte
LOGPROBS = SamplingParams(logprobs=0, prompt_logprobs=0)


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def format_of(wanted: list[ChoiceRequest]) -> TextRenderer:
    return TextRenderer("m", wanted, Vocabulary(TOKENIZER), CompletionRequest(model="m", prompt="x"))


def scored(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -1.0) for token in tokens_of(text))


def answered(sampling: SamplingParams, prompt: str, *rounds: str) -> tuple[Answer, list[Any]]:
    """An answer of these rounds, and its pieces."""
    answer = Answer(TextStream(TOKENIZER), 1, 0.0, Ready(), sampling)
    pieces = []
    for number, text in enumerate(rounds):
        prompts = () if number else scored(prompt)[1:]
        reason = "length" if number == len(rounds) - 1 else None
        pieces.append(answer.add(round_of(text, reason, logprobs=scored(text), prompt_logprobs=prompts)))
    return answer, pieces


def test_a_prompt_counts_once_for_its_choices_and_each_prompt_of_a_batch_counts() -> None:
    result: Result = answered(SamplingParams(), "Hi", "x")[0].result()
    first, second = tokens_of("Hi"), tokens_of("Hi")
    choices = [ChoiceRequest(prompt, SamplingParams()) for prompt in (first, first, second)]
    assert format_of(choices).whole([result] * 3).usage.prompt_tokens == 4


def test_the_tokens_of_one_character_begin_together_where_the_text_has_it() -> None:
    prompt, text = "é.", "a€b"
    answer, pieces = answered(LOGPROBS, prompt, "a", "€b")
    wanted = [ChoiceRequest(tokens_of(prompt), LOGPROBS, echo=prompt)]
    (whole,) = format_of(wanted).whole([answer.result()]).choices
    assert whole.text == prompt + text and whole.logprobs is not None
    assert whole.logprobs.text_offset == [0, 0, 1, 2, 3, 3, 3, 4]
    stream = format_of(wanted)
    chunks = [stream.piece(0, piece)[0]["choices"][0] for piece in pieces]
    assert "".join(chunk["text"] for chunk in chunks) == whole.text
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == whole.logprobs.text_offset


def test_tokens_that_are_not_shown_move_no_offset() -> None:
    answer, _ = answered(LOGPROBS, "x", "a<|end|>b")
    (whole,) = format_of([ChoiceRequest(tokens_of("x"), LOGPROBS)]).whole([answer.result()]).choices
    assert whole.text == "ab" and whole.logprobs is not None and whole.logprobs.text_offset == [0, 1, 1]


@pytest.mark.parametrize(
    ("method", "shared", "shown"),
    [
        ("suffix", False, ["retrieval", "head", "grammar", "target"]),
        ("hybrid", True, ["target", "head", "grammar", "target"]),
        ("pld", True, ["retrieval", "head", "grammar", "target"]),
    ],
)
def test_where_answers_are_shared_no_token_is_said_to_come_from_them(
    method: str, shared: bool, shown: list[str]
) -> None:
    config = Config.model_validate({"method": method, "drafter": {"share_answers": shared}})
    body = CompletionRequest(model="m", prompt="Hi", return_sources=True)
    wanted = [ChoiceRequest(tokens_of("Hi"), SamplingParams())]
    format_ = TextRenderer("m", wanted, Vocabulary(TOKENIZER), body, unnamed_sources(config))
    piece = Piece("wxyz", (5, 6, 7, 8), ("retrieval", "head", "grammar", "target"))
    assert [one["source"] for one in format_.piece(0, piece)[0]["choices"][0]["sources"]] == shown
