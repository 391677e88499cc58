"""Drafts change no call: 36 prompts that tools answer, in three formats, are answered as by plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="pip install 'talon-decoding[grammar]'")
from engine import Engine, Grammar, SamplingParams, Speculation
from engine.answer import Result
from engine.text.answer_format import TOOL_FORMATS, AnswerFormat, ToolFormat
from engine.text.answer_reader import AnswerReader
from engine.text.tool_grammar import Tool, Wanted, tool_grammar
from tests.conftest import save_tiny_llama
from tests.engine.server.tool_model import WEATHER
from tests.engine.server.tool_prompts import PROMPTS
from tests.engine.text.test_tool_formats import format_of, tokenizer, written

NAMES = ("hermes", "llama", "gemma4")
TOOLS = (Tool("weather", WEATHER), Tool("now", {}))
EARLIER = ("weather", {"city": "Rome", "days": 3})
HIDDEN = "<other>"  # a control token that the answer's text leaves out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose tokenizer has the control tokens of all formats."""
    known = tokenizer(True)
    path = save_tiny_llama(tmp_path_factory.mktemp("formats"), vocab_size=len(known), max_position_embeddings=2048)
    known.save_pretrained(path)
    return path


def prompt(tools: ToolFormat, question: str) -> list[int]:
    """A question after an earlier call, which is drafted from, control token and all."""
    call = written(tools, [EARLIER])
    text = (
        f"<|user|>Weather?<|assistant|>{HIDDEN}\n{call}<|user|>clear<|assistant|>{call}<|user|>{question}<|assistant|>"
    )
    ids: list[int] = tokenizer(True)(text, add_special_tokens=False)["input_ids"]
    return ids


def bias(tools: ToolFormat) -> dict[int, float]:
    """Prefer a hidden token, a line's end, and what begins a call: random models choose none of them."""
    begins = {HIDDEN: 17.0, "\n": 17.0, tools.trigger: 16.0}
    return {tokenizer(True)(text, add_special_tokens=False)["input_ids"][0]: by for text, by in begins.items()}


async def answers(engine: Engine, tools: ToolFormat, drafted: bool, **usual: Any) -> list[Result]:
    asked = [
        engine.generate(
            prompt(tools, question), SamplingParams(seed=seed, speculation=Speculation(off=not drafted), **usual)
        )
        for seed, question in enumerate(PROMPTS[:12])
    ]
    return list(await asyncio.gather(*asked))


def begins_hidden(format_: AnswerFormat, result: Result) -> bool:
    """Whether an answer begins with what is not read, and is a call."""
    blanks = tokenizer(True)("\n", add_special_tokens=False)["input_ids"]
    return result.token_ids[0] in (format_.added[HIDDEN], *blanks) and bool(called(format_, result.token_ids))


def called(format_: AnswerFormat, tokens: Sequence[int]) -> int:
    reader = AnswerReader(format_, TOOLS)
    shown = [token for token in tokens if token not in format_.unread]
    reader.feed(tokenizer(True).decode(shown))
    return reader.calls


@pytest.mark.parametrize("name", NAMES)
async def test_calls_are_those_of_plain_decoding(model: str, name: str) -> None:
    tools = next(one for one in TOOL_FORMATS if one.name == name)
    format_ = format_of(tools, True)
    overrides: dict[str, Any] = {"method": "pld", "transport": "inproc", "verifier.threads": 1, "verifier.cut": False}
    async with await Engine.start({"model": model}, **overrides) as engine:
        hidden, calls, accepted = 0, 0, 0
        for choice, temperature in (("required", 0.0), ("required", 1.0), ("auto", 1.0)):
            grammar = Grammar(grammar=tool_grammar(format_, Wanted(TOOLS, choice, many=False)))
            usual = {"temperature": temperature, "max_tokens": 140, "grammar": grammar, "logit_bias": bias(tools)}
            plain, drafted = [await answers(engine, tools, on, **usual) for on in (False, True)]
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            hidden += sum(begins_hidden(format_, one) for one in plain)
            calls += sum(called(format_, one.token_ids) > 0 for one in plain)
            accepted += sum(source != "target" for one in drafted for source in one.sources)
    assert hidden > 4 and calls > 24 and accepted > 100
