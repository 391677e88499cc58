"""Real faults, against worker processes: killed, stopped, orphaned, lied to."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from engine import Engine, SamplingParams
from engine.config import Config
from engine.core.errors import WorkerDied
from engine.core.tree import TokenTree
from engine.frontend.processes import ProcessWorker, ThreadWorker, Worker, Workers
from engine.wire.messages import Draft, Hello, encode
from engine.worker import WorkerSpec

PROMPT = list(b"the cat sat on the mat, the cat")
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
THREADS: dict[str, Any] = {"verifier.threads": 1}  # nothing here is large enough for two


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("talon-*"))


_TEXTS: dict[str, list[int]] = {}


async def expected_text(model: str) -> list[int]:
    """Return what plain decoding answers, once for each model."""
    if model not in _TEXTS:
        async with await Engine.start({"model": model}, method="none", transport="inproc", **THREADS) as engine:
            _TEXTS[model] = (await engine.generate(PROMPT, LONG)).token_ids
    return _TEXTS[model]


def pid_of(engine: Engine, role: str) -> int:
    worker = engine._workers.running[role]
    assert not isinstance(worker, ThreadWorker)
    return int(worker.pid)  # type: ignore[attr-defined]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.05)


async def replaced(engine: Engine, role: str, first: int) -> None:
    """Wait until another worker than `first` serves. In between there may be none."""
    running = engine._workers.running
    await until(lambda: engine._ready[role].is_set() and role in running and pid_of(engine, role) != first)


async def drafts_arrive(engine: Engine, expected: list[int]) -> None:
    """Ask, always getting the right text, until a drafter takes part. A new one imports first, which takes long beside
    other work.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        result = await engine.generate(PROMPT, LONG)
        assert result.token_ids == expected
        if result.metrics.mean_accepted_tokens > 1:
            return
        await asyncio.sleep(0.2)
    raise AssertionError("no drafts came")


async def test_a_killed_drafter_changes_no_text_and_comes_back(tiny: str) -> None:
    expected = await expected_text(tiny)
    options = THREADS | {"verifier.cut": False, "verifier.simulated_latency_ms": 1}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", **options) as engine:
        for _ in range(3):
            first = pid_of(engine, "drafter")
            task = asyncio.create_task(engine.generate(PROMPT, LONG))
            await asyncio.sleep(0.15)
            os.kill(first, signal.SIGKILL)
            assert (await task).token_ids == expected
            await replaced(engine, "drafter", first)
        await drafts_arrive(engine, expected)


async def test_a_stopped_drafter_changes_no_text_and_is_replaced(tiny: str) -> None:
    expected = await expected_text(tiny)
    options = THREADS | {"heartbeat_timeout_s": 3, "verifier.draft_timeout_s": 0.2, "verifier.simulated_latency_ms": 1}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", **options) as engine:
        first = pid_of(engine, "drafter")
        task = asyncio.create_task(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.15)
        os.kill(first, signal.SIGSTOP)
        assert (await task).token_ids == expected
        await replaced(engine, "drafter", first)
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected


async def test_garbage_from_the_drafters_side_changes_no_text(tiny: str) -> None:
    expected = await expected_text(tiny)
    async with await Engine.start(
        {"model": tiny}, method="pld", mode="async", **THREADS, **{"verifier.draft_timeout_s": 0.01}
    ) as engine:
        liar = zmq.Context.shadow(engine._supervisor.context).socket(zmq.DEALER)
        liar.setsockopt(zmq.LINGER, 0)
        liar.setsockopt(zmq.IDENTITY, b"liar")
        liar.connect(engine._workers._meeting)
        liar.send_multipart(encode(Hello()))  # from now on the verifier takes this peer for its drafter
        rng = np.random.default_rng(3)
        task = asyncio.create_task(engine.generate(PROMPT, LONG))
        request = 1
        while not task.done():
            fields = {name: int(rng.integers(0, 4)) for name in ("draft", "parent", "node")}
            draft = Draft(
                request=request, round=int(rng.integers(0, 400)), token=int(rng.integers(0, 260)), draft_us=0, **fields
            )
            n = int(rng.integers(1, 6))
            arrays = [rng.integers(-2, 300, n), rng.integers(-1, n, n), rng.random(n), rng.integers(0, 9, n)]
            liar.send_multipart(encode(draft, arrays))
            liar.send_multipart([rng.bytes(20), rng.bytes(3)])
            await asyncio.sleep(0.001)
        liar.close()
        assert (await task).token_ids == expected


async def test_an_engine_that_was_frozen_as_a_whole_goes_on_with_its_workers(tiny: str) -> None:
    async with await Engine.start({"model": tiny}, method="pld", mode="async", heartbeat_timeout_s=2) as engine:
        before = [pid_of(engine, role) for role in ("verifier", "drafter")]
        await asyncio.sleep(0.3)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.2)  # noqa: ASYNC251 - the front end is frozen as well
        await asyncio.sleep(0.3)
        for pid in before:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1)
        assert [pid_of(engine, role) for role in ("verifier", "drafter")] == before


async def test_a_wall_clock_that_jumps_changes_nothing(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await expected_text(tiny)
    now, jumps = time.time, itertools.cycle([-1e7, 0, 1e7])
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))  # the workers are threads here: it is theirs too
    options = THREADS | {"verifier.cut": False, "verifier.simulated_latency_ms": 1}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", transport="inproc", **options) as engine:
        await drafts_arrive(engine, expected)
        await asyncio.sleep(0.2)
        assert engine._ready["drafter"].is_set()  # nobody was taken for silent


