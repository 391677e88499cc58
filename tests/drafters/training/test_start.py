"""Training that goes on from a trained head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import ConfigError, ModelError
from tests.drafters.training.conftest import METHODS, Training, tensors


@pytest.mark.parametrize("method", METHODS)
def test_a_run_can_begin_with_a_trained_head(method: str, trained: Training, tmp_path: Path) -> None:
    trained(method)
    fewer = tmp_path / "fewer.jsonl"  # of other answers, which would make another draft vocabulary
    fewer.write_text("".join(json.dumps({"prompt": f"w{9 * i + 4}"}) + "\n" for i in range(4)))
    trained(method, "on", prompts=fewer, plan={"lr": 1e-30}, start=tmp_path / "head")
    began, ended = tensors(tmp_path / "head"), tensors(tmp_path / "on")
    assert began.keys() == ended.keys()
    for name in began:
        torch.testing.assert_close(ended[name], began[name], atol=0.01 * float(began[name].float().abs().max()), rtol=0)
    seen = [json.loads((tmp_path / name / "training.json").read_text())["drafts_seen"] for name in ("head", "on")]
    state = torch.load(tmp_path / "on" / "training" / "state.pt", weights_only=True)
    assert state["tokens"] > seen[0] == seen[1]  # it went on counting, and the head that it began with was best


def test_a_trained_head_is_kept_where_training_on_makes_it_worse(trained: Training, tmp_path: Path) -> None:
    began = trained("eagle3")
    ended = trained("eagle3", "on", plan={"lr": 50.0, "warmup": 0}, start=tmp_path / "head")
    assert ended.chain_length() >= 0.99 * began.chain_length() > 0  # the head was rounded to bfloat16 in between
    assert json.loads((tmp_path / "on" / "training.json").read_text())["steps"] == 0


@pytest.mark.parametrize(("wrong", "told"), [({"out": "a file"}, "out="), ({"device": "gpu"}, "device='gpu'")])
def test_what_cannot_be_done_is_refused_before_anything_is_answered(
    wrong: dict[str, str], told: str, trained: Training, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match=f"^{told}"):
        trained("medusa", **wrong)
    assert not (tmp_path / "answers").exists()


@pytest.mark.parametrize("changes", [{"norm_before_residual": True}, {"rms_norm_eps": 0.5}])
def test_a_head_that_computes_something_else_is_refused_before_anything_is_answered(
    changes: dict[str, Any], trained: Training, tmp_path: Path
) -> None:
    trained("eagle3")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=r"^start=.*head: "):
        trained("eagle3", "other/on", start=tmp_path / "head")
    assert not (tmp_path / "other").exists()


def test_a_run_does_not_go_on_with_the_vocabulary_of_another_head(trained: Training, tmp_path: Path) -> None:
    trained("eagle3", plan={"draft_vocab_size": 20})
    trained("eagle3", "on", start=tmp_path / "head")
    with pytest.raises(ConfigError, match="give the same --start"):
        trained("eagle3", "on", resume=True)
