from __future__ import annotations

import subprocess
import sys

from engine.core.child_environment import child_environment

CHILD = "import time; from engine.core.child_environment import end_with_parent; end_with_parent(); time.sleep(60)"


def test_a_child_that_ends_with_its_parent_ends_once_its_input_closes() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, env=child_environment())
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(30) == 0
