"""Training on a GPU: every tensor of a step has to be there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from drafters.training.answers import Example
from drafters.training.build import build
from drafters.training.cli import app
from drafters.training.features import KeptFeatures
from drafters.training.loss import Teacher, vocabulary_loss
from drafters.training.recipe import Recipe
from drafters.training.trainer import Trainer, states_read
from tests.drafters.conftest import VOCAB
from tests.drafters.training.conftest import METHODS, SMALL, Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_is_trained_on_a_gpu(method: str, trained: Training, tmp_path: Path) -> None:
    trained(method, device="cuda")
    assert (tmp_path / "head" / "config.json").is_file()


@pytest.mark.parametrize("method", ["block", "eagle3"])
def test_a_head_is_trained_on_a_gpu_that_has_no_room_for_the_features(
    method: str, trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.training.run.room_for", lambda *_: False)
    trained(method, plan={"stored_bits": 8, "markov_rank": 32}, device="cuda", minutes=0.05)
    assert (tmp_path / "head" / "config.json").is_file()


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_prompts_are_answered_on_a_gpu(temperature: str, chatty: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    options = ["--target", str(chatty), "--data", str(data), "--out", str(out), "--temperature", temperature]
    done = CliRunner().invoke(app, ["answers", *options, "--max-tokens", "8", "--batch", "5", "--device", "cuda"])
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 14


def test_a_step_waits_for_nothing_on_a_gpu(chatty: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(chatty).cuda().requires_grad_(False)
    examples = [Example([4 + (i * j) % (VOCAB - 4) for j in range(1, 16)], 3) for i in range(1, 17)]
    plan = Recipe(method="block", **SMALL)  # type: ignore[arg-type]
    features = KeptFeatures(model, examples, states_read(plan, model))
    trainer = Trainer(plan, model, build(plan, model, torch.arange(VOCAB)), features)
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_loss_of_a_gpu_is_that_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 16), (50, 16), (70, 16), (41, 16), (70, 8), (41, 8)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    made = []
    for device in ("cpu", "cuda"):
        hidden, head, *flat = (tensor.to(device).requires_grad_(i > 1) for i, tensor in enumerate(drawn))
        teacher = Teacher(hidden, head[:41], (hidden @ head.T).logsumexp(-1))
        loss, verdicts = vocabulary_loss([(flat[0], flat[1]), (flat[2], flat[3])], teacher, 0.3, 0.7)
        found = [loss, verdicts.best, verdicts.overlap, *torch.autograd.grad(loss, flat)]
        made.append([tensor.detach().cpu() for tensor in found])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
