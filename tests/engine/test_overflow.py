"""A token on which the model overflows fails the requests that hold it, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine import Engine
from engine.answer import Result
from engine.core.errors import RequestFailed
from engine.core.params import SamplingParams
from tests.conftest import save_tiny_llama, tiny_tokenizer
from tests.engine.tiny_engine import tiny_engine

OVERFLOWING = "~"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
BEGIN = 48  # positions that two prompts share: three blocks
CLEAN = "the cat sat on the mat, and the cat sat on the hat. "


def tokens(text: str) -> list[int]:
    found: list[int] = tiny_tokenizer().encode(text)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose values are infinite at one token, which it never draws: only that token's hidden states have
    anything in the first dimension, which every value adds with a weight near the largest bfloat16.
    """
    folder = save_tiny_llama(tmp_path_factory.mktemp("overflowing"))
    made = LlamaForCausalLM.from_pretrained(folder)
    [token] = tokens(OVERFLOWING)
    with torch.no_grad():
        made.model.embed_tokens.weight[:, 0] = 0
        made.model.embed_tokens.weight[token, 0] = 100
        made.lm_head.weight[token] = 0
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
            layer.self_attn.v_proj.weight[:, 0] = 3e38
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model that takes this token for likely after half of all texts."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("overflowing-draft"), num_hidden_layers=1)
    made = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        made.lm_head.weight[:] *= 0.1
        made.lm_head.weight[tokens(OVERFLOWING)] *= 100
    made.save_pretrained(folder)
    return folder


async def answered(engine: Engine, prompt: list[int]) -> Result | None:
    """The answer; None if the model overflowed."""
    try:
        return await engine.generate(prompt, GREEDY)
    except RequestFailed as error:
        assert "not numbers (NaN)" in str(error)
        return None


@pytest.mark.parametrize(("dtype", "kv_type"), [("bfloat16", "auto"), ("float32", "q8_0")])
async def test_a_draft_on_which_the_model_overflows_changes_no_text(
    model: str, draft: str, dtype: str, kv_type: str
) -> None:
    prompts = [tokens(text) for text in (" the cat", " the cat sat on", CLEAN + " the")]
    settings: dict[str, Any] = {"dtype": dtype, "verifier.kv_type": kv_type, "verifier.cut": False}
    async with tiny_engine(model, draft, **settings) as engine:
        plain = [await answered(engine, prompt) for prompt in prompts]
    async with tiny_engine(model, draft, "sps tree", **settings) as engine:
        drafted = [await answered(engine, prompt) for prompt in prompts]
    for one, other in zip(plain, drafted, strict=True):
        assert one is not None and other is not None and one.token_ids == other.token_ids
        assert other.metrics.speculative_decoding.draft_tokens > 0


async def test_a_prompt_on_which_the_model_overflows_spoils_no_other(model: str, tmp_path: Path) -> None:
    """Neither at once nor after a restart, though they share the blocks before that token and its last rows are read
    together with it.
    """
    begin = tokens(CLEAN)[:BEGIN]
    bad, good = [*begin, *tokens(f"{OVERFLOWING} and more of it")], [*begin, *tokens(" and more")]
    settings: dict[str, Any] = {"dtype": "bfloat16", "verifier.prefill_chunk": BEGIN + 6}
    async with tiny_engine(model, "", **settings) as engine:
        expected = await answered(engine, good)
    for _ in range(2):
        async with tiny_engine(model, "", **settings, **{"verifier.cache": str(tmp_path)}) as engine:
            assert await answered(engine, bad) is None
            found = await answered(engine, good)
            assert expected is not None and found is not None and found.token_ids == expected.token_ids
            assert found.metrics.cached_tokens == BEGIN
