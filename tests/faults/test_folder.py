"""Folders are removed under a running engine, that of the ipc sockets or the cache: they are made again."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from engine import Engine, SamplingParams
from tests.engine.weights.tiny_gguf import write_gguf
from tests.faults.test_faults import LONG, PROMPT, _own_temporary_folder, expected_text, is_running, pid_of, replaced
from tests.faults.test_tcp import drafts_arrive

__all__ = ["_own_temporary_folder"]


def private(folder: Path) -> bool:
    return folder.stat().st_mode & 0o777 == 0o700


async def test_removing_the_sockets_folder_changes_no_text_whoever_is_killed_then(tiny: str) -> None:
    expected = await expected_text(tiny)
    options = {"verifier.cut": False, "verifier.threads": 1, "verifier.simulated_latency_ms": 1}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", **options) as engine:
        folder = engine._workers.folder
        assert folder is not None
        pids = {pid_of(engine, role) for role in ("verifier", "drafter")}
        for killed in (None, "verifier", "drafter"):
            shutil.rmtree(folder)
            assert (await engine.generate(PROMPT, LONG)).token_ids == expected
            if killed is not None:
                first = pid_of(engine, killed)
                os.kill(first, signal.SIGKILL)
                await replaced(engine, killed, first)
            await drafts_arrive(engine, expected)
            assert private(folder)
            pids |= {pid_of(engine, role) for role in ("verifier", "drafter")}
    assert not folder.exists()
    assert not any(is_running(pid) for pid in pids)


async def test_removing_the_folder_of_temporary_files_changes_no_text_and_a_killed_worker_is_replaced(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await expected_text(tiny)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    options = {"verifier.cut": False, "verifier.threads": 1, "verifier.simulated_latency_ms": 1}
    async with await Engine.start({"model": tiny}, method="pld", mode="async", **options) as engine:
        folder = engine._workers.folder
        assert folder is not None
        for killed in ("verifier", "drafter"):
            shutil.rmtree(tmp_path / "tmp")
            assert (await engine.generate(PROMPT, LONG)).token_ids == expected
            first = pid_of(engine, killed)
            os.kill(first, signal.SIGKILL)
            await replaced(engine, killed, first)
            await drafts_arrive(engine, expected)
            assert private(folder)
    assert not folder.exists()


async def test_removing_the_cache_of_models_changes_no_text_and_a_killed_verifier_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    async with await Engine.start({"model": str(tmp_path / "tiny.gguf")}, method="suffix") as engine:
        expected = (await engine.generate("ab 48", sampling)).token_ids
        first = pid_of(engine, "verifier")
        shutil.rmtree(tmp_path / "home")
        os.kill(first, signal.SIGKILL)
        assert (await engine.generate("ab 48", sampling)).token_ids == expected
        assert pid_of(engine, "verifier") != first and (Path(engine.config.model) / "config.json").is_file()
