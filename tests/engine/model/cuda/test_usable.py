"""A Triton that can be imported and does not run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from drafters.heads.growth.ranking import _kernels
from drafters.heads.new_stack import new_stack
from drafters.training import loss
from engine.model.cuda import noise_kernels
from engine.model.cuda.usable import runs_kernels


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    runs_kernels.cache_clear()
    yield
    runs_kernels.cache_clear()


def test_kernels_that_run_are_taken() -> None:
    assert runs_kernels(torch.device("cpu")), "interpreted"


def test_where_triton_cannot_compile_heads_draft_without_it_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no ptxas\nand much more")

    monkeypatch.setattr(noise_kernels, "likeliest", broken)
    spec: Any = SimpleNamespace(first=SimpleNamespace(device=torch.device("meta")))
    assert new_stack(spec) is None and _kernels(torch.device("meta")) is None
    assert loss._kernel(torch.empty(1, device="meta"), 10) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("talon: Triton does not run on meta (no ptxas): heads are computed without its kernels")
