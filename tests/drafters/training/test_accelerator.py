"""What keeps an accelerator busy: large batches of answers, features in its memory, steps that do not wait, a time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from drafters.heads.checkpoint import Checkpoint, TargetWeights, coded
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.one_pass.block import BlockHead
from drafters.training import answers as answers_module
from drafters.training import trainer as trainer_module
from drafters.training.answers import Example, answer_prompts
from drafters.training.build import build
from drafters.training.cli import app
from drafters.training.features import FeatureSource, KeptFeatures
from drafters.training.recipe import Recipe
from drafters.training.score import Score
from drafters.training.target import chat, generate, load_target
from drafters.training.trainer import Trainer
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.files.answer_rows import AnswerRow, open_answers
from engine.files.json_lines import json_lines
from engine.files.prompt_file import read_prompts
from tests.drafters.conftest import VOCAB
from tests.drafters.training.conftest import SMALL, Training


def answers_of(target: Path, data: Path, out: Path, *options: str) -> list[AnswerRow]:
    given = ["--target", str(target), "--data", str(data), "--out", str(out), "--max-tokens", "6", *options]
    done = CliRunner().invoke(app, ["answers", *given])
    assert done.exit_code == 0, done.output
    with out.open("rb") as file:
        return [row for _, row in json_lines(file, AnswerRow)]


def test_answers_in_batches_are_rows_of_talon_answer_and_are_what_a_head_learns_from(
    chatty: Path, data: Path, trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "answers.jsonl"
    rows = answers_of(chatty, data, out, "--batch", "5")
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    assert open_answers(out, str(chatty), sampling) == {row.prompt: row.tokens for row in rows}
    assert len(rows) == 14 and all(1 <= len(row.tokens) <= 6 for row in rows)
    assert all((row.finish_reason == "eos") == (row.tokens[-1] == 3) for row in rows)
    monkeypatch.setattr(answers_module, "generate", None)  # not called
    assert answers_of(chatty, data, out) == rows
    trained("medusa", prompts=out)


def test_no_batch_of_answers_is_begun_after_the_time_is_up(
    chatty: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_target(chatty, "cpu")
    prompts = {row.prompt: chat(tokenizer, row.prompt) for row in read_prompts(data, "data")}
    clock = itertools.count(0, 20.0)
    monkeypatch.setattr(answers_module.time, "monotonic", lambda: next(clock))
    found = answer_prompts(
        model, tokenizer, prompts, tmp_path / "out", "chatty", SamplingParams(max_tokens=3), 4, minutes=2.0
    )
    assert 0 < len(found) < 14


def test_a_batch_that_does_not_fit_the_memory_is_halved(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(chatty)
    prompts = [[1, 5, 6, 2], [1, 9, 2], [1, 8, 2], [1, 7, 4, 2], [1, 6, 2]]
    whole = generate(model, prompts, 3, 6, 0.0, seed=0)
    plain, sizes = model.generate, []

    def small(ids: Any, **options: Any) -> Any:
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError
        return plain(ids, **options)

    monkeypatch.setattr(model, "generate", small)
    halved = generate(model, prompts, 3, 6, 0.0, seed=0)
    assert sizes == [5, 2, 3, 1, 2]
    for one, other in zip(whole, halved, strict=True):  # a batch ends with its longest answer
        assert all(a == b for a, b in zip(one, other, strict=False))


def test_prompts_are_answered_together_with_others_of_their_length(
    trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": " ".join(f"w{4 + i}" for _ in range(1 + i % 4))}) + "\n" for i in range(12))
    )
    batches: list[list[int]] = []

    def noted(model: Any, batch: list[list[int]], *rest: Any, **options: Any) -> list[list[int]]:
        batches.append([len(prompt) for prompt in batch])
        return generate(model, batch, *rest, **options)

    monkeypatch.setattr("drafters.training.answers.generate", noted)
    trained("medusa", prompts=data)
    assert sorted(batches) == [[3] * 3 + [4], [4] * 2 + [5] * 2, [5] + [6] * 3]


@pytest.fixture(scope="module")
def texts(chatty: Path) -> tuple[Any, list[Example]]:
    model = AutoModelForCausalLM.from_pretrained(chatty).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randint(4, VOCAB, (12 + i % 5,), generator=generator).tolist() for i in range(16))
    return model, [Example(tokens, 3) for tokens in drawn]


@pytest.mark.parametrize("method", ["block", "eagle3"])
def test_a_step_reads_no_number_back_from_the_device(
    method: str, texts: tuple[Any, list[Example]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one waits until the device has computed it, and the device then waits for the next step."""
    model, examples = texts
    plan = Recipe(method=method, **SMALL)  # type: ignore[arg-type]
    trainer = Trainer(plan, model, build(plan, model, torch.arange(VOCAB)), FeatureSource(model, examples))
    trainer.features = KeptFeatures(model, examples, trainer.states)

    def refused(tensor: torch.Tensor) -> Any:
        raise AssertionError("a number is read")

    with monkeypatch.context() as patch:
        for name in ("item", "__int__", "__float__", "__bool__"):
            patch.setattr(torch.Tensor, name, refused)
        score = Score()
        trainer._loss(trainer._batch(0), plan.unroll, score, seed=1).backward()
    assert score.mean_loss() > 0 and len(score.acceptance()) == plan.unroll


