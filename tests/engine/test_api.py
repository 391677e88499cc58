from __future__ import annotations

import asyncio
import gc
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.registry import METHODS
from engine import Engine, SamplingParams
from engine.errors import ConfigError, DrafterMismatch, EngineClosed, ModelError, QueueFull, RequestError, WorkerDied
from engine.launch import Workers
from engine.messages import Tokens
from engine.target import Target
from engine.transport import Hub
from tests.conftest import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [list(text) for text in (b"the cat sat on the mat, the cat", b"1 + 1 = 2, 1 + 2 =", b"zzzz")]
LENGTH = 40
DRAFTS = {
    "none": {},
    "pld": {},
    "lookahead": {},
    "suffix": {},
    "recycling": {},
    "datastore": {},
    "sps": {"drafter.length": 4},
    "sps tree": {"drafter.branches": [3, 2, 1]},
}
SAMPLED = [
    SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=5),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=6, top_p=0.9, top_k=30),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=7, min_p=0.02, repetition_penalty=1.2, min_tokens=10),
]


@asynccontextmanager
async def tiny_engine(model: str, draft: str, name: str = "none", **overrides: Any) -> AsyncIterator[Engine]:
    """An engine on the tiny target, as threads unless told otherwise. name: a key of DRAFTS."""
    settings = {"transport": "inproc", "method": name.split()[0], "drafter.path": draft} | DRAFTS.get(name, {})
    if name == "datastore":
        settings["drafter.datastore"] = str(Path(draft) / "datastore")
    async with await Engine.start({"model": model}, **settings | overrides) as engine:
        yield engine


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
    assert {name.split()[0] for name in DRAFTS} | heads == set(METHODS)


@pytest.mark.parametrize(("transport", "mode"), [("inproc", "sequential"), ("inproc", "async"), ("ipc", "async")])
@pytest.mark.parametrize("name", DRAFTS)
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

    async with tiny_engine(tiny, tiny_draft) as engine, asyncio.TaskGroup() as group:
        group.create_task(run(engine, "long", 300))
        await asyncio.sleep(0.05)
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
    overrides: dict[str, Any] = {"queue.size": 1, "verifier.max_running": 1}
    async with tiny_engine(tiny, tiny_draft, "pld", **overrides) as engine:
        task = asyncio.create_task(engine.generate(PROMPTS[2], SamplingParams(max_tokens=450, ignore_eos=True)))
        await asyncio.sleep(0.1)
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

    def listen(hub: Hub, frames: list[bytes]) -> Any:
        arrival = open_frames(hub, frames)
        if arrival is not None and isinstance(arrival[1], Tokens):
            heard.append(arrival[1].request)
        return arrival

    open_frames = Hub.open
    monkeypatch.setattr(Hub, "open", listen)
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
        ("hi", {"max_tokens": 5000}, r"max_tokens=5000: .* context of 512"),
        ("hi", {"temperature": -1.0}, "temperature=-1.0"),
        ("hi", {"temperature": float("nan")}, "temperature=nan"),
        ("hi", {"top_p": 0.0}, "top_p=0.0"),
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
        with pytest.raises(RequestError, match="its 512 tokens leave no room for an answer in the context of 512"):
            await engine.generate(prompt, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("overrides", "error", "told"),
    [
        ({"method": "pldd"}, ConfigError, "did you mean pld"),
        ({"model": "/no/such/model"}, ModelError, "model=/no/such/model"),
        ({"method": "sps", "drafter.path": None}, ConfigError, "drafter.path"),
        ({"method": "sps", "drafter.path": "/no/such/draft"}, ModelError, "^drafter.path=/no/such/draft"),
    ],
)
async def test_a_bad_configuration_is_refused_before_work_starts(
    tiny: str, overrides: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        await Engine.start({"model": tiny, "transport": "inproc"}, **overrides)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that engines start."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            if "engine.worker" in args[0]:
                processes.append(self)

    monkeypatch.setattr("engine.launch.subprocess.Popen", Noted)
    return processes


async def test_a_refused_start_ends_the_process_that_was_to_verify(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(ModelError, match="model=/no/such/model"):
        await Engine.start({"model": "/no/such/model"})
    assert [process.poll() is not None for process in started] == [True]
    assert not leftovers()


async def test_a_verifier_that_ends_before_its_orders_is_told_of(
    tiny: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Workers.check

    def then_kill(workers: Workers) -> None:
        check(workers)
        started[0].kill()
        started[0].wait()

    monkeypatch.setattr(Workers, "check", then_kill)
    with pytest.raises(WorkerDied, match="the verifier died while loading"):
        await Engine.start({"model": tiny})
    assert not leftovers()


async def test_each_worker_is_one_process(tiny: str, started: list[subprocess.Popen[bytes]]) -> None:
    async with await Engine.start({"model": tiny}, method="pld", mode="async"):
        assert len(started) == 2


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
async def test_a_drafter_of_another_vocabulary_is_refused(tiny: str, tiny_stranger: str, transport: str) -> None:
    with pytest.raises(DrafterMismatch, match="drafter vocabulary 300 != target vocabulary 260"):
        await Engine.start({"model": tiny}, method="sps", transport=transport, **{"drafter.path": tiny_stranger})
    assert not leftovers()


async def test_closing_ends_what_is_under_way_and_refuses_what_comes(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft) as engine:
        task = asyncio.create_task(engine.generate(PROMPTS[2], SamplingParams(max_tokens=450, ignore_eos=True)))
        await asyncio.sleep(0.1)
    with pytest.raises(EngineClosed):
        await task
    with pytest.raises(EngineClosed):
        await engine.generate("hi")


async def test_closing_ends_requests_that_wait_for_a_place(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1}) as engine:
        params = SamplingParams(max_tokens=450, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate(PROMPTS[2], params)) for _ in range(3)]
        await asyncio.sleep(0.1)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert [type(result) for result in results] == [EngineClosed] * 3


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
async def test_close_leaves_no_thread_and_no_file(tiny: str, tiny_draft: str, transport: str) -> None:
    before = set(threading.enumerate())
    async with tiny_engine(tiny, tiny_draft, "sps", transport=transport) as engine:
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5))
    new = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in new if thread.name.startswith(("verifier", "drafter"))]
    assert not leftovers()


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_an_engine_that_nobody_closed_ends_with_its_event_loop(
    tiny: str, tiny_draft: str, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = asyncio.run(Engine.start({"model": tiny, "method": "pld", "transport": transport}))
    assert "the engine was not closed" in capsys.readouterr().err
    assert not leftovers()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("verifier", "drafter"))]
    with pytest.raises(EngineClosed):
        asyncio.run(asyncio.wait_for(engine.generate("hi"), 30))
    asyncio.run(engine.close())


