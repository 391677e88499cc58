"""`talon serve --learn`: keeps texts, and lets a process learn from them while nobody asks.

Each owner's texts teach a head of its own, which the drafter finds (`drafters.hybrid.learned`). The process is stopped
by a signal as soon as there is a request, and goes on once there was none for a while. Its failures cost what it might
have learned alone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import anyio.to_thread
import msgspec
from filelock import FileLock, Timeout
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.config import AUTO, Config, load
from engine.core.child_environment import child_environment
from engine.core.errors import ConfigError
from engine.files.cache_folder import CacheFolder
from engine.files.kept_texts import keep_text
from engine.files.lessons import LearnedFolder, LessonOutcome, LessonPlan, LessonReply
from engine.frontend.tasks import cancel
from engine.install_paths import ROOT
from engine.placement import on_gpu
from engine.server.log import Log
from engine.weights.cache import home
from engine.weights.draft_head import ASSISTANT
from engine.weights.identity import model_identity
from engine.weights.installed_head import METHOD
from engine.weights.resolve import target_folder, with_own

_IDLE_S = 2.0  # without a request, before learning begins or goes on
_LOOK_S = 0.02  # between two looks at whether there are requests
_DUE_S = 5.0  # between two looks at whether there is enough to learn
_PUT_OFF_S = 600.0  # until a lesson that failed is tried again
_TRIES = 3  # failures of a lesson in a row
_TEXTS, _LESSON = 1 / 16, 3 / 4  # shares of the folder's bytes; the rest is for heads
_LEAST_ANSWER = 8  # tokens
_LEARNER = (sys.executable, "-m", "drafters.learning.learner")
_RECIPE = ROOT / "configs" / "train" / "tune.yaml"


def learning_config(config: Config) -> Config:
    """Return the configuration of a server that learns: `hybrid`, with the block head that the model has, if any, until
    an owner has a better one. Looks at the model's files. Raises ConfigError for what cannot learn.
    """
    if config.method not in ("suffix", "hybrid"):
        raise ConfigError(
            f"--learn: method={config.method}: what is learned drafts with hybrid alone: leave --method out"
        )
    if config.remote:
        raise ConfigError("--learn: tcp.remote: drafters on other machines do not see what is learned: leave one out")
    if on_gpu(config):
        raise ConfigError("--learn: heads are learned on a processor alone: set device=cpu, or leave --learn out")
    model = target_folder(config)
    own = with_own(load(config, {"model": model})).drafter
    head = own.weights(METHOD)
    has_block = head is not None and Path(head).is_dir()
    if config.drafter.head not in (AUTO, METHOD) or (config.drafter.head == AUTO and own.head in ("mtp", ASSISTANT)):
        raise ConfigError(f"--learn: drafter.head={own.head}: block heads alone are learned: leave --learn out")
    if config.drafter.path not in (None, AUTO) and not has_block:
        raise ConfigError(
            f"--learn: drafter.path={own.path}: is no folder with a block head: name one, or leave it out"
        )
    folder = home() / "learned" / f"{Path(config.model).stem}-{model_identity(model).hex()[:16]}"
    learned = {"method": "hybrid", "drafter.head": METHOD, "drafter.learned": str(LearnedFolder(folder).heads)}
    return load(config, learned | {"drafter.path": head if has_block else None, "drafter.tuned": None})


class Learning(Collector):
    """What one server learns. config: as `learning_config` makes it, resolved; most_bytes: of all that is kept on the
    disk; is_busy: whether there are requests. paused: the process is stopped; None while there is none. installed:
    lessons whose heads were better. latest: what the last lesson came to.
    """

    def __init__(self, config: Config, name: str, most_bytes: int, is_busy: Callable[[], bool], log: Log):
        assert config.drafter.learned is not None
        self.folder = LearnedFolder(Path(config.drafter.learned).parent)
        self._config, self._name, self._most_bytes = config, name, most_bytes
        self._is_busy, self._log = is_busy, log
        with suppress(OSError):  # the folder of texts says what is wrong
            self.folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.path.chmod(0o700)  # lessons and heads lie there too
        self._folder = CacheFolder(
            self.folder.texts, int(most_bytes * _TEXTS), "--learn", "--learn-gb", "set TALON_HOME to another"
        )
        self.texts = self.steps = self.lessons = self.installed = 0
        self.latest: LessonOutcome | None = None
        self.paused: bool | None = None
        self._news = True  # there may be enough to learn
        self._busy_s = time.monotonic()  # when there was a request last
        self._failures: dict[str, int] = defaultdict(int)  # in a row, by owner
        self._put_off_s: dict[str, float] = {}  # until when, by owner
        self._told: set[str] = set()
        self._lock = FileLock(self.folder.path / ".lock")
        self._task = asyncio.create_task(self._run())

    def keep(self, owner: str | None, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember a text of an owner; nothing is learned from those of nobody."""
        if owner is not None and len(answer) >= _LEAST_ANSWER:
            self.texts, self._news = self.texts + 1, True
            keep_text(self._folder, owner, prompt, answer)

    async def close(self) -> None:
        """End the process, which goes on from its last checkpoint the next time, and write texts that are left."""
        await cancel([self._task])
        self._lock.release()
        await anyio.to_thread.run_sync(self._folder.close)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._busy():
                continue
            try:
                due = await self._due()
                if due and self._alone() and not self._busy():
                    await self._learn(due[0])
                    continue
            except OSError as error:  # of the folder, or of the process that was to be started
                self._tell(f"--learn: {self.folder.path}: {error}: nothing is learned until that is over")
            await asyncio.sleep(_DUE_S)

    async def _due(self) -> list[str]:
        """Return the owners of whom a lesson may begin now."""
        if not self._news:
            return []
        self._news = False
        owners = await anyio.to_thread.run_sync(self.folder.due)
        self._news, now_s = self._news or bool(owners), time.monotonic()
        return [owner for owner in owners if self._put_off_s.get(owner, now_s) <= now_s]

    def _alone(self) -> bool:
        """Return whether no other server learns in the folder; from then on none does."""
        if self._lock.is_locked:
            return True
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._tell(f"--learn: another server learns in {self.folder.path}: this one keeps texts for it")
            return False
        return True

    def _busy(self) -> bool:
        """Return whether there is a request, or was one a moment ago."""
        now_s = time.monotonic()
        if self._is_busy():
            self._busy_s = now_s
        return now_s - self._busy_s < _IDLE_S

    async def _learn(self, owner: str) -> None:
        """Let a process do a lesson, and take what came of it."""
        process = await asyncio.create_subprocess_exec(*_LEARNER, stdin=PIPE, stdout=PIPE, env=child_environment())
        assert process.stdin is not None and process.stdout is not None
        answer = asyncio.ensure_future(process.stdout.read())
        try:
            process.stdin.write(msgspec.json.encode(self._plan(owner)) + b"\n")
            while not answer.done():
                self._pause(process, self._busy())
                await asyncio.wait([answer], timeout=_LOOK_S)
            self._conclude(owner, answer.result(), await process.wait())
        finally:
            self.paused = None
            answer.cancel()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _plan(self, owner: str) -> LessonPlan:
        folder, general = self.folder.path, self._config.drafter.weights(METHOD) or ""
        return LessonPlan(
            model=self._config.model, name=self._name, identity=folder.name.rpartition("-")[2], folder=str(folder),
            owner=owner, general=general, recipe=str(_RECIPE), most_bytes=int(self._most_bytes * _LESSON),
        )  # fmt: skip

    def _pause(self, process: Process, pause: bool) -> None:
        if pause != self.paused:
            self.paused = pause
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGSTOP if pause else signal.SIGCONT)

    def _conclude(self, owner: str, answer: bytes, code: int) -> None:
        try:
            reply = msgspec.json.decode(answer, type=LessonReply)
        except msgspec.DecodeError:
            reply = LessonReply()
        if (outcome := reply.outcome) is not None:
            self._failures.pop(owner, None)
            self.lessons, self.steps, self.latest = self.lessons + 1, self.steps + outcome.steps, outcome
            self.installed += outcome.installed
            return self._log.learned(outcome)
        self._failures[owner] += 1
        why = (
            reply.error or f"--learn: the process that learns ended (code {code}): it goes on from its last checkpoint"
        )
        if self._failures[owner] >= _TRIES:
            self.folder.drop_lesson(owner)
            self._failures.pop(owner)
            why = f"{why}; after {_TRIES} failures this lesson is given up, and the head so far goes on"
        elif reply.error:
            self._put_off_s[owner] = time.monotonic() + _PUT_OFF_S
        self._tell(why)

    def _tell(self, line: str) -> None:
        """Log a line, once."""
        if line not in self._told:
            self._told.add(line)
            self._log.warn(line)

    # For /metrics.

    def collect(self) -> Iterator[Metric]:
        for name, about, value in (
            ("talon:learned_texts", "Texts kept to learn from.", self.texts),
            ("talon:lessons", "Lessons that ended.", self.lessons),
            ("talon:lesson_steps", "Steps of training in these.", self.steps),
            ("talon:learned_heads", "Heads that were better, and drafted from then on.", self.installed),
        ):
            counter = CounterMetricFamily(name, about, labels=["model_name"])
            counter.add_metric([self._name], value)
            yield counter
        about = "1 while a lesson is trained; 0 while none is, or it waits for requests to end."
        learning = GaugeMetricFamily("talon:learning", about, labels=["model_name"])
        learning.add_metric([self._name], int(self.paused is False))
        yield learning
        about = "In the last lesson: by the head so far, and by the new one."
        chain = GaugeMetricFamily("talon:held_out_tokens_per_chain", about, labels=["model_name", "head"])
        if self.latest is not None:
            chain.add_metric([self._name, "so far"], self.latest.before)
            chain.add_metric([self._name, "new"], self.latest.after)
        yield chain
