"""A server that learns: what is kept of whom, when the process works, and what its failures cost."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

pytest.importorskip("fastapi", reason="pip install 'talon-decoding[serve]'")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine import Engine, SamplingParams
from engine.config import load
from engine.core.errors import ConfigError
from engine.files.kept_texts import latest_texts, shelf_of
from engine.files.lessons import LearnedFolder
from engine.server import learning as learning_module
from engine.server.app import create_app
from engine.server.learning import Learning, learning_config
from engine.server.log import Log
from engine.server.serving import Serving
from engine.server.settings import Settings
from engine.weights.installed_head import learned_heads
from tests.benchmarks.tuning.conftest import RECIPE, text_from, walker
from tests.command import talon
from tests.drafters.learning.conftest import remember
from tests.engine.server.process import serving
from tests.forked_process import ForkedProcess

__all__ = ["walker"]
TOKENS = 24
AT_ONCE = "import drafters.learning.learner as own; own._give_way = lambda: None; "
AT_ONCE += "import torch; torch.set_num_threads(1); "
"""A process of a lesson that gives way to nobody: tests of other processes may have every core for minutes. Threads
that wait for a core in turn would take as much of it.
"""
SLOWLY = "import drafters.learning.lesson as lesson; lesson._KEPT_MINUTES = 0.0; "
SLEEPS = "import time; input(); time.sleep(60)"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let lessons begin soon, by a small recipe, in a folder of the test's own."""
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    monkeypatch.setattr(learning_module, "_RECIPE", recipe)
    monkeypatch.setattr(learning_module, "_IDLE_S", 0.3)
    monkeypatch.setattr(learning_module, "_DUE_S", 0.05)
    run_instead(monkeypatch, AT_ONCE + "own.main()")


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let another program stand for the process of a lesson, which is forked."""
    monkeypatch.setattr(learning_module, "_LEARNER", (sys.executable, "-c", program))
    with_forks = SimpleNamespace(**vars(asyncio) | {"create_subprocess_exec": forked})
    monkeypatch.setattr(learning_module, "asyncio", with_forks)


class Forked:
    """A forked process, as asyncio has it. started: the numbers of all of them."""

    started: ClassVar[list[int]] = []

    def __init__(self, process: ForkedProcess):
        self._process, self.stdin, self.stdout = process, self, self
        self.send_signal, self.kill = process.send_signal, process.kill
        self.started.append(process.pid)

    def write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        return await asyncio.to_thread(self._process.stdout.read)

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


async def forked(*command: str, **named: Any) -> Forked:
    """Start a process as asyncio does."""
    return Forked(ForkedProcess([*command], **named))


def learners() -> list[psutil.Process]:
    """Return the processes of lessons."""
    return [psutil.Process(process) for process in Forked.started if psutil.pid_exists(process)]


async def until(holds: Callable[[], Any], within_s: float = 120) -> Any:
    """Wait until it holds, and return what it then is."""
    ends = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < ends, "it never came true"
        await asyncio.sleep(0.01)
    return found


class Busy:
    """Whether there are requests, as the test says."""

    now = False

    def __call__(self) -> bool:
        return self.now


@asynccontextmanager
async def learning_of(model: str, folder: Path, busy: Callable[[], bool]) -> AsyncIterator[Learning]:
    """Learn in that folder, without a server."""
    config = load({"model": model}, {"drafter.path": None, "drafter.learned": str(LearnedFolder(folder).heads)})
    learning = Learning(config, "walker", 10**8, busy, Log())
    try:
        yield learning
    finally:
        await learning.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_the_process_stops_as_soon_as_there_is_a_request_and_goes_on_after_a_pause(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(monkeypatch, SLEEPS)
    remember(tmp_path / "learned", "", range(0, 240, 4))
    busy = Busy()
    async with learning_of(walker, tmp_path / "learned", busy) as learning:
        [child] = await until(learners)
        await until(lambda: learning.paused is False)
        for _ in range(2):
            busy.now = True
            began = time.monotonic()
            await until(lambda: child.status() == psutil.STATUS_STOPPED, within_s=5)
            assert time.monotonic() - began < 0.5
            busy.now = False
            await asyncio.sleep(0.15)
            assert child.status() == psutil.STATUS_STOPPED  # another request may come
            await until(lambda: child.status() != psutil.STATUS_STOPPED, within_s=5)
        busy.now = True
        await until(lambda: learning.paused)
    assert learners() == []  # a stopped one ends too


async def test_nothing_begins_while_there_are_requests_or_too_few_texts(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(monkeypatch, SLEEPS)
    busy = Busy()
    busy.now = True
    remember(tmp_path / "learned", "", range(0, 240, 4))
    async with learning_of(walker, tmp_path / "learned", busy):
        await asyncio.sleep(0.8)
        assert learners() == []
        busy.now = False
        await until(learners)
    remember(tmp_path / "few", "", range(31))
    async with learning_of(walker, tmp_path / "few", busy):
        await asyncio.sleep(0.8)
        assert learners() == []


async def test_a_process_that_is_killed_in_training_goes_on_from_its_checkpoint(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_instead(monkeypatch, AT_ONCE + SLOWLY + "own.main()")
    folder = LearnedFolder(tmp_path / "learned")
    remember(folder.path, "", range(0, 240, 4))
    checkpoint = folder.lesson(shelf_of("")) / "head" / "training" / "state.pt"
    async with learning_of(walker, folder.path, Busy()) as learning:
        await until(checkpoint.is_file)
        [child] = learners()
        child.kill()
        outcome = await until(lambda: learning.latest)
    assert outcome.installed and (learning.lessons, learning.steps) == (1, 100)
    assert [*learned_heads(folder.heads)] == [shelf_of("")]
    assert warnings(caplog) == ["--learn: the process that learns ended (code -9): it goes on from its last checkpoint"]


async def test_a_lesson_that_fails_thrice_is_given_up_until_there_are_new_texts(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tmp_path / "runs"
    run_instead(monkeypatch, f"input(); open({str(runs)!r}, 'a').write('x'); raise SystemExit(3)")
    folder = LearnedFolder(tmp_path / "learned")
    remember(folder.path, "", range(0, 240, 4))
    folder.lesson(shelf_of("")).mkdir(parents=True)
    async with learning_of(walker, folder.path, Busy()):
        await until(lambda: len(warnings(caplog)) == 2)
        await asyncio.sleep(0.5)
    assert runs.read_text() == "xxx" and not folder.lesson(shelf_of("")).exists() and folder.due() == []
    first, last = warnings(caplog)
    assert first in last and "after 3 failures this lesson is given up, and the head so far goes on" in last


async def test_what_refuses_a_lesson_is_told_once_and_nobody_else_may_look_into_what_is_learned(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tmp_path / "runs"
    said = json.dumps({"error": "--learn: no room"})
    run_instead(monkeypatch, f"input(); open({str(runs)!r}, 'a').write('x'); print({said!r})")
    remember(tmp_path / "learned", "", range(0, 240, 4))
    async with learning_of(walker, tmp_path / "learned", Busy()):
        await until(lambda: warnings(caplog))
        await asyncio.sleep(0.5)
        assert stat.S_IMODE((tmp_path / "learned").stat().st_mode) == 0o700
    assert runs.read_text() == "x" and warnings(caplog) == ["--learn: no room"]


async def test_of_two_servers_in_one_folder_one_learns(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_instead(monkeypatch, SLEEPS)
    remember(tmp_path / "learned", "", range(0, 240, 4))
    async with learning_of(walker, tmp_path / "learned", Busy()):
        await until(learners)
        async with learning_of(walker, tmp_path / "learned", Busy()) as other:
            await until(lambda: warnings(caplog))
            await asyncio.sleep(0.3)
            assert other.paused is None and len(learners()) == 1
    [line] = warnings(caplog)
    assert line.startswith("--learn: another server learns in ")


@asynccontextmanager
async def server(model: str, *keys: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Serving]]:
    """Serve with `--learn`, in this process, with workers of their own."""
    own = {"verifier.threads": 1, "verifier.cut": False, "drafter.memories": ["pld"]}  # which finds nothing in a walk
    config = learning_config(load({"model": model}, own | settings))
    async with await Engine.start(config) as engine:
        one = Serving(engine, Settings(model="walker", api_keys=keys, learn_gb=0.1))
        assert one.learning is not None
        try:
            transport = httpx.ASGITransport(create_app(one))
            async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
                yield client, one
        finally:
            await one.learning.close()


async def ask(client: httpx.AsyncClient, start: int, key: str = "", session: str = "") -> tuple[str, int]:
    """Return the answer to a walk from that place, and how many of its tokens a head is said to have proposed."""
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | ({"X-Session-Id": session} if session else {})
    body = {"model": "walker", "prompt": text_from(start, 30)[:5], "max_tokens": TOKENS, "temperature": 0}
    answer = await client.post(
        "/v1/completions", headers=headers, json=body | {"ignore_eos": True, "return_sources": True}
    )
    choice = answer.raise_for_status().json()["choices"][0]
    return choice["text"], [token["source"] for token in choice["sources"]].count("head")


async def ask_all(client: httpx.AsyncClient, starts: Iterable[int], key: str = "") -> list[tuple[str, int]]:
    return list(await asyncio.gather(*(ask(client, start, key) for start in starts)))


async def test_a_server_without_keys_learns_from_its_clients_and_no_text_changes(walker: str, tmp_path: Path) -> None:
    starts = [*range(0, 240, 4)]
    async with await Engine.start(load({"model": walker}), method="none", transport="inproc") as engine:
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        plain = [(await engine.generate(text_from(start, 30)[:5], sampling)).text for start in starts]
    async with server(walker) as (client, one):
        learning = one.learning
        assert learning is not None
        assert await ask_all(client, starts) == [(text, 0) for text in plain]
        await ask(client, 5, session="mine")
        outcome = await until(lambda: learning.latest)
        assert outcome.installed and outcome.texts == len(starts)
        await ask_all(client, starts)
        await asyncio.sleep(1)  # taken over once there is no request
        asked = await ask_all(client, starts)
        assert [text for text, _ in asked] == plain
        assert sum(tokens for _, tokens in asked) > len(starts) * TOKENS / 4
        assert (await ask(client, 5, session="mine"))[1] == 0  # another owner, of whom too little is known
        text = (await client.get("/metrics")).text
    told = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    names = ("lessons_total", "learned_heads_total", "lesson_steps_total", "learned_texts_total")
    assert [told[f"talon:{name}"] for name in names] == [1, 1, 100, 3 * len(starts) + 2]
    assert told["talon:held_out_tokens_per_chain"] == outcome.after
    kept = LearnedFolder(next((tmp_path / "home" / "learned").glob("*")))
    assert len([*latest_texts(kept.texts / shelf_of(""))]) == len(starts)


async def test_each_key_is_learned_from_apart(walker: str, tmp_path: Path) -> None:
    async with server(walker, "one", "two") as (client, one):
        await ask_all(client, range(0, 240, 4), "one")
        await ask_all(client, range(2, 42, 4), "two")
        await until(lambda: one.learning and one.learning.latest)
        await asyncio.sleep(1)
        assert [(await ask(client, 1, key))[1] > 0 for key in ("one", "two")] == [True, False]
        folder = LearnedFolder(next((tmp_path / "home" / "learned").glob("*")))
        [head] = learned_heads(folder.heads)
        assert len([*latest_texts(folder.texts / head)]) == 61
        assert len([*folder.texts.glob("*")]) == 2
    async with server(walker, "one", "two") as (client, one):  # names of owners outlive a restart
        assert [(await ask(client, 1, key))[1] > 0 for key in ("one", "two")] == [True, False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "none"), "--learn: method=none: "),
        (("--method", "hybrid", "--set", "drafter.head=eagle3"), "--learn: drafter.head=eagle3: "),
        (("--method", "hybrid", "--set", "drafter.path=org/head"), "--learn: drafter.path=org/head: "),
        (("--set", "transport=tcp", "--set", "tcp.insecure=true", "--set", "tcp.remote=true"), "--learn: tcp.remote: "),
    ],
)
def test_what_cannot_learn_is_refused_in_a_line(walker: str, options: tuple[str, ...], said: str) -> None:
    done = talon("serve", "--learn", "--set", f"model={walker}", *options)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("talon: ")]
    assert done.exit_code == 2 and line.startswith(f"talon: {said}")


def test_without_a_head_one_memory_drafts_until_one_is_learned(walker: str) -> None:
    config = learning_config(load({"model": walker}))
    assert (config.method, config.drafter.head, config.drafter.path) == ("hybrid", "block", None)
    with pytest.raises(ConfigError, match=r"^drafter.memories=\[\]: the model has no head yet"):
        asyncio.run(_started(learning_config(load({"model": walker}, {"drafter.memories": []}))))


async def _started(config: Any) -> None:
    async with await Engine.start(config):
        pass


def test_the_end_of_a_server_is_that_of_what_learns(tiny: str) -> None:
    with serving("--learn", "--set", f"model={tiny}", "--served-model-name", "tiny") as running:
        for number in range(40):
            running.ask("/v1/completions", prompt=f"text {number}", max_tokens=40, ignore_eos=True)

        def learner() -> list[psutil.Process]:
            children = psutil.Process(running.process.pid).children(recursive=True)
            return [child for child in children if "drafters.learning.learner" in child.cmdline()]

        ends = time.monotonic() + 60
        while not (found := learner()):
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert running.end() == 0
        assert not any(child.is_running() for child in found)
