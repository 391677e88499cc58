"""Everything a request may say of its own text holds under speculation: the answer, its log-probabilities and its
sources are those of plain decoding, whichever drafter runs, in turns or at once, alone or beside other requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

import msgspec
import pytest

from engine import Engine, Grammar, SamplingParams, Speculation
from engine.answer import Result
from engine.config import Config
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.errors import RequestError
from engine.core.methods import METHODS, Method
from engine.core.tree import TokenTree
from engine.costs.bandit import ConservativeBandit
from engine.costs.cost_model import CostModel
from tests.conftest import VOCABULARY

PROMPT = list(b"the cat sat on the mat, the cat sat on")
LENGTH = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "mood": {"enum": ["calm", "cross"]},
        "lives": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "mood", "lives"],
    "additionalProperties": False,
}
SAYS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7, "min_tokens": 10},
    "all penalties": {"frequency_penalty": -0.5, "presence_penalty": 0.9, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {40: 9.0, 41: -100.0, 77: 8.0}},
    "logprobs": {"logprobs": 5, "prompt_logprobs": 2},
    "logprobs of what is biased": {"logprobs": 0, "logit_bias": {50: 12.5}, "presence_penalty": -1.0},
    "schema": {"grammar": Grammar(json_schema=SCHEMA), "logprobs": 1},
    "object": {"grammar": Grammar(json_object=True), "frequency_penalty": 0.3},
    "regex": {"grammar": Grammar(regex=r"(the|a) [a-z]{3,30}( sat| ran)+\."), "min_tokens": 12},
    "lark": {"grammar": Grammar(grammar='start: "the " ANIMAL (" and " ANIMAL)*\nANIMAL: "cat" | "dog" | "cow"')},
    "gbnf": {"grammar": Grammar(grammar='root ::= ("cat " | "dog ")+ "mat"'), "ignore_eos": True},
    "truncated": {"grammar": Grammar(json_schema=SCHEMA), "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}
PARAMS = {
    f"{name}, T={temperature:g}": SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=seed, **say)
    for seed, (name, say, temperature) in enumerate((n, s, t) for n, s in SAYS.items() for t in (0.0, 1.0))
}


class Oracle(Drafter):
    """Drafts the answers of plain decoding, known by the requests' seeds, with a wrong sibling beside every token."""

    answers: ClassVar[dict[int, list[int]]] = {}

    def __init__(self) -> None:
        self.rest: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}

    @classmethod
    def from_config(cls, config: Config) -> Oracle:
        return cls()

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.rest[request], self.last[request] = list(self.answers[sampling.seed]), prompt[-1]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        right = self.rest[request][len(continuation) : len(continuation) + 6]
        tokens, parents, confidence = [continuation[-1] if continuation else self.last[request]], [-1], [1.0]
        above = 0
        for depth, token in enumerate(right, 1):
            tokens += [(token + depth) % VOCABULARY, token]
            parents += [above, above]
            confidence += [0.5**depth] * 2
            above = len(tokens) - 1
        return TokenTree.from_lists(tokens, parents, confidence, 2)

    def observe(self, request: int, verdict: Verdict) -> None:
        self.rest[request] = self.rest[request][len(verdict.tokens) :]
        self.last[request] = verdict.tokens[-1]

    def finish(self, request: int) -> None:
        del self.rest[request], self.last[request]


async def answers(model: str, say: Speculation | None = None, **overrides: Any) -> dict[str, Result]:
    """To all of PARAMS at once."""
    settings = {"transport": "inproc", "verifier.threads": 1} | overrides
    asked = [msgspec.structs.replace(params, speculation=say) for params in PARAMS.values()]
    async with await Engine.start({"model": model}, **settings) as engine:
        results = await asyncio.gather(*(engine.generate(PROMPT, params) for params in asked))
    return dict(zip(PARAMS, results, strict=True))


@pytest.fixture(scope="module")
def plain(tiny: str) -> dict[str, Result]:
    return asyncio.run(answers(tiny, Speculation(off=True), method="none"))


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        *product(["oracle", "suffix"], ["sequential", "async"]),
        ("pld", "async"),
        ("recycling", "sequential"),
        ("lookahead", "async"),
    ],
)
async def test_what_a_request_says_holds_with_every_drafter(
    tiny: str, plain: dict[str, Result], method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "oracle", Method("tests.engine.test_request_options:Oracle"))
    monkeypatch.setattr(CostModel, "patience_s", lambda *_: 1.0)  # drafts are waited for on a busy machine too
    monkeypatch.setattr(ConservativeBandit, "takes", lambda *_: True)  # and made, whatever they take
    monkeypatch.setattr(Oracle, "answers", {PARAMS[name].seed: result.token_ids for name, result in plain.items()})
    drafted = await answers(tiny, method=method, mode=mode)
    for name, result in drafted.items():
        assert result.token_ids == plain[name].token_ids, name
        assert result.logprobs == plain[name].logprobs, name
        assert result.prompt_logprobs == plain[name].prompt_logprobs, name
        assert result.finish_reason == plain[name].finish_reason, name
        accepted = result.metrics.speculative_decoding.accepted_tokens
        assert method != "oracle" or accepted > 0.6 * (len(result.token_ids) - 1), name


