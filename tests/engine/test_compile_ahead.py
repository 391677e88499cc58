"""The first start after an installation: it says that it compiles, and compiles on two cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine import compile_ahead
from engine.config import Config
from engine.core.child_environment import child_environment


def begun(config: Config, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def noted(*args: object, **options: object) -> subprocess.Popen[str]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    compile_ahead.begin(config)
    return started[0]


def test_it_says_so_and_ends_by_itself(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    process = begun(Config(method="none"), monkeypatch)
    assert "compiling for this processor, once" in capfd.readouterr().err
    assert process.wait(300) == 0


def test_it_ends_with_the_worker_that_began_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.compile_ahead"], stdin=subprocess.PIPE, env=child_environment(), text=True
    )
    assert process.stdin is not None
    process.stdin.write(Config(method="suffix").model_dump_json() + "\n")
    process.stdin.close()
    assert process.wait(60) == 0
