"""The process of a lesson, `python -m drafters.learning.learner`: reads a plan, answers with what came of it.

It works at the lowest priority; whoever started it stops it (SIGSTOP) while there are requests. It ends with that
process: when its standard input closes, and on Linux by the kernel, which reaches stopped processes too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.core.child_environment import end_with_parent
from engine.core.errors import TalonError, first_line
from engine.files.lessons import LessonPlan, LessonReply

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    _give_way()
    if not (line := sys.stdin.buffer.readline()):
        return
    end_with_parent()
    print(msgspec.json.encode(reply(msgspec.json.decode(line, type=LessonPlan))).decode(), flush=True)


def reply(plan: LessonPlan) -> LessonReply:
    """Do the lesson; whatever fails is told in one line."""
    try:
        from drafters.learning.lesson import learn

        return LessonReply(outcome=learn(plan))
    except TalonError as error:
        return LessonReply(error=str(error))
    except Exception as error:  # memory, say
        return LessonReply(error=f"--learn: {type(error).__name__}: {first_line(error)}: the head so far goes on")


def _give_way() -> None:
    """Take the lowest priority that the system has, and end with the process that started this one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # where memory is short, this process ends and not the server
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