def test_a_run_of_a_given_time_ends_with_it_and_its_learning_rate_falls_to_the_end(
    texts: tuple[Any, list[Example]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, examples = texts
    plan = Recipe(method="eagle3", **{**SMALL, "steps": 3, "warmup": 0})  # type: ignore[arg-type]
    clock, rates = itertools.count(0, 1.0), []
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: next(clock))
    trainer = Trainer(
        plan, model, build(plan, model, torch.arange(VOCAB)), FeatureSource(model, examples), limit_s=20.0
    )  # two looks at the clock a step
    trainer.run(
        tmp_path / "state.pt", 1e9, lambda *_: rates.append(trainer.optimizer.param_groups[0]["lr"]), lambda *_: None
    )
    assert 3 < trainer.step <= 20 and 20 <= trainer.trained_s <= 22
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.2 * rates[0]
    again = Trainer(plan, model, build(plan, model, torch.arange(VOCAB)), FeatureSource(model, examples), limit_s=20.0)
    again.load(tmp_path / "state.pt")
    assert again.done >= 1


@pytest.mark.parametrize(("method", "head"), [("block", BlockHead), ("eagle3", Eagle3Head)])
def test_a_head_in_codes_of_8_bits_takes_half_the_bytes_and_is_the_same_but_for_rounding(
    method: str, head: Any, chatty: Path, trained: Training, tmp_path: Path
) -> None:
    for bits in (16, 8):
        trained(method, str(bits), plan={"stored_bits": bits, "markov_rank": 32})
    files = [tmp_path / name / "model.safetensors" for name in ("16", "8")]
    whole, codes = (sum(t.nbytes for name, t in load_file(file).items() if "norm" not in name) for file in files)
    assert codes < 0.65 * whole
    plain, coded_ = (Checkpoint(str(file.parent), method).tensors for file in files)
    assert plain.keys() == coded_.keys()
    for name, tensor in plain.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(coded_[name], tensor, atol=0.01 * float(tensor.abs().max()), rtol=0)
    head.load(str(tmp_path / "8"), TargetWeights.read(str(chatty)))
    trained(method, "on", plan={"markov_rank": 32}, start=tmp_path / "8")


def test_codes_that_do_not_match_their_scales_are_refused(trained: Training, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    trained("eagle3", plan={"stored_bits": 8})
    file = tmp_path / "head" / "model.safetensors"
    stored = load_file(file)
    for wrong, told in (
        ({"fc.weight.scales": stored["fc.weight.scales"][:, :1].contiguous()}, "has shape"),
        ({"norm.weight.scales": stored["fc.weight.scales"].clone()}, "belongs to no codes"),
    ):
        save_file(stored | wrong, file)
        with pytest.raises(ModelError, match=told):
            Checkpoint(str(tmp_path / "head"), "eagle3")


def test_only_matrices_of_whole_blocks_are_stored_in_codes() -> None:
    tensors = {"a": torch.randn(4, 64), "b": torch.randn(4, 40), "c": torch.randn(64), "d": torch.arange(64)[None]}
    assert {name for name, tensor in coded(tensors).items() if tensor.dtype == torch.int8} == {"a"}
