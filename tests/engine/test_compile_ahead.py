"""The first start after an installation: it says that it compiles, and compiles on two cores."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import pytest
import torch

from engine import compile_ahead
from engine.config import Config
from engine.kernels.attention import attention
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


def test_attention_is_compiled_for_what_the_model_keeps() -> None:
    only = attention_kernels(torch.bfloat16, False)
    assert only == [Attention(kept(torch.bfloat16), 1).kernel]
    assert attention_kernels(torch.float32, False) == [Attention(kept(torch.float32), 1).kernel]
    assert attention_kernels(torch.bfloat16, True) == [*only, Attention(kept(torch.bfloat16, True), 1).kernel]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (torch.bfloat16, False)),
        ({"dtype": "float32"}, (torch.float32, False)),
        ({"verifier": {"kv_type": "q8_0"}}, (torch.bfloat16, True)),
    ],
)
def test_it_compiles_attention_for_the_configured_types(
    given: dict[str, Any], wanted: tuple[torch.dtype, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"method": "none", **given})
    compiled: list[tuple[torch.dtype, bool]] = []
    others: list[Config] = []
    bound: list[bool] = []
    monkeypatch.setattr("sys.stdin", io.StringIO(config.model_dump_json() + "\n"))
    monkeypatch.setattr(compile_ahead, "end_with_parent", lambda: bound.append(True))
    monkeypatch.setattr(attention, "attention_kernels", lambda *types: compiled.append(types))
    monkeypatch.setattr(compile_ahead, "compile_kernels", others.append)
    compile_ahead.main()
    assert (compiled, others, bound) == ([wanted], [config], [True]), "and ends with the worker that began it"


def kept(dtype: torch.dtype, q8_0: bool = False) -> KVPool:
    """A pool as the engine makes it."""
    return pool_of([(1, 1, 32)], dtype, "q8_0" if q8_0 else "auto", 1 << 16, torch.device("cpu"))
