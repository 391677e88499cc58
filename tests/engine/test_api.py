"""What callers of `Engine` get: the text of plain decoding, streams, cancelling, queues, refusals, metrics."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine, SamplingParams
from engine.core.errors import QueueFull, RequestError
from engine.core.grammar import Grammar
from engine.core.methods import METHODS
from engine.wire.messages import Emitted, Tokens
from engine.wire.transport import Router
from tests.conftest import save_tiny_llama, sentencepiece_tokenizer, tiny_tokenizer
from tests.engine.tiny_engine import DRAFTS, PROMPTS, SLOW, tiny_engine
from tests.faults.test_faults import until

TOKENIZER = tiny_tokenizer()
LENGTH = 40
SAMPLED = [
    SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=5),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=6, top_p=0.9, top_k=30),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=7, min_p=0.02, repetition_penalty=1.2, min_tokens=10),
]


@pytest.fixture(scope="module")
def greedy(tiny: str) -> list[list[int]]:
    """What `transformers` answers."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=LENGTH, do_sample=False)[
            0, len(p) :
        ].tolist()
        for p in PROMPTS
    ]


@pytest.fixture(scope="module")
def sampled(tiny: str) -> list[list[int]]:
    """What plain decoding draws."""

    async def draw() -> list[list[int]]:
        async with tiny_engine(tiny, tiny) as plain:
            return [(await plain.generate(PROMPTS[0], params)).token_ids for params in SAMPLED]

    texts = asyncio.run(draw())
    assert len({tuple(tokens) for tokens in texts}) == len(texts)
    return texts


def test_every_method_is_tested_here_or_with_the_heads() -> None:
    heads = {"block", "eagle", "eagle3", "medusa", "hydra", "hybrid"}  # in tests/drafters/test_head_lossless.py
    heads |= {"mtp", "assistant"}  # in tests/drafters/heads/test_mtp.py and tests/drafters/heads/assistant
    assert {name.split()[0] for name in DRAFTS} | heads == set(METHODS)


@pytest.mark.parametrize(
    ("name", "transport", "mode"),
    [
        *product(DRAFTS, ["inproc"], ["sequential", "async"]),
        *product(["none", "sps tree", "datastore"], ["ipc"], ["async"]),  # no drafter, a list and a path in its spec
    ],
)
async def test_greedy_text_is_that_of_transformers_and_seeded_text_that_of_plain_decoding(
    tiny: str,
    tiny_draft: str,
    greedy: list[list[int]],
    sampled: list[list[int]],
    name: str,
    transport: str,
    mode: str,
) -> None:
    cut = mode == "async"  # not cut, a draft model never rests
    async with tiny_engine(tiny, tiny_draft, name, transport=transport, mode=mode, **{"verifier.cut": cut}) as engine:
        results = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=LENGTH)) for p in PROMPTS))
        assert [r.token_ids for r in results] == greedy
        assert [(await engine.generate(PROMPTS[0], params)).token_ids for params in SAMPLED] == sampled


async def test_a_good_drafter_saves_rounds(tiny: str) -> None:
    async with tiny_engine(tiny, tiny, "sps", **{"verifier.cut": False}) as engine:  # the target drafts for itself
        metrics = (await engine.generate(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True))).metrics
    assert metrics.mean_accepted_tokens > 4
    assert metrics.rounds == 8


async def test_shared_noise_lets_the_drafter_guess_what_sampling_draws(tiny: str) -> None:
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=3, ignore_eos=True)
    async with tiny_engine(tiny, tiny, "sps", **{"verifier.cut": False}) as engine:
        assert (await engine.generate(PROMPTS[0], params)).metrics.mean_accepted_tokens > 4


