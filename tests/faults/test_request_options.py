"""What a request says of its text, when something fails: the verifier, the grammar, or another request's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, Grammar, SamplingParams
from engine.answer import Result
from engine.core.errors import RequestError, RequestFailed
from engine.model.target import Target
from engine.sampling.matcher import Matcher, Matchers
from engine.verifier.request import Request
from tests.conftest import save_tiny_llama
from tests.faults.test_batching import block_bytes
from tests.faults.test_faults import PROMPT, THREADS, pid_of, replaced, until

REGEX = Grammar(regex="([a-z]{2,9} )+[.]")
SAYS: list[dict[str, Any]] = [
    {"grammar": REGEX, "logprobs": 2},
    {"grammar": REGEX, "temperature": 1.0, "seed": 3},
    {"frequency_penalty": 1.1, "presence_penalty": -0.5, "temperature": 1.0, "seed": 4, "prompt_logprobs": 1},
]
PARAMS = [SamplingParams(max_tokens=150, min_tokens=150, **say) for say in SAYS]


async def all_of(engine: Engine) -> list[Result]:
    return await asyncio.gather(*(engine.generate(PROMPT, params) for params in PARAMS))


@pytest.fixture(scope="module")
def expected(tiny: str) -> list[Result]:
    """What plain decoding answers."""

    async def answer() -> list[Result]:
        async with await Engine.start({"model": tiny}, method="none", transport="inproc", **THREADS) as engine:
            return await all_of(engine)

    return asyncio.run(answer())


def check_all_equal(results: list[Result], expected: list[Result]) -> None:
    for result, right in zip(results, expected, strict=True):
        assert (result.token_ids, result.text) == (right.token_ids, right.text)
        assert (result.logprobs, result.prompt_logprobs) == (right.logprobs, right.prompt_logprobs)


async def test_a_new_verifier_goes_on_with_grammar_penalties_and_log_probabilities(
    tiny: str, expected: list[Result]
) -> None:
    slow = {"verifier.simulated_latency_ms": 20}
    async with await Engine.start({"model": tiny}, method="suffix", **THREADS, **slow) as engine:
        task = asyncio.create_task(all_of(engine))
        await until(lambda: len(engine._inflight) == 3 and all(len(f.answer) > 5 for f in engine._inflight.values()))
        os.kill(first := pid_of(engine, "verifier"), signal.SIGKILL)
        await replaced(engine, "verifier", first)
        check_all_equal(await asyncio.wait_for(task, 120), expected)


async def test_a_request_that_is_preempted_goes_on_with_all_it_has_said(
    tiny: str, expected: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"method": "suffix", "transport": "inproc", **THREADS}
    preempted = []
    preempt = Request.preempt
    monkeypatch.setattr(Request, "preempt", lambda self: (preempted.append(self.number), preempt(self)))
    small = 16 * block_bytes(Target.load(tiny))  # for little more than one
    room = {"verifier.kv_memory": small, "verifier.simulated_latency_ms": 5}
    async with await Engine.start({"model": tiny}, **options | room) as engine:
        check_all_equal(await all_of(engine), expected)
    assert preempted


async def test_a_grammar_that_takes_long_holds_up_its_own_request_alone(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, go_on = Matchers._make, threading.Event()
    made: list[Grammar] = []

    def make_when_told(self: Matchers, grammar: Grammar, answer: list[int]) -> Matcher:
        made.append(grammar)
        assert go_on.wait(60)
        return make(self, grammar, answer)

    monkeypatch.setattr(Matchers, "_make", make_when_told)
    ended: list[str] = []

    async def ask(engine: Engine, name: str, params: SamplingParams) -> None:
        await engine.generate(PROMPT, params)
        ended.append(name)

    async with await Engine.start({"model": tiny}, method="pld", transport="inproc", **THREADS) as engine:
        constrained = asyncio.create_task(ask(engine, "grammar", PARAMS[0]))
        await until(lambda: bool(made))
        cancelled = asyncio.create_task(ask(engine, "cancelled", PARAMS[1]))
        await until(lambda: len(engine._inflight) == 2)
        cancelled.cancel()
        await ask(engine, "plain", SamplingParams(max_tokens=100, ignore_eos=True))
        assert ended == ["plain"]
        go_on.set()
        await constrained
    assert ended == ["plain", "grammar"]
    assert made == [PARAMS[0].grammar]  # a cancelled request's is not read


async def test_a_grammar_that_fails_on_the_way_ends_its_own_request_and_no_other(
    tiny: str, expected: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.start({"model": tiny}, method="suffix", transport="inproc", **THREADS) as engine:
        accept = Matcher.accept
        steps = 0

        def accept_some(self: Matcher, token: int) -> None:
            nonlocal steps
            steps += 1
            if steps > 30:
                raise RequestFailed("the grammar could not be followed: it is too complex")
            accept(self, token)

        monkeypatch.setattr(Matcher, "accept", accept_some)
        results = await asyncio.gather(*(engine.generate(PROMPT, p) for p in PARAMS), return_exceptions=True)
        assert [type(result) for result in results[:2]] == [RequestFailed] * 2
        assert "the grammar could not be followed: it is too complex" in str(results[0])
        assert isinstance(results[2], Result) and results[2].token_ids == expected[2].token_ids
        monkeypatch.undo()
        check_all_equal(await all_of(engine), expected)


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"grammar": Grammar(regex="a(b")}, r"^grammar\.regex: "),
    ({"grammar": Grammar(json_schema={"$ref": "#/$defs/none"})}, r"^grammar\.json_schema: "),
    ({"grammar": Grammar(regex="a", json_object=True)}, "^grammar: json_object, regex given"),
    ({"logit_bias": {260: 1.0}}, "^logit_bias=.*: token ids go from 0 to 259"),
    ({"logit_bias": {-1: 1.0}}, "^logit_bias=.*: token ids go from 0 to 259"),
    ({"logit_bias": {3: 101.0}}, "^logit_bias=.*: use numbers from -100 to 100"),
    ({"presence_penalty": 2.5}, r"^presence_penalty=2\.5: use a number from -2 to 2"),
    ({"frequency_penalty": float("nan")}, "^frequency_penalty=nan: use a number"),
    ({"logprobs": 21}, "^logprobs=21: use a count from 0 to 20"),
    ({"prompt_logprobs": -1}, "^prompt_logprobs=-1: use a count from 0 to 20"),
]


async def test_what_makes_no_sense_is_refused_before_the_verifier_hears_of_it(tiny: str) -> None:
    async with await Engine.start({"model": tiny}, method="none", transport="inproc", **THREADS) as engine:
        for say, told in NONSENSE:
            with pytest.raises(RequestError, match=told):
                await engine.generate(PROMPT, SamplingParams(**say))
        assert next(engine._numbers) == 1


async def test_a_text_that_the_tokenizer_cannot_spell_is_a_reason_and_not_the_end(tmp_path: Path) -> None:
    """A vocabulary without the letters that the grammar wants."""
    model = save_tiny_llama(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["gone"] = vocabulary.pop("q")
    file.write_text(json.dumps(tokenizer))
    async with await Engine.start({"model": model}, method="pld", transport="inproc", **THREADS) as engine:
        with pytest.raises(RequestFailed, match="the grammar lets none of the model's tokens come at position"):
            await engine.generate(PROMPT, SamplingParams(grammar=Grammar(regex="aq")))
        assert (await engine.generate(PROMPT, SamplingParams(grammar=Grammar(regex="ab")))).text == "ab"
