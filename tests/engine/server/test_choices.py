"""The choices of one request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine import api
from engine.answer import Result
from engine.core.params import SamplingParams
from engine.server.choices import RunningChoices
from engine.server.metrics import Latencies
from engine.server.schema import CompletionRequest
from engine.server.settings import Settings
from engine.server.translate import text_choices
from engine.server.vocabulary import Vocabulary
from tests.engine.tiny_engine import tiny_engine


async def test_the_parameters_of_a_request_are_checked_once_however_many_answers_it_wants(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logit_bias of a whole vocabulary would hold up the event loop for each answer."""
    checks: Counter[str] = Counter()
    validate, check_sampling = SamplingParams.validate, api.check_sampling

    def validated(sampling: SamplingParams) -> SamplingParams:
        checks["validate"] += 1
        return validate(sampling)

    def checked(*arguments: Any) -> None:
        checks["check_sampling"] += 1
        check_sampling(*arguments)

    body = CompletionRequest(model="m", prompt=["a", "b"], n=2, max_tokens=2, ignore_eos=True, logit_bias={"7": 1.0})
    async with tiny_engine(tiny, tiny) as engine:
        monkeypatch.setattr(SamplingParams, "validate", validated)
        monkeypatch.setattr(api, "check_sampling", checked)
        wanted = await text_choices(body, engine, Settings("m"), Vocabulary(engine.tokenizer), None)
        with engine.reserve(4) as places:
            running = RunningChoices(engine, wanted, Latencies(CollectorRegistry(), "m"), places)
            async with running as events:
                results = [arrival async for _, arrival in events if isinstance(arrival, Result)]
    assert [len(result.token_ids) for result in results] == [2] * 4
    assert checks == {"validate": 1, "check_sampling": 1}