async def test_requests_at_once_each_get_their_own_answer(tiny: str, tiny_draft: str, greedy: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=LENGTH)
    async with tiny_engine(tiny, tiny_draft, "suffix", **{"verifier.max_running": 3}) as engine:
        results = await asyncio.gather(*(engine.generate(PROMPTS[i % 3], params) for i in range(20)))
    assert [r.token_ids for r in results] == [greedy[i % 3] for i in range(20)]


async def test_requests_are_served_in_turns(tiny: str, tiny_draft: str) -> None:
    finished: list[str] = []

    async def run(engine: Engine, name: str, length: int) -> None:
        await engine.generate(PROMPTS[2], SamplingParams(max_tokens=length, ignore_eos=True))
        finished.append(name)

    async with tiny_engine(tiny, tiny_draft, **SLOW) as engine, asyncio.TaskGroup() as group:
        group.create_task(run(engine, "long", 300))
        await until(lambda: bool(engine._inflight))
        group.create_task(run(engine, "short", 5))
    assert finished == ["short", "long"]


async def test_the_streamed_pieces_are_the_answer(tiny: str, tiny_draft: str, greedy: list[list[int]]) -> None:
    async with tiny_engine(tiny, tiny_draft, "pld") as engine:
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=LENGTH))
        pieces = [piece async for piece in stream]
    assert [token for piece in pieces for token in piece.token_ids] == greedy[0]
    assert stream.result is not None
    assert "".join(piece.text for piece in pieces) == stream.result.text


async def test_a_stop_string_ends_the_answer_for_every_method_alike(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft) as engine:
        whole = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1))
    at = next(i for i in range(8, LENGTH) if whole.text[i].isascii() and whole.text[i] not in whole.text[:i])
    stop = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1, stop=(whole.text[at],))
    results = []
    for name in ("none", "sps"):
        async with tiny_engine(tiny, tiny_draft, name) as engine:
            results.append(await engine.generate(PROMPTS[0], stop))
    assert [r.text for r in results] == [whole.text[:at]] * 2
    assert [r.finish_reason for r in results] == ["stop"] * 2
    assert results[0].token_ids == results[1].token_ids


@pytest.mark.parametrize("name", ["none", "sps", "sps tree", "suffix"])
async def test_a_stop_string_over_several_tokens_and_rounds_is_found_and_no_part_of_it_streamed(
    tiny: str, tiny_draft: str, name: str
) -> None:
    def asked(**more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1, ignore_eos=True, **more)

    async with tiny_engine(tiny, tiny_draft, name) as engine:
        whole = (await engine.generate(PROMPTS[0], asked())).text
        for at in range(4, len(whole) - 5, 3):
            stop = whole[at : at + 5]
            if "\ufffd" in stop:  # half a character, which the next token may complete
                continue
            async with engine.stream(PROMPTS[0], asked(stop=("never there", stop))) as stream:
                pieces = [piece.text async for piece in stream]
            assert stream.result is not None
            assert "".join(pieces) == stream.result.text == whole[: whole.index(stop)]
            assert stream.result.finish_reason == "stop"
        almost = whole[-4:] + "\x00"
        async with engine.stream(PROMPTS[0], asked(stop=(almost,))) as stream:
            assert "".join([piece.text async for piece in stream]) == whole


