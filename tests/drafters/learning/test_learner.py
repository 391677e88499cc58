"""The process of a lesson gives way to all others, and ends with the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from drafters.learning import lesson
from drafters.learning.learner import reply
from engine.core.child_environment import child_environment
from engine.core.errors import ModelError
from engine.files.lessons import LessonPlan

PLAN = LessonPlan(
    model="nowhere", name="m", identity="1", folder="nowhere", owner="o", general="", recipe="nowhere", most_bytes=1
)
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""
CHILD = "from drafters.learning.learner import _give_way; _give_way(); print('ready', flush=True); input()"


def test_it_has_the_lowest_priority() -> None:
    program = CHILD.replace("'ready'", "os.sched_getscheduler(0), os.nice(0)").replace("input()", "")
    command = [sys.executable, "-c", f"import os; {program}"]
    said = subprocess.check_output(command, env=child_environment(), text=True).split()
    assert said == [str(os.SCHED_IDLE), "19"]


def test_it_ends_with_its_parent_even_while_it_is_stopped() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), text=True)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_ends_when_its_input_closes() -> None:
    command = [sys.executable, "-m", "drafters.learning.learner"]
    learner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
    said, _ = learner.communicate(timeout=60)
    assert (learner.returncode, said) == (0, b"")


@pytest.mark.parametrize(
    ("error", "said"), [(ModelError("a line"), "a line"), (MemoryError("no\nroom"), "--learn: MemoryError: no")]
)
def test_whatever_fails_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def learn(plan: LessonPlan) -> None:
        raise error

    monkeypatch.setattr(lesson, "learn", learn)
    told = reply(PLAN)
    assert told.outcome is None and told.error.startswith(said) and len(told.error.splitlines()) == 1