async def test_another_event_loop_is_refused_rather_than_left_waiting(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft) as engine:
        with pytest.raises(EngineClosed, match="event loop that started it"):
            await asyncio.to_thread(lambda: asyncio.run(engine.generate("hi")))
        assert (await engine.generate("hi", SamplingParams(max_tokens=3))).token_ids


async def test_a_failed_start_is_silent_about_the_thread_that_still_loads(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Target.load

    def load_slowly(*arguments: Any) -> Target:
        time.sleep(1)
        return load(*arguments)

    monkeypatch.setattr(Target, "load", load_slowly)
    monkeypatch.setattr("engine.supervisor.STOP_S", 0.1)
    with pytest.raises(ConfigError, match=r"drafter\.datastore"):
        await Engine.start({"model": tiny, "method": "datastore", "transport": "inproc"})
    for thread in [t for t in threading.enumerate() if t.name.startswith("verifier")]:
        await asyncio.to_thread(thread.join)
    assert "Traceback" not in capsys.readouterr().err


async def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace=.*cannot be written"):
        await Engine.start({"model": tiny, "method": "none", "transport": "inproc", "trace": str(tmp_path)})


async def test_finished_requests_leave_no_cache_behind(tiny: str, tiny_draft: str) -> None:
    from engine.model.kv_pool import KVCache, KVPool

    async with tiny_engine(tiny, tiny_draft, "sps") as engine:
        for _ in range(5):
            await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5))
        task = asyncio.create_task(engine.generate(PROMPTS[2], SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=2))
        gc.collect()
        things = gc.get_objects()
        assert len([thing for thing in things if type(thing) is KVCache]) <= 2
        assert all(pool.free == pool.blocks for pool in things if type(pool) is KVPool)


async def test_metrics_follow_from_the_rounds(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft, "sps") as engine:
        result = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    rounds: list[Tokens] = result.rounds[1:]
    assert result.metrics.rounds == len(rounds)
    assert result.metrics.mean_accepted_tokens == sum(len(r.tokens) for r in rounds) / len(rounds)
    assert 0 < result.metrics.verifier_busy <= 1
    assert [token for r in result.rounds for token in r.tokens] == result.token_ids


def leftovers() -> list[Path]:
    """Socket folders of engines in this process's temporary folder."""
    return list(Path(tempfile.gettempdir()).glob("talon-*"))


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
