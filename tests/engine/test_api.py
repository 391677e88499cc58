"""What callers of `Engine` get: the text of plain decoding, streams, cancelling, queues, refusals, metrics."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import SamplingParams
from engine.core.errors import QueueFull, RequestError
from engine.core.grammar import Grammar
from engine.core.methods import METHODS
from engine.wire.messages import Emitted
from engine.wire.transport import Router
from tests.conftest import save_tiny_llama, sentencepiece_tokenizer
from tests.engine.tiny_engine import DRAFTS, PROMPTS, SLOW, tiny_engine
from tests.faults.test_faults import until

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
        params = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=3, ignore_eos=True)
        sampled = (await engine.generate(PROMPTS[0], params)).metrics
    assert metrics.mean_accepted_tokens > 4
    assert metrics.rounds == 8
    assert sampled.mean_accepted_tokens > 4, "it knows the noise that the target draws with"


async def test_a_stop_string_over_several_tokens_and_rounds_is_found_and_no_part_of_it_streamed(
    tiny: str, tiny_draft: str
) -> None:
    def asked(**more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1, ignore_eos=True, **more)

    async with tiny_engine(tiny, tiny_draft, "sps tree", **{"verifier.cut": False}) as engine:
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
    model = save_tiny_llama(tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    world = tokenizer.convert_tokens_to_ids("\u2581world")
    async with tiny_engine(model, model) as engine:
        params = SamplingParams(max_tokens=2, logit_bias={world: 100.0})
        result = await engine.generate("a", params, raw=True)
    assert result.token_ids == [world, world] and result.text == " world world"


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


async def test_a_full_queue_refuses_before_it_tokenizes(
    tiny: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1, "queue.full": "refuse"}) as engine:
        with engine.reserve(1):
            monkeypatch.setattr(engine, "tokenize", None)
            with pytest.raises(QueueFull, match=r"queue\.size=1"):
                await engine.generate("a prompt of megabytes", SamplingParams(grammar=Grammar(regex="a(b")))
        monkeypatch.undo()
        with pytest.raises(RequestError, match="prompt"):
            await engine.generate("")
        assert engine.requests == 0, "a request that is refused leaves its place"


async def test_a_stream_is_accepted_before_its_first_piece_and_refused_without_one(tiny: str, tiny_draft: str) -> None:
    slow = {"verifier.simulated_latency_ms": 200}
    async with tiny_engine(tiny, tiny_draft, **slow) as engine:
        async with engine.stream(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True)) as stream:
            await stream.accepted()
            assert not next(iter(engine._inflight.values())).answer
            assert [len(piece.token_ids) async for piece in stream] == [1, 1, 1]
        async with engine.stream(PROMPTS[0], SamplingParams(max_tokens=1000)) as stream:
            with pytest.raises(RequestError, match="max_tokens"):
                await stream.accepted()


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
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
]


async def test_a_bad_request_is_refused_in_one_line(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft) as engine:
        for prompt, params, told in REFUSED:
            with pytest.raises(RequestError, match=told) as error:
                await engine.generate(prompt, SamplingParams(**params))
            assert "\n" not in str(error.value)
        with pytest.raises(RequestError, match="give SamplingParams"):
            await engine.generate("hi", {"max_tokens": 3})  # type: ignore[arg-type]


async def test_an_answer_can_fill_the_context_up_to_the_last_token_with_every_drafter(
    tiny: str, tiny_draft: str
) -> None:
    prompt, lengths, texts = (PROMPTS[0] * 20)[:512], (490, 511), []
    for name in DRAFTS:
        async with tiny_engine(tiny, tiny_draft, name, **{"verifier.cut": False}) as engine:
            asked = [(prompt[:length], SamplingParams(max_tokens=512 - length, ignore_eos=True)) for length in lengths]
            texts.append([(await engine.generate(*request)).token_ids for request in asked])
            with pytest.raises(RequestError, match=r"its 512 tokens leave no room for an answer: .* is 512 tokens"):
                await engine.generate(prompt, SamplingParams(max_tokens=1))
    assert texts == [texts[0]] * len(DRAFTS) and [len(answer) for answer in texts[0]] == [22, 1]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt[:length]])).logits[0, -1].argmax().item() for length in lengths]
    assert [answer[0] for answer in texts[0]] == expected
