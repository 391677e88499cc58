"""A long answer. What many requests leave, lose or let grow is seen by test_soak."""

from __future__ import annotations

import pytest

from engine import Engine, SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_four_thousand_tokens_of_the_real_model_are_those_of_plain_decoding(
    smollm2: str, temperature: float
) -> None:
    prompt = "Write a very long story about a lighthouse keeper."
    sampling = SamplingParams(max_tokens=4000, temperature=temperature, seed=3, ignore_eos=True)
    texts = []
    for method in ("none", "suffix"):
        async with await Engine.start({"model": smollm2}, method=method, **{"verifier.threads": 1}) as engine:
            texts.append((await engine.generate(prompt, sampling)).token_ids)
    assert len(texts[0]) == 4000
    assert texts[1] == texts[0]
