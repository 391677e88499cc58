"""Families of the lean decoder through the whole engine: drafted answers are those of plain decoding."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine import SamplingParams
from tests.conftest import VOCABULARY, tiny_tokenizer
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.tiny_families import build

LENGTH = 40


@pytest.fixture(scope="module", params=["gemma3", "qwen3 with experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    build(request.param, "bfloat16", vocab_size=VOCABULARY).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


async def test_answers_that_are_drafted_are_those_of_plain_decoding(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        (prompt, SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 1.0)
    ]
    async with tiny_engine(str(model), "") as plain:
        answers = [(await plain.generate(*pair)).token_ids for pair in pairs]
    async with tiny_engine(str(model), str(model), "sps", **{"verifier.cut": False}) as engine:
        results = await asyncio.gather(*(engine.generate(*pair) for pair in pairs))
    assert [result.token_ids for result in results] == answers
    assert all(result.metrics.exact and result.metrics.mean_accepted_tokens > 3 for result in results)
    assert "slower" not in capsys.readouterr().err