async def test_a_worker_that_hangs_while_loading_is_killed_when_the_start_has_failed(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    def begin_and_stop(workers: Workers, spec: WorkerSpec) -> Worker:
        worker = begin(workers, spec)
        assert isinstance(worker, ProcessWorker)
        pids.append(worker.pid)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    begin = Workers._begin
    monkeypatch.setattr(Workers, "_begin", begin_and_stop)
    monkeypatch.setattr("engine.frontend.supervisor.STOP_S", 1000.0)
    with pytest.raises(WorkerDied, match=r"start_timeout_s=1: the workers were not ready in time"):
        await asyncio.wait_for(Engine.start({"model": tiny}, method="pld", mode="async", start_timeout_s=1), 120)
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


SCRIPT = """
import asyncio, sys
from engine import Engine, SamplingParams

async def main():
    async with await Engine.start({"model": sys.argv[1]}, method="pld", mode="async") as engine:
        print(*[worker.pid for worker in engine._workers.running.values()], flush=True)
        while True:
            await engine.generate("again and again and", SamplingParams(max_tokens=200, ignore_eos=True))

asyncio.run(main())
"""


def restore_interrupt() -> None:
    """A shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_however_the_front_end_ends_no_process_and_no_file_is_left(
    tiny: str, tmp_path: Path, end: signal.Signals
) -> None:
    script = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop
        [sys.executable, "-c", textwrap.dedent(SCRIPT), tiny],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=restore_interrupt,
    )
    assert script.stdout is not None
    workers = [int(pid) for pid in (await asyncio.to_thread(script.stdout.readline)).split()]
    assert len(workers) == 2
    await asyncio.sleep(0.3)
    script.send_signal(end)
    try:
        await asyncio.to_thread(script.wait, 60)
    finally:
        script.kill()
        script.stdout.close()
    await until(lambda: not any(is_running(pid) for pid in workers), 20)
    await until(lambda: not list(tmp_path.glob("talon-*")), 10)


async def test_a_drafters_thread_that_hangs_does_not_keep_the_engine_from_closing(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, released = threading.Event(), threading.Event()

    def hang(*_: object) -> TokenTree:
        hung.set()
        released.wait()
        return TokenTree.root_only(PROMPT[-1])

    monkeypatch.setattr("drafters.lookup.prompt_lookup.PromptLookup.propose", hang)
    monkeypatch.setattr("engine.frontend.supervisor.STOP_S", 0.5)
    engine = await Engine.start({"model": tiny}, method="pld", mode="async", transport="inproc", **THREADS)
    rescue = threading.Timer(60, released.set)  # of this test, if closing waits for the thread
    rescue.start()
    while not hung.is_set() and not released.is_set():
        await engine.generate(PROMPT, SamplingParams(max_tokens=8))
    assert hung.is_set()
    await engine.close()
    assert not released.is_set()
    rescue.cancel()
    released.set()


async def test_a_drafters_thread_that_hung_ends_once_it_has_been_replaced_and_goes_on(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> TokenTree:
        hung.set()
        go_on.wait(60)
        return TokenTree.root_only(PROMPT[-1])

    monkeypatch.setattr("drafters.lookup.prompt_lookup.PromptLookup.propose", hang)
    options = {"heartbeat_timeout_s": 1, "verifier.draft_timeout_s": 0.1, "verifier.cut": False, **THREADS}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", transport="inproc", **options) as engine:
        first = engine._workers.running["drafter"]
        asking = asyncio.create_task(engine.generate(PROMPT, LONG))
        await until(hung.is_set)
        await until(lambda: engine._workers.running.get("drafter", first) is not first)
        go_on.set()
        await until(lambda: not first.alive())
        await asking


class Refusing:
    """Refuses to start processes of a role, as the system does for want of memory. left: so many times from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, role: str):
        self.role, self.left = role, 0
        self._begin = ProcessWorker.__init__
        monkeypatch.setattr(ProcessWorker, "__init__", lambda worker, role, config: self.begin(worker, role, config))

    def begin(self, worker: ProcessWorker, role: str, config: Config) -> None:
        if role == self.role and self.left:
            self.left -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._begin(worker, role, config)


@pytest.mark.parametrize("role", ["verifier", "drafter"])
async def test_a_worker_that_the_system_starts_only_later_is_replaced_then(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], role: str
) -> None:
    expected = await expected_text(tiny)
    refusing = Refusing(monkeypatch, role)
    options = THREADS | {"verifier.cut": False, "verifier.simulated_latency_ms": 1}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", **options) as engine:
        refusing.left = 2
        os.kill(first := pid_of(engine, role), signal.SIGKILL)
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected
        await until(lambda: refusing.left == 0)
        await replaced(engine, role, first)
        await drafts_arrive(engine, expected)
    why = f"talon: the {role} failed: no process can be started: [Errno {errno.EAGAIN}]"
    assert capfd.readouterr().err.count(why) == 2


async def test_without_a_drafter_that_the_system_starts_answers_go_on(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = await expected_text(tiny)
    refusing = Refusing(monkeypatch, "drafter")
    async with await Engine.start({"model": tiny}, method="pld", mode="async", **THREADS) as engine:
        refusing.left = 1000
        os.kill(pid_of(engine, "drafter"), signal.SIGKILL)
        await until(lambda: "drafter" not in engine._workers.running and refusing.left < 1000)
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected
        await until(lambda: 1000 - refusing.left == 3)
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected
    assert "answers go on without drafts" in capfd.readouterr().err
