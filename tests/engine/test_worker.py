from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from engine.config import Config
from engine.worker import WorkerSpec

_PROGRAM = """
import gc
from engine import worker
from engine.{module} import {name}

{name}.run = lambda self: print(gc.get_freeze_count())
worker.main()
"""


@pytest.mark.parametrize(
    ("role", "module", "name"), [("verifier", "verifier", "Verifier"), ("drafter", "drafter", "DrafterWorker")]
)
def test_garbage_is_not_looked_for_among_what_a_worker_process_loaded(
    tiny: str, role: str, module: str, name: str
) -> None:
    config = Config.model_validate({"model": tiny, "method": "suffix", "mode": "async", "device": "cpu"})
    here = "ipc:///tmp/nobody-"
    spec = WorkerSpec(role, role, here + "control", here + "drafts", config.model_dump(mode="json"))
    worker = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(module=module, name=name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(msgspec.json.encode(spec) + b"\n")
    worker.stdin.flush()
    assert int(worker.stdout.readline()) > 1000
    worker.communicate()