async def test_an_answer_keeps_the_space_it_begins_with(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    model = save_tiny_llama(tmp_path, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    world = tokenizer.convert_tokens_to_ids("\u2581world")
    async with tiny_engine(model, model) as engine:
        params = SamplingParams(max_tokens=2, logit_bias={world: 100.0})
        result = await engine.generate("a", params, raw=True)
    assert result.token_ids == [world, world] and result.text == " world world"


async def test_text_messages_and_token_ids_are_the_same_prompt(tiny: str, tiny_draft: str) -> None:
    params = SamplingParams(max_tokens=8)
    async with tiny_engine(tiny, tiny_draft) as engine:
        text = await engine.generate("hello", params)
        messages = await engine.generate([{"role": "user", "content": "hello"}], params)
        ids = await engine.generate(TOKENIZER("<|user|>hello<|assistant|>")["input_ids"], params)
        raw = await engine.generate("hello", params, raw=True)
    assert text.token_ids == messages.token_ids == ids.token_ids
    assert (text.prompt_tokens, raw.prompt_tokens) == (7, 5)


async def test_cancelling_frees_the_requests_place(tiny: str, tiny_draft: str) -> None:
    overrides = {"queue.size": 1, "verifier.max_running": 1} | SLOW
    async with tiny_engine(tiny, tiny_draft, "pld", **overrides) as engine:
        task = asyncio.create_task(engine.generate(PROMPTS[2], SamplingParams(max_tokens=450, ignore_eos=True)))
        await until(lambda: bool(engine._inflight))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await asyncio.wait_for(engine.generate(PROMPTS[0], SamplingParams(max_tokens=3)), 60)
    assert len(result.token_ids) == 3


async def test_leaving_a_stream_early_cancels_its_request(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1}) as engine:
        stream = engine.stream(PROMPTS[2], SamplingParams(max_tokens=450, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.wait_for(engine.generate(PROMPTS[0], SamplingParams(max_tokens=3)), 60)


async def test_leaving_the_block_of_a_stream_ends_its_request_in_the_verifier(
    tiny: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    def listen(hub: Router, frames: list[bytes]) -> Any:
        arrival = open_frames(hub, frames)
        if arrival is not None and isinstance(arrival[1], Emitted):
            heard.extend(tokens.request for tokens in arrival[1].tokens)
        return arrival

    open_frames = Router.open
    monkeypatch.setattr(Router, "open", listen)
    async with tiny_engine(tiny, tiny_draft, **{"verifier.simulated_latency_ms": 2}) as engine:
        async with engine.stream(PROMPTS[2], SamplingParams(max_tokens=450, ignore_eos=True)) as stream:
            async for _ in stream:
                break
        assert stream.result is None
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    first, second = heard[0], heard[-1]
    assert first not in heard[heard.index(second) :]
    assert heard.count(first) < 450


async def test_a_full_queue_refuses_if_so_configured(tiny: str, tiny_draft: str) -> None:
    slow = {"verifier.simulated_latency_ms": 20}  # or the first has ended before the second asks
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1, "queue.full": "refuse"} | slow) as engine:
        first = asyncio.create_task(engine.generate(PROMPTS[2], SamplingParams(max_tokens=400, ignore_eos=True)))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match=r"queue\.size=1"):
            await engine.generate(PROMPTS[0])
        first.cancel()


async def test_a_full_queue_refuses_before_it_tokenizes(
    tiny: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1, "queue.full": "refuse"}) as engine:
        with engine.reserve(1):
            monkeypatch.setattr(engine, "tokenize", None)
            with pytest.raises(QueueFull):
                await engine.generate("a prompt of megabytes", SamplingParams(grammar=Grammar(regex="a(b")))
        monkeypatch.undo()
        with pytest.raises(RequestError, match="prompt"):
            await engine.generate("")
        assert engine.requests == 0, "a request that is refused leaves its place"


async def test_a_stream_is_accepted_before_its_first_piece_and_refused_without_one(tiny: str, tiny_draft: str) -> None:
    slow = {"verifier.simulated_latency_ms": 500}
    async with tiny_engine(tiny, tiny_draft, **slow) as engine:
        async with engine.stream(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True)) as stream:
            await stream.accepted()
            assert not next(iter(engine._inflight.values())).answer
            assert [len(piece.token_ids) async for piece in stream] == [1, 1, 1]
        async with engine.stream(PROMPTS[0], SamplingParams(max_tokens=1000)) as stream:
            with pytest.raises(RequestError, match="max_tokens"):
                await stream.accepted()


async def test_a_full_queue_waits_by_default(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1}) as engine:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        results = await asyncio.gather(*(engine.generate(PROMPTS[0], params) for _ in range(5)))
    assert [len(r.token_ids) for r in results] == [5] * 5


