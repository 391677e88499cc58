"""Training that cannot go on: full disks, wrong files, wrong recipes; one line each, and nothing is lost."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from drafters.training import answers as answers_module
from drafters.training.cli import app
from drafters.training.recipe import Recipe
from drafters.training.run import train
from engine.core.errors import ConfigError, ModelError
from engine.files.prompt_file import read_prompts
from tests.drafters.conftest import LLAMA
from tests.drafters.training.conftest import METHODS, Training, weights
from tests.forked_process import run_forked


def test_a_full_disk_leaves_the_last_checkpoint_intact(
    trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    saved, fsync = [], answers_module.os.fsync

    def full(descriptor: int) -> None:
        saved.append(descriptor)
        if len(saved) > 3 + 2:  # three batches of answers and two checkpoints fit
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"No space left.*--resume"):
        patch.setattr("os.fsync", full)
        trained("medusa", save_minutes=0)
    assert torch.load(out / "training" / "state.pt", weights_only=True)["step"] == 2
    assert [file.name for file in (out / "training").iterdir()] == ["state.pt"]
    trained("medusa", resume=True)


LIMITED = """
import resource, signal, sys
from drafters.training.cli import app
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # a module's file that is cut off would be read by the next process
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
app(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("limit", "told"), [(100, "answers=.*nothing is lost"), (4000, "out=.*cannot be written .*--resume")]
)
def test_a_disk_that_fills_in_the_middle_of_a_file_is_one_line_and_the_run_goes_on_later(
    chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path, limit: int, told: str
) -> None:
    """A limit on the size of files stands in for the full disk: it fails in the same place, in the middle of one."""
    out, plan = tmp_path / "head", recipe("medusa", store_features=False)
    options = ["--target", str(chatty), "--data", str(data), "--out", str(out), "--recipe", str(plan)]
    done = run_forked(LIMITED, str(limit), "medusa", *options)
    assert done.returncode == 2, done.stderr
    assert len(re.findall(f"^talon: {told}", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "Traceback" not in done.stderr
    train("medusa", str(chatty), data, out, plan)
    train("medusa", str(chatty), data, tmp_path / "straight" / "head", plan)
    torn, whole = weights(out), weights(tmp_path / "straight" / "head")
    assert all(torch.equal(torn[name], whole[name]) for name in whole)


def test_answers_that_can_be_kept_nowhere_or_are_damaged_are_one_line(trained: Training, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"answers=.*cannot be written"):
        trained("medusa", answers=Path("/dev/full/answers"))
    trained("medusa")
    cache = next((tmp_path / "answers").glob("answers-*"))
    cache.write_bytes(b"\x00junk\n" + cache.read_bytes())
    with pytest.raises(ConfigError, match=r"answers-.*is no file of answers \(line 1: "):
        trained("medusa", "other")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", "", "holds 0 prompts"),
        ("x.jsonl", "hello\n", "line 1 is not a JSON object"),
        ("x.jsonl", '{"prompt": "w5"}\n{"text": "w6"}\n', "line 2 is not a JSON object"),
        ("x.jsonl", '{"prompt": 5}\n', "line 1 is not a JSON object .*Expected str, got int"),
        ("x.jsonl", '{"prompt": "\\ud800"}\n', "line 1 is not a JSON object"),
        ("x.xz", "no archive", "cannot be read"),
        ("nowhere/x.jsonl", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_training_data_is_refused(
    name: str, content: str | None, message: str, trained: Training, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        trained("medusa", prompts=tmp_path / name)


def test_a_target_without_the_wanted_layers_is_refused_before_work_starts(
    data: Path, chatty: Path, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    shallow = tmp_path / "shallow"
    LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=3)).save_pretrained(shallow)
    for file in chatty.glob("*token*"):
        (shallow / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="target has 3 layers"):
        train("eagle3", str(shallow), data, tmp_path / "head", recipe("eagle3"))
    assert not (tmp_path / "answers").exists()


def test_resuming_before_the_first_checkpoint_begins_and_needs_the_same_recipe_after_it(
    data: Path, trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.training.progress._SAID_S", 0.0)
    said = Console(record=True, width=200, force_terminal=False)
    trained("medusa", resume=True, console=said)
    text, before = said.export_text(), weights(tmp_path / "head")
    assert "holds no checkpoint yet" in text and "--method medusa --set drafter.path=" in text
    assert "answering: " in text and "training: 1 of " in text  # without a terminal stages say how far they are
    with pytest.raises(ConfigError, match=r"out=.*holds a run already: go on with --resume"):
        trained("medusa")
    assert all(torch.equal(tensor, weights(tmp_path / "head")[name]) for name, tensor in before.items())
    with pytest.raises(ConfigError, match="another recipe"):
        trained("medusa", plan={"lr": 0.5}, resume=True)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(json.dumps({"prompt": row.prompt}) + "\n" for row in [*read_prompts(data, "data")][:-1]))
    with pytest.raises(ConfigError, match="other data"):
        trained("medusa", prompts=fewer, resume=True)


def test_two_trainings_do_not_answer_into_one_file(trained: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*rest: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="another run is making them"):
            trained("medusa", "other")
        return generate(*rest)

    generate = answers_module.generate
    monkeypatch.setattr(answers_module, "generate", meanwhile)
    trained("medusa")
    trained("medusa", "other")


def test_a_wrong_recipe_is_refused_by_key(recipe: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="stepz"):
        Recipe.load(recipe("medusa", stepz=3), "medusa")
    with pytest.raises(ConfigError, match="not a recipe for hydra"):
        Recipe.load(recipe("medusa"), "hydra")


@pytest.mark.parametrize("method", METHODS)
def test_the_recipes_in_the_repository_are_valid(method: str) -> None:
    Recipe.load(Path(__file__).parents[3] / "configs" / "train" / f"{method}.yaml", method)


def test_the_command_prints_one_line_on_bad_input(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    result = CliRunner().invoke(app, ["medusa", "--target", missing, "--data", missing, "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and result.output.startswith("talon: target=")


def test_a_command_that_is_interrupted_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("drafters.training.run.train", interrupted)
    result = CliRunner().invoke(app, ["medusa", "--target", "t", "--data", "d", "--out", str(tmp_path)])
    assert (result.exit_code, result.output) == (130, "stopped; --resume goes on from the last checkpoint\n")
