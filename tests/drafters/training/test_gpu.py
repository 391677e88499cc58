"""Training on a GPU: every tensor of a step has to be there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafters.training.run import train
from tests.drafters.training.conftest import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_is_trained_on_a_gpu(
    method: str, chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    train(method, str(chatty), data, tmp_path / "head", recipe(method), device="cuda")
    assert (tmp_path / "head" / "config.json").is_file()
