from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.config import Config
from engine.worker import WorkerSpec

_EARLY = """
import sys
from engine import worker

worker._import_early()
print(*(name in sys.modules for name in ("engine.model.target", "engine.model.trial.forward_choice")), flush=True)
"""

_PROGRAM = """
import gc
from engine import worker
from engine.{module} import {name}

def tell(self):
    print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)

{name}.run = tell
worker.main()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, for sockets; a worker removes it when the front end is gone."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.mark.parametrize(
    ("role", "module", "name"),
    [("verifier", "verifier.loop", "Verifier"), ("drafter", "drafting.worker", "DrafterWorker")],
)
def test_garbage_is_not_looked_for_among_what_a_worker_process_loaded(
    tiny: str, folder: Path, role: str, module: str, name: str
) -> None:
    config = Config.model_validate({"model": tiny, "method": "suffix", "mode": "async", "device": "cpu"})
    here = f"ipc://{folder}/"
    spec = WorkerSpec(role, role, here + "control", here + "drafts", config.model_dump(mode="json"))
    program = [sys.executable, "-c", _PROGRAM.format(module=module, name=name)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(msgspec.json.encode(spec) + b"\n")
        worker.stdin.flush()
        exempt, others = map(int, worker.stdout.readline().split())
        worker.wait(60)
    assert exempt > 20 * others


@pytest.mark.parametrize("spec_waits", [True, False])
def test_what_a_new_model_needs_is_imported_while_it_is_described(spec_waits: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", _EARLY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        if spec_waits:
            worker.stdin.write(b"{}\n")
            worker.stdin.flush()
        assert worker.stdout.readline().split() == [b"True", b"False" if spec_waits else b"True"]
