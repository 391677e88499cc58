from __future__ import annotations

import importlib.util
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine import worker
from engine.config import Config
from engine.worker import WorkerSpec

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
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
        exempt, others = map(int, process.stdout.readline().split())
        process.wait(60)
    assert exempt > 20 * others


@pytest.mark.parametrize("spec_waits", [True, False])
def test_what_a_new_model_needs_is_imported_while_it_is_described(
    spec_waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(worker, "importlib", SimpleNamespace(import_module=imported.append))
    monkeypatch.setattr(select, "select", lambda read, *_: (read * spec_waits, [], []))
    worker._import_early()
    assert all(map(importlib.util.find_spec, imported)) and "engine.model.target" in imported
    assert ("engine.model.trial.forward_choice" in imported) != spec_waits
