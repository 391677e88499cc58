"""The folder of the ipc sockets is removed under a running engine: it is made again, and every worker found again."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from engine import Engine
from tests.faults.test_endurance import is_running
from tests.faults.test_faults import LONG, PROMPT, _own_temporary_folder, expected_text, pid_of, replaced
from tests.faults.test_tcp import drafts_arrive

__all__ = ["_own_temporary_folder"]


def private(folder: Path) -> bool:
    return folder.stat().st_mode & 0o777 == 0o700


async def test_removing_the_sockets_folder_changes_no_text_whoever_is_killed_then(tiny: str) -> None:
    expected = await expected_text(tiny)
    options = {"verifier.cut": False, "verifier.threads": 1}
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
