"""The front end's side of the workers: starts them, listens to them, and replaces those that died or fell silent.

Requests wait meanwhile, and continue with the new verifier where the old one stopped.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import zmq
import zmq.asyncio

from engine.config import Config
from engine.core import errors
from engine.core.errors import EngineClosed, TalonError, WorkerDied, first_line, printable
from engine.frontend.inflight import InflightRequest, InflightRequests
from engine.frontend.processes import STOP_S, ProcessWorker, Workers
from engine.frontend.tasks import cancel
from engine.frontend.totals import Totals
from engine.placement import oversubscription
from engine.wire.messages import Cancel, Emitted, Failed, Heartbeat, PromptsRead, Ready, Spans, Stop
from engine.wire.trace import Timeline
from engine.wire.transport import Router

FROM_WORKERS = (Ready, Emitted, PromptsRead, Failed, Heartbeat, Spans)
_WATCH_S = 0.05
_TRIES = 3  # failed starts of a worker in a row
_MENDED = 0.1  # of a try counts a failed start from a damaged cache, which has been mended since
_LOOK_S = 0.01
_LAST_WORDS_LOOKS = 200  # maximum polls for what a worker said before it ended
_LAST_SPANS_S = 0.05
_ABSENT_S = 0.5  # the loop itself paused (a frozen container), perhaps with the workers: silence says nothing


class Supervisor:
    """Starts, hears and replaces the workers of one engine.

    ready: by role, whether a worker serves. target: the verifier's facts about it. failed: why there will be no
    verifier any more, else None. first_verifier: a process started early, still without a spec. restore: called before
    a worker is replaced, so that it finds the model; returns whether anything of it had to be made anew.
    """

    def __init__(
        self,
        config: Config,
        inflight: InflightRequests,
        first_verifier: ProcessWorker | None = None,
        restore: Callable[[], bool] = lambda: False,
    ):
        self.config, self.inflight, self._restore = config, inflight, restore
        self.context = zmq.asyncio.Context()
        self.workers = Workers(config, zmq.Context.shadow(self.context), first_verifier)
        self.router = Router(self.context, self.workers.control, FROM_WORKERS)
        self.timeline = Timeline(f"{config.method}, {config.mode}{config.simulation}")
        self.totals = Totals()
        self.target = Ready()
        self.ready: dict[str, asyncio.Event] = {role: asyncio.Event() for role in self.workers.roles}
        self.failed: TalonError | None = None
        self.closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, TalonError] = {}  # why a worker could not start, by role
        self._failed_starts: dict[str, float] = defaultdict(float)  # in a row, by role

    async def launch(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Start the workers, and wait until they serve and `meanwhile` is done. Raises the error of one that cannot."""
        if (warning := oversubscription(self.config)) is not None:
            print(f"talon: {warning}", file=sys.stderr)
        await self._start_checked()
        self._keep_running(self._listen())
        with anyio.move_on_after(self.config.start_timeout_s):
            await meanwhile()
            while not self._all_ready():
                await self._check_starts()
                await asyncio.sleep(_LOOK_S)
        if not self._all_ready():
            raise WorkerDied(f"start_timeout_s={self.config.start_timeout_s:g}: the workers were not ready in time")
        if not self.target.exact:
            say_once(f"talon: the target is not exact, so drafts may turn a near tie: {self.target.inexact}")
        self._keep_running(self._watch())

    async def _start_checked(self) -> None:
        """Start the workers, and check the target here while a verifier in a process of its own begins to load."""
        workers = self.workers
        try:
            await anyio.to_thread.run_sync(workers.check)
        except TalonError:
            await anyio.to_thread.run_sync(workers.check_target)  # if the target is wrong too, report that instead
            raise
        if not workers.in_threads:
            workers.start("verifier")
        await anyio.to_thread.run_sync(workers.check_target)
        for role in workers.roles:
            if role not in workers.running:
                workers.start(role)

    def _all_ready(self) -> bool:
        return all(event.is_set() for event in self.ready.values())

    async def _check_starts(self) -> None:
        for error in self._said.values():
            raise error
        for role in self.workers.roles:
            if not self.ready[role].is_set() and not self.workers.running[role].alive():
                said = await self._last_words(role)
                raise said or WorkerDied(f"the {role} died while loading {self.config.model}")

    def _keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the engine closes; if it fails, fail every request rather than let it wait forever."""

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                if not self.closed:
                    self._abandon()
            elif (error := task.exception()) is not None:
                print(f"talon: {type(error).__name__}: {error}; the engine cannot go on", file=sys.stderr)
                self._give_up(EngineClosed(f"the engine failed: {error}; start a new one"))

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

    # Requests.

    def hand_over(self) -> None:
        """Submit the due requests to the verifier; while there is none, they wait for the next one."""
        if not self.ready["verifier"].is_set():
            return
        verifier = self.workers.running["verifier"].name
        for request in self.inflight.due(verifier):
            request.verifier = verifier
            self.router.send(verifier, *request.submission(self.target.defaults))

    def cancel(self, request: InflightRequest) -> None:
        """Tell the verifier that the front end no longer needs the request."""
        if not self.closed and request.verifier:
            self.router.send(request.verifier, Cancel(request=request.number))

    # What the workers say.

    async def _listen(self) -> None:
        """Pass the workers' messages to the requests that they are for."""
        while True:
            arrival = self.router.open(await self.router.socket.recv_multipart())  # type: ignore[misc]
            if arrival is None:
                continue
            name, message, _ = arrival
            role = name.partition("-")[0]
            if isinstance(message, Spans):  # the last ones arrive after it has ended
                self.timeline.add(role, message)
            if (worker := self.workers.running.get(role)) is not None and worker.name == name:
                self.workers.heard_s[role] = time.monotonic()
                self._hear(role, message)  # late messages of a replaced worker are ignored

    def _hear(self, role: str, message: object) -> None:
        if isinstance(message, Emitted):
            for tokens in message.tokens:
                self.totals.add(tokens)
                self.inflight.deliver(tokens.request, tokens)
        elif isinstance(message, PromptsRead):
            for progress in message.prompts:
                self.inflight.note(progress)
        elif isinstance(message, Failed):
            self._hear_failure(role, message)
        elif isinstance(message, Heartbeat) and role == "verifier":
            self.totals.state = message
        elif isinstance(message, Ready):
            self.ready[role].set()
            self._failed_starts[role] = 0
            if role == "verifier":
                self.target = message
                self.workers.keep_activations(message.activations)
                self.totals.new_verifier()
                self.hand_over()

    def _hear_failure(self, role: str, message: Failed) -> None:
        kind = getattr(errors, message.kind, TalonError)
        error = kind(message.text) if issubclass(kind, TalonError) else TalonError(message.text)
        if message.request is None:
            self._said[role] = error
        else:
            self.inflight.deliver(message.request, error)

    async def _last_words(self, role: str) -> TalonError | None:
        """Return why a worker that has ended could not start, if it said so; on a busy machine this arrives after its
        end.
        """
        for _ in range(_LAST_WORDS_LOOKS):
            if role in self._said:
                break
            await asyncio.sleep(_LOOK_S)
        return self._said.pop(role, None)

    # Workers that have to be replaced.

    async def _watch(self) -> None:
        """Replace workers that died or fell silent."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now_s = time.monotonic()  # read once: the clock may jump between two reads
            if (absent_s := now_s - looked_s) > _ABSENT_S:
                self.workers.forgive_silence(absent_s, now_s)
            looked_s = now_s
            self.router.restore()
            self.hand_over()  # submits those that waited while a suspected request ran alone
            for role in self.workers.roles:
                loading = not self.ready[role].is_set()
                patience_s = self.config.start_timeout_s if loading else self.config.heartbeat_timeout_s
                if (reason := self.workers.dead(role, patience_s, now_s)) is not None:
                    await self._replace(role, reason)

    async def _replace(self, role: str, reason: str) -> None:
        """Restart the worker, unless it keeps failing. A failed start from a damaged cache that has been mended since
        hardly counts. A new verifier needs a new drafter.
        """
        loading = not self.ready[role].is_set()
        said = await self._last_words(role) if loading else self._said.pop(role, None)
        self.ready[role].clear()
        delay_s = self.workers.back_off_s(role)
        if role == "verifier":
            self._stop_workers()
            self.inflight.lose(self.workers.running[role].name)
        else:
            self.router.send(self.workers.running[role].name, Stop())  # a thread that hangs ends once it reads this
        await anyio.to_thread.run_sync(self.workers.end, role, 0.0)
        self.ready[role].clear()  # it may have become ready before it died; from here on nobody listens to it
        mended = await anyio.to_thread.run_sync(self._restore)
        self._failed_starts[role] += loading * (_MENDED if mended else 1)
        if self._failed_starts[role] >= _TRIES:
            return self._go_without(role, f"the {role} cannot be started again: {said or reason}")
        print(f"talon: the {role} {f'failed: {said}' if said else reason}; starting another", file=sys.stderr)
        await asyncio.sleep(delay_s)
        self._start_again(role)
        if role == "verifier" and "drafter" in self.workers.roles:
            patience_s = STOP_S if self._hears("drafter") else 0.0
            await anyio.to_thread.run_sync(self.workers.end, "drafter", patience_s)
            self.ready["drafter"].clear()
            self._start_again("drafter")

    def _start_again(self, role: str) -> None:
        """Start another worker. One that the system refuses, for want of memory say, is one that could not load."""
        try:
            self.workers.start(role)
        except OSError as error:
            self._said[role] = WorkerDied(f"no process can be started: {first_line(error)}")

    def _go_without(self, role: str, why: str) -> None:
        if role == "verifier":
            self._give_up(WorkerDied(why))
        else:
            print(f"talon: {why}; answers go on without drafts", file=sys.stderr)

    def _give_up(self, error: TalonError) -> None:
        """Fail requests in flight and later ones with the reason: the engine cannot continue."""
        self.failed = error
        self.inflight.fail(error)

    # The end.

    async def close(self) -> None:
        """Stop the workers, remove what they left."""
        self.closed = True
        listener, others = self._tasks[:1], self._tasks[1:]  # the listener still reads the workers' last messages
        await cancel(others)
        self._stop_workers()
        for role in list(self.workers.running):
            patience_s = STOP_S if self._hears(role) else 0.0
            await anyio.to_thread.run_sync(self.workers.end, role, patience_s)
        if self.config.trace is not None:
            await asyncio.sleep(_LAST_SPANS_S)
        await cancel(listener)
        self.router.close()
        await anyio.to_thread.run_sync(self._end_context)
        self.workers.close()
        if self.config.trace is not None:
            self.timeline.write(Path(self.config.trace))

    def _abandon(self) -> None:
        """Release what the engine holds: the event loop ended, and nobody closed the engine. It would block the garbage
        collector later, because a ZeroMQ context waits for its sockets.
        """
        print("talon: the engine was not closed; use `async with await Engine.start(...)`", file=sys.stderr)
        self.closed = True
        self.inflight.fail(EngineClosed("its event loop has ended"))
        self._stop_workers()
        for role in list(self.workers.running):
            self.workers.end(role, STOP_S)
        self.router.close()
        self._end_context()
        self.workers.close()

    def _end_context(self) -> None:
        """End ZeroMQ's context, which waits for all sockets. The thread of a worker that loads, or hangs, keeps its
        sockets open and is not waited for.
        """
        ending = threading.Thread(target=self.context.term, daemon=True)
        ending.start()
        ending.join(STOP_S)

    def _stop_workers(self) -> None:
        for worker in self.workers.running.values():
            self.router.send(worker.name, Stop())

    def _hears(self, role: str) -> bool:
        """Return whether the worker will end when asked to. A process that still loads will not, and has nothing to
        save.
        """
        return self.ready[role].is_set() or self.workers.in_threads


@functools.cache
def say_once(line: str) -> None:
    """Print a line once on standard error: a benchmark starts many engines of one target."""
    print(printable(line), file=sys.stderr)