async def test_a_request_alone_says_the_same_as_beside_others(tiny: str, plain: dict[str, Result]) -> None:
    async with await Engine.start({"model": tiny}, transport="inproc", method="none") as engine:
        for name in ("schema, T=1", "all penalties, T=1", "logprobs, T=0"):
            alone = await engine.generate(PROMPT, PARAMS[name])
            assert (alone.token_ids, alone.logprobs) == (plain[name].token_ids, plain[name].logprobs)
            assert alone.prompt_logprobs == plain[name].prompt_logprobs


def test_each_of_them_changes_the_answer(plain: dict[str, Result]) -> None:
    for temperature in ("T=0", "T=1"):
        own = {name: tuple(r.token_ids) for name, r in plain.items() if temperature in name and "schema" not in name}
        assert len(set(own.values())) >= len(own) - 1  # the object may be the schema's


def test_a_grammar_is_kept_to(plain: dict[str, Result]) -> None:
    for name, result in plain.items():
        if name.startswith(("schema", "truncated")) and result.finish_reason == "eos":
            answer = json.loads(result.text)
            assert list(answer) == ["name", "mood", "lives"]
            assert answer["mood"] in ("calm", "cross")
    assert plain["schema, T=0"].text.lstrip().startswith("{")
    assert plain["gbnf, T=1"].text.startswith(("cat ", "dog "))


async def test_what_a_grammar_leaves_no_choice_in_is_drafted_without_a_drafter(
    tiny: str, plain: dict[str, Result]
) -> None:
    """By the verifier itself, and only there."""
    for name, result in (await answers(tiny, method="none")).items():
        assert (result.token_ids, result.logprobs) == (plain[name].token_ids, plain[name].logprobs), name
        assert result.sources.count("grammar") == result.metrics.speculative_decoding.accepted_tokens
        assert "grammar" not in result.sources or PARAMS[name].grammar is not None, name
        assert "grammar" in result.sources or not name.startswith(("schema", "lark", "gbnf")), name
        assert plain[name].metrics.speculative_decoding.draft_tokens == 0


@pytest.mark.parametrize("method", ["none", "suffix"])
async def test_speculation_is_a_requests_own_choice(tiny: str, method: str) -> None:
    def saying(say: Speculation | None) -> SamplingParams:
        return SamplingParams(max_tokens=100, ignore_eos=True, speculation=say)

    says = [None, Speculation(off=True), Speculation(budget=2)]
    always = {"verifier": {"cut": False}}  # whatever drafts cost here
    async with await Engine.start({"model": tiny} | always, method=method, transport="inproc") as engine:
        results = [await engine.generate(PROMPT, saying(say)) for say in says]
        at_once = await asyncio.gather(*(engine.generate(PROMPT, saying(say)) for say in says))
        with pytest.raises(RequestError, match=r"speculation\.budget=61: is over the engine's drafter\.budget=60"):
            await engine.generate(PROMPT, saying(Speculation(budget=61)))
    assert len({tuple(result.token_ids) for result in (*results, *at_once)}) == 1
    for free, off, two in (results, at_once):
        assert off.metrics.speculative_decoding.draft_tokens == 0 and set(off.sources) == {"target"}
        if method != "none":
            assert free.metrics.speculative_decoding.draft_tokens > 0
            assert max(round_.nodes for round_ in two.rounds[1:]) == 2


async def test_metrics_count_drafts_as_servers_do_and_say_where_each_token_came_from(tiny: str) -> None:
    async with await Engine.start({"model": tiny}, method="suffix", transport="inproc") as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0))
        pieces = [piece async for piece in stream]
    result = stream.result
    assert result is not None
    counted = result.metrics.speculative_decoding
    rounds = result.rounds[1:]
    assert counted.drafts == sum(round_.nodes > 1 for round_ in rounds) > 0
    assert counted.draft_tokens == sum(round_.nodes - 1 for round_ in rounds)
    assert counted.accepted_tokens == sum(counted.accepted_per_position) == len(result.token_ids) - 1 - len(rounds)
    assert counted.accepted_per_position == sorted(counted.accepted_per_position, reverse=True)
    assert result.sources.count("retrieval") == counted.accepted_tokens
    assert result.metrics.rounds == len(rounds)
    assert result.metrics.mean_accepted_tokens == sum(len(round_.tokens) for round_ in rounds) / len(rounds)
    assert 0 < result.metrics.verifier_busy <= 1
    assert [token for round_ in result.rounds for token in round_.tokens] == result.token_ids
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert "".join(piece.text for piece in pieces) == result.text
    assert [source for piece in pieces for source in piece.sources] == result.sources
    assert [entry for piece in pieces for entry in piece.logprobs] == result.logprobs
    assert len(result.sources) == len(result.token_ids)


async def test_choices_are_the_answers_of_seeds_that_count_on(tiny: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=2**63 - 2)
    async with await Engine.start({"model": tiny}, method="pld", transport="inproc") as engine:
        choices = await engine.generate_choices(PROMPT, 3, params)
        alone = [await engine.generate(PROMPT, params.of_choice(i)) for i in range(3)]
        with pytest.raises(RequestError, match="n=0: ask for one answer or more"):
            await engine.generate_choices(PROMPT, 0, params)
        with pytest.raises(RequestError, match=r"give SamplingParams"):
            await engine.generate_choices(PROMPT, 2, {"max_tokens": 3})  # type: ignore[arg-type]
    assert [choice.token_ids for choice in choices] == [result.token_ids for result in alone]
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    assert params.of_choice(2).seed == -(2**63)
