"""Tests in processes forked from the one that has collected them: `-p tests.forked_tests --forks 3`.

Collecting imports all that any test needs, which takes a core twenty seconds where nothing is compiled yet, so it
happens once. Each fork then asks for the tests of one file at a time, and sends back what came of each. A fork that
dies fails the test that it ran, and another takes its place.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn
from warnings import WarningMessage

import pytest
import torch
from _pytest.config import create_terminal_writer

from tests.forked_process import fork_server

SERVERS = "tests/engine/server/"
"""A folder whose files share servers, so that one process runs them all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many forks of this process")


def pytest_configure(config: pytest.Config) -> None:
    """Start no threads of OpenMP while tests are collected: forks would wait for them for ever."""
    if config.option.forks:
        torch.set_num_threads(1)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forks. A fork of a process that has asked for a GPU cannot use it: there tests run here."""
    option = session.config.option
    if not option.forks or option.collectonly or session.testsfailed or torch.cuda.is_available():
        return None
    fork_server()  # one for all forks
    gc.freeze()  # a fork's collections would go through all that was imported, and copy it
    _Forks(session).run(option.forks)
    return True


def scope(nodeid: str) -> str:
    """Return what one process runs all tests of: a file, or the files that share servers."""
    return SERVERS if nodeid.startswith(SERVERS) else nodeid.partition("::")[0]


class _Fork:
    """The parent's end of a fork. at: the index of the test that runs there; left: those that it has yet to run."""

    def __init__(self, pid: int, link: Connection):
        self.pid = pid
        self.link = link
        self.at = -1
        self.left = deque[int]()


class _Forks:
    """The forks of a session, and the files that none of them has been given yet."""

    def __init__(self, session: pytest.Session):
        self._session = session
        indices = range(len(session.items))
        self._files = deque([*group] for _, group in groupby(indices, lambda index: scope(session.items[index].nodeid)))
        self._running: list[_Fork] = []

    def run(self, number: int) -> None:
        """Run all tests in so many forks."""
        try:
            for _ in range(min(number, len(self._files))):
                self._start()
            while self._running:
                ready = wait([fork.link for fork in self._running])
                for fork in [fork for fork in self._running if fork.link in ready]:
                    self._hear(fork)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for fork in self._running:
                os.kill(fork.pid, signal.SIGKILL)

    def _start(self) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            for inherited in (ours, *(fork.link for fork in self._running)):
                inherited.close()
            _become(self._session, theirs)
        theirs.close()
        self._running.append(_Fork(pid, ours))

    def _hear(self, fork: _Fork) -> None:
        """Do what a fork's next message asks for."""
        try:
            kind, told = fork.link.recv()
        except (EOFError, ConnectionError):
            self._end(fork)
            return
        hook, config = self._session.config.hook, self._session.config
        if kind == "next":
            fork.left.extend(file := self._files.popleft() if self._files else [])
            fork.link.send(file)
        elif kind == "starts":
            fork.at = fork.left.popleft()
        elif kind == "ended":
            fork.at = -1
        elif kind == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=told))
        else:
            hook.pytest_warning_recorded.call_historic(kwargs=told)

    def _end(self, fork: _Fork) -> None:
        """Fail the test that a fork ran when it died, if it ran one, and let another run those behind it."""
        self._running.remove(fork)
        code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        if fork.at < 0 and code:
            raise RuntimeError(f"a fork ended with {code} between two tests")
        if fork.at >= 0:
            item = self._session.items[fork.at]
            reason = f"the process of this test ended with {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
            item.ihook.pytest_runtest_logreport(report=report)
        if fork.left:
            self._files.appendleft([*fork.left])
            self._start()


class _Sender:
    """What stands for the terminal in a fork: it sends reports and warnings to the parent."""

    def __init__(self, config: pytest.Config, link: Connection):
        self._config = config
        self._link = link
        self._tw = create_terminal_writer(config, sys.__stderr__)  # to which pytest-timeout writes stacks

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", told))

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str, nodeid: str, location: Any) -> None:
        message = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = WarningMessage(message, Warning, warning_message.filename, warning_message.lineno)
        self._link.send(("warning", {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}))


def _become(session: pytest.Session, link: Connection) -> NoReturn:
    """Run in this fork the tests that the parent gives it."""
    code = 1
    try:
        manager = session.config.pluginmanager
        capture: Any = manager.getplugin("capturemanager")
        capture.stop_global_capturing()  # whose files the parent has open too
        capture.start_global_capturing()
        capture.suspend_global_capture()
        manager.unregister(name="terminalreporter")
        manager.register(_Sender(session.config, link), "terminalreporter")
        _run_tests(session, link)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_tests(session: pytest.Session, link: Connection) -> None:
    """Run tests until the parent has no more. The fixtures that the next one needs stay, so it is known before."""
    given = _given(session, link)
    item = next(given, None)
    while item:
        link.send(("starts", None))
        following = next(given, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        link.send(("ended", None))
        item = following


def _given(session: pytest.Session, link: Connection) -> Iterator[pytest.Item]:
    while True:
        link.send(("next", None))
        if not (file := link.recv()):
            return
        for index in file:
            yield session.items[index]
