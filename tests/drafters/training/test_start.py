"""Training that goes on from a trained head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.training.run import train
from engine.core.errors import ConfigError, ModelError
from tests.drafters.training.conftest import METHODS, tensors


@pytest.mark.parametrize("method", METHODS)
def test_a_run_can_begin_with_a_trained_head(
    method: str, chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    train(method, str(chatty), data, tmp_path / "head", recipe(method))
    fewer = tmp_path / "fewer.jsonl"  # of other answers, which would make another draft vocabulary
    fewer.write_text("".join(json.dumps({"prompt": f"w{9 * i + 4}"}) + "\n" for i in range(4)))
    train(method, str(chatty), fewer, tmp_path / "on", recipe(method, lr=1e-30), start=tmp_path / "head")
    began, ended = tensors(tmp_path / "head"), tensors(tmp_path / "on")
    assert began.keys() == ended.keys()
    for name in began:
        torch.testing.assert_close(ended[name], began[name], atol=0.01 * float(began[name].float().abs().max()), rtol=0)
    seen = [json.loads((tmp_path / name / "training.json").read_text())["drafts_seen"] for name in ("head", "on")]
    state = torch.load(tmp_path / "on" / "training" / "state.pt", weights_only=True)
    assert state["tokens"] > seen[0] == seen[1]  # it went on counting, and the head that it began with was best


def test_a_trained_head_is_kept_where_training_on_makes_it_worse(
    chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    began = train("eagle3", str(chatty), data, tmp_path / "head", recipe("eagle3"))
    spoilt = recipe("eagle3", lr=50.0, warmup=0)
    ended = train("eagle3", str(chatty), data, tmp_path / "on", spoilt, start=tmp_path / "head")
    assert ended.chain_length() >= 0.99 * began.chain_length() > 0  # the head was rounded to bfloat16 in between
    assert json.loads((tmp_path / "on" / "training.json").read_text())["steps"] == 0


@pytest.mark.parametrize(("wrong", "told"), [({"out": "a file"}, "out="), ({"device": "gpu"}, "device='gpu'")])
def test_what_cannot_be_done_is_refused_before_anything_is_answered(
    wrong: dict[str, str], told: str, chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    out, device = tmp_path / wrong.get("out", "out"), wrong.get("device", "auto")
    with pytest.raises(ConfigError, match=f"^{told}"):
        train("medusa", str(chatty), data, out, recipe("medusa"), device=device)
    assert not (tmp_path / "answers").exists()


@pytest.mark.parametrize("changes", [{"norm_before_residual": True}, {"rms_norm_eps": 0.5}])
def test_a_head_that_computes_something_else_is_refused_before_anything_is_answered(
    changes: dict[str, Any], chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    train("eagle3", str(chatty), data, tmp_path / "head", recipe("eagle3"))
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=r"^start=.*head: "):
        train("eagle3", str(chatty), data, tmp_path / "other" / "on", recipe("eagle3"), start=tmp_path / "head")
    assert not (tmp_path / "other").exists()


def test_a_run_does_not_go_on_with_the_vocabulary_of_another_head(
    chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    train("eagle3", str(chatty), data, tmp_path / "head", recipe("eagle3", draft_vocab_size=20))
    train("eagle3", str(chatty), data, tmp_path / "on", recipe("eagle3"), start=tmp_path / "head")
    with pytest.raises(ConfigError, match="give the same --start"):
        train("eagle3", str(chatty), data, tmp_path / "on", recipe("eagle3"), resume=True)