@pytest.mark.parametrize(
    ("prompt", "params", "told"),
    [
        ("", {}, "prompt: is empty"),
        ([], {}, "prompt: is empty"),
        ([1, 2, 99_999], {}, "token id"),
        (["a", "b"], {}, "token id"),
        ([True], {}, "token id"),
        (None, {}, "prompt: is a NoneType"),
        ({"role": "user", "content": "hi"}, {}, "prompt: is a dict"),
        (b"hi", {}, "prompt: is a bytes"),
        ("hi \udcff", {}, "half a character"),
        ("hi" * 400, {}, "its 802 tokens leave no room"),
        ("hi", {"max_tokens": 5000}, r"max_tokens=5000: .* maximum context length is 512"),
        ("hi", {"temperature": -1.0}, "temperature=-1.0"),
        ("hi", {"temperature": float("nan")}, "temperature=nan"),
        ("hi", {"top_p": 1.5}, "top_p=1.5"),
        ("hi", {"top_k": -1}, "top_k=-1"),
        ("hi", {"max_tokens": 0}, "max_tokens=0"),
        ("hi", {"max_tokens": "many"}, "max_tokens='many'"),
        ("hi", {"stop": 5}, "stop=5: expected a list"),
        ("hi", {"min_tokens": 9, "max_tokens": 8}, "min_tokens=9"),
        ("hi", {"stop": ("",)}, "stop="),
        ("hi", {"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ],
)
async def test_a_bad_request_is_refused_in_one_line(
    tiny: str, tiny_draft: str, prompt: Any, params: dict[str, Any], told: str
) -> None:
    async with tiny_engine(tiny, tiny_draft) as engine:
        with pytest.raises(RequestError, match=told) as error:
            await engine.generate(prompt, SamplingParams(**params))
    assert "\n" not in str(error.value)


async def test_sampling_that_is_a_dict_is_refused_with_what_to_give(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft) as engine:
        with pytest.raises(RequestError, match="give SamplingParams"):
            await engine.generate("hi", {"max_tokens": 3})  # type: ignore[arg-type]


async def test_the_context_can_be_filled_to_the_brim(tiny: str, tiny_draft: str) -> None:
    params = SamplingParams(max_tokens=512 - len(PROMPTS[2]), ignore_eos=True)
    texts = []
    for name in ("none", "sps tree"):
        async with tiny_engine(tiny, tiny_draft, name) as engine:
            texts.append((await engine.generate(PROMPTS[2], params)).token_ids)
    assert len(texts[0]) == params.max_tokens
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", DRAFTS)
async def test_a_prompt_can_fill_the_context_up_to_the_last_token(tiny: str, tiny_draft: str, name: str) -> None:
    prompt = (PROMPTS[0] * 20)[:512]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = [model(ids[:, :length]).logits[0, -1].argmax().item() for length in (509, 511)]
    async with tiny_engine(tiny, tiny_draft, name) as engine:
        for length, token in zip((509, 511), expected, strict=True):
            params = SamplingParams(max_tokens=512 - length, ignore_eos=True)
            answer = (await engine.generate(prompt[:length], params)).token_ids
            assert len(answer) == 512 - length and answer[0] == token
        with pytest.raises(RequestError, match=r"its 512 tokens leave no room for an answer: .* is 512 tokens"):
            await engine.generate(prompt, SamplingParams(max_tokens=1))


async def test_metrics_follow_from_the_rounds(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft, "sps") as engine:
        result = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    rounds: list[Tokens] = result.rounds[1:]
    assert result.metrics.rounds == len(rounds)
    assert result.metrics.mean_accepted_tokens == sum(len(r.tokens) for r in rounds) / len(rounds)
    assert 0 < result.metrics.verifier_busy <= 1
    assert [token for r in result.rounds for token in r.tokens] == result.token_ids
