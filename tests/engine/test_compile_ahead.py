"""The first start after an installation: it says that it compiles, and compiles on two cores."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine import compile_ahead
from engine.config import Config
from engine.core.child_environment import child_environment
from engine.kernels.attention.attention import Attention, attention_kernels
from engine.model.kv_pool import KVPool
from engine.model.memory import pool_of


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


def test_attention_is_compiled_for_what_the_model_keeps() -> None:
    only = attention_kernels(torch.bfloat16, False)
    assert only == [Attention(kept(torch.bfloat16), 1).kernel]
    assert attention_kernels(torch.float32, False) == [Attention(kept(torch.float32), 1).kernel]
    assert attention_kernels(torch.bfloat16, True) == [*only, Attention(kept(torch.bfloat16, True), 1).kernel]


def kept(dtype: torch.dtype, q8_0: bool = False) -> KVPool:
    """A pool as the engine makes it."""
    return pool_of((1, 1, 32), dtype, "q8_0" if q8_0 else "auto", 1 << 16, torch.device("cpu"))
