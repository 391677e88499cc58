"""What one request brings must not end another's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, SamplingParams
from engine.core.errors import RequestError, RequestFailed
from engine.frontend.inflight import InflightRequest
from engine.wire.messages import PromptProgress, Submit
from tests.conftest import VOCABULARY, save_tiny_llama, tiny_tokenizer
from tests.faults.test_faults import LONG, PROMPT, THREADS, _own_temporary_folder, expected_text, until

__all__ = ["_own_temporary_folder"]


@pytest.fixture
def added_token(tmp_path: Path) -> str:
    """A model whose tokenizer has got a token that its embeddings do not have."""
    model = save_tiny_llama(tmp_path / "added")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(model)
    return model


async def test_a_token_that_only_the_tokenizer_knows_is_refused_with_the_cause(added_token: str) -> None:
    sampling = SamplingParams(max_tokens=4, repetition_penalty=1.3)
    async with await Engine.start({"model": added_token}, method="pld", transport="inproc") as engine:
        for prompt, raw in (("a zebra", True), ("a zebra", False), ([{"role": "user", "content": "a zebra"}], False)):
            with pytest.raises(RequestError, match=f"token {VOCABULARY} of it.*resize the model's embeddings") as error:
                await engine.generate(prompt, sampling, raw=raw)
            assert "\n" not in str(error.value)
        assert (await engine.generate("a horse", sampling)).token_ids


async def test_prompts_that_the_verifier_cannot_take_end_their_own_requests_and_no_other(tiny: str) -> None:
    expected = await expected_text(tiny)
    async with await Engine.start({"model": tiny}, method="pld", **THREADS) as engine:
        verifier = engine._workers.running["verifier"].name
        beside = asyncio.create_task(engine.generate(PROMPT, LONG))
        for prompt in ([VOCABULARY], [-1], []):
            request = engine._inflight[99] = InflightRequest(99, [], SamplingParams(), verifier=verifier)
            submit = Submit(request=99, sampling=SamplingParams(max_tokens=4, repetition_penalty=1.3))
            engine._supervisor.router.send(verifier, submit, [np.array(prompt), np.array([])])
            error = await asyncio.wait_for(request.arrivals.get(), 60)
            assert isinstance(error, RequestFailed) and "token ids from 0 to" in str(error)
        del engine._inflight[99]
        assert (await beside).token_ids == expected
        assert engine._workers.running["verifier"].name == verifier


async def test_a_caller_that_fails_when_told_how_far_its_prompt_is_ends_no_other_request(tiny: str) -> None:
    expected = await expected_text(tiny)

    def fails(progress: PromptProgress) -> None:
        raise ZeroDivisionError("division by zero")

    async with await Engine.start({"model": tiny}, method="none", **THREADS, **{"verifier.prefill_chunk": 4}) as engine:
        beside = asyncio.create_task(engine.generate(PROMPT, LONG))
        with pytest.raises(RequestFailed, match=r"^on_progress: division by zero$"):
            async with engine.stream(PROMPT, LONG, on_progress=fails) as stream:
                async for _ in stream:
                    pass
        assert (await beside).token_ids == expected
        await until(lambda: engine.totals.state.running == 0)
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected
