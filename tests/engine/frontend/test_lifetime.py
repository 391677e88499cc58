"""How an engine starts and ends: what is refused, and that nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import T5Config

from engine import Engine, SamplingParams
from engine.core.errors import (
    ConfigError,
    DrafterMismatch,
    EngineClosed,
    ModelError,
    RequestError,
    WorkerDied,
)
from engine.frontend.processes import Workers
from engine.frontend.supervisor import say_once
from engine.model.target import Target
from tests.engine.tiny_engine import PROMPTS, SLOW, tiny_engine
from tests.faults.test_faults import until


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that engines start."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            if "engine.worker" in args[0]:
                processes.append(self)

    monkeypatch.setattr("engine.frontend.processes.subprocess.Popen", Noted)
    return processes


LEFT = """
import asyncio
from engine import Engine, SamplingParams

async def main():
    async with await Engine.start(model=MODEL, method="none", transport="inproc") as engine:
        stream = engine.stream("abc", SamplingParams(max_tokens=400, ignore_eos=True))
        async for piece in stream:
            break
    return stream

asyncio.run(main())
"""


def test_a_stream_that_was_left_ends_silently_with_the_event_loop(tiny: str) -> None:
    program = [sys.executable, "-c", LEFT.replace("MODEL", repr(tiny))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks for modules in the current folder")
async def test_a_script_in_the_current_folder_never_runs_in_a_worker(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('it ran', 'w')")
    monkeypatch.chdir(tmp_path)
    async with await Engine.start(model=tiny, method="none") as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert os.listdir(tmp_path) == ["torch.py"]


INPROC = {"transport": "inproc"}


@pytest.mark.parametrize(
    ("overrides", "error", "told"),
    [
        (INPROC | {"method": "pldd"}, ConfigError, ".*did you mean pld"),
        (INPROC | {"method": "sps", "drafter.path": None}, ConfigError, r"drafter\.path"),
        (INPROC | {"method": "sps", "drafter.path": "/no/such/draft"}, ModelError, r"drafter\.path=/no/such/draft"),
        ({"model": "/no/such.gguf"}, ModelError, r"model=/no/such\.gguf"),
        ({"method": "sps", "drafter.path": "/no/such/draft"}, ModelError, r"drafter\.path=/no/such/draft"),
        # what is to be mended first
        ({"model": "/no/such/model", "method": "eagle3"}, ModelError, "model=/no/such/model"),
    ],
)
async def test_whatever_refuses_a_start_the_process_that_was_to_verify_ends(
    tiny: str,
    started: list[subprocess.Popen[bytes]],
    overrides: dict[str, Any],
    error: type[Exception],
    told: str,
) -> None:
    with pytest.raises(error, match=f"^{told}"):
        await Engine.start({"model": tiny}, **overrides)
    assert [process.poll() is not None for process in started] == [True] * ("transport" not in overrides)
    assert not leftovers()


async def test_the_target_is_checked_while_the_verifier_loads_and_a_refusal_ends_it(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    check, loading = Workers.check_target, []

    def noted(workers: Workers) -> None:
        loading.extend(workers.running)
        check(workers)

    monkeypatch.setattr(Workers, "check_target", noted)
    with pytest.raises(ModelError, match="t5 is an encoder-decoder; use a decoder-only model"):
        await Engine.start({"model": str(tmp_path / "t5")})
    assert loading == ["verifier"]
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


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
async def test_a_drafter_of_another_vocabulary_is_refused(tiny: str, tiny_stranger: str, transport: str) -> None:
    with pytest.raises(DrafterMismatch, match="drafter tokenizer != target tokenizer from token 0 on"):
        await Engine.start({"model": tiny}, method="sps", transport=transport, **{"drafter.path": tiny_stranger})
    assert not leftovers()


async def test_closing_ends_what_is_under_way_or_waits_for_a_place_and_refuses_what_comes(
    tiny: str, tiny_draft: str
) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1}, **SLOW) as engine:
        params = SamplingParams(max_tokens=450, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate(PROMPTS[2], params)) for _ in range(3)]
        await until(lambda: engine.requests == 3 and bool(engine._inflight))
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert [type(result) for result in results] == [EngineClosed] * 3
    with pytest.raises(EngineClosed):
        await engine.generate("hi")


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
async def test_close_leaves_no_thread_and_no_file(
    tiny: str, tiny_draft: str, transport: str, started: list[subprocess.Popen[bytes]]
) -> None:
    before = set(threading.enumerate())
    async with tiny_engine(tiny, tiny_draft, "pld", transport=transport, mode="async") as engine:
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5))
        assert len(started) == (2 if transport == "ipc" else 0), "each worker is one process"
    new = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in new if thread.name.startswith(("verifier", "drafter"))]
    assert not leftovers()


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_an_engine_that_nobody_closed_ends_with_its_event_loop(
    tiny: str, transport: str, capsys: pytest.CaptureFixture[str]
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

    async def refuse(engine: Engine) -> None:
        raise ModelError("no tokenizer")

    monkeypatch.setattr(Target, "load", load_slowly)
    monkeypatch.setattr("engine.frontend.supervisor.STOP_S", 0.1)
    monkeypatch.setattr(Engine, "_load_tokenizer", refuse)
    with pytest.raises(ModelError, match="no tokenizer"):
        await Engine.start({"model": tiny, "method": "none", "transport": "inproc"})
    loading = [thread for thread in threading.enumerate() if thread.name.startswith("verifier")]
    assert loading
    for thread in loading:
        await asyncio.to_thread(thread.join)
    assert "Traceback" not in capsys.readouterr().err


async def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace=.*cannot be written"):
        await Engine.start({"model": tiny, "method": "none", "transport": "inproc", "trace": str(tmp_path)})


async def test_finished_requests_leave_no_cache_behind(tiny: str, tiny_draft: str) -> None:
    from engine.model.kv_cache import KVCache
    from engine.model.kv_pool import KVPool

    def there(kind: type) -> list[Any]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is kind]

    caches, pools = len(there(KVCache)), {id(pool) for pool in there(KVPool)}  # other tests' targets keep theirs
    async with tiny_engine(tiny, tiny_draft, "sps") as engine:
        for _ in range(3):
            await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5))
        task = asyncio.create_task(engine.generate(PROMPTS[2], SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=2))
        assert len(there(KVCache)) <= caches + 2
        new = [pool for pool in there(KVPool) if id(pool) not in pools]
        assert new and all(pool.free == pool.blocks for pool in new)


def leftovers() -> list[Path]:
    """Socket folders of engines in this process's temporary folder."""
    return list(Path(tempfile.gettempdir()).glob("talon-*"))


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def test_a_model_without_a_chat_template_says_so_at_the_start(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    say_once.cache_clear()
    async with await Engine.start({"model": str(model), "method": "none", "transport": "inproc"}) as engine:
        assert (await engine.generate("hi", SamplingParams(max_tokens=2))).token_ids
        with pytest.raises(RequestError, match="set chat_template=FILE"):
            await engine.generate([{"role": "user", "content": "hi"}])
    assert "talon: this model has no chat template" in capsys.readouterr().err
