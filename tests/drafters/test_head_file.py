"""What `talon models check` says of a file that holds a draft head alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from drafters.head_file import lines_of_head
from engine.cli.models import app
from engine.core.errors import ModelError
from tests.drafters.heads.assistant.tiny_assistant import random_assistant, write_assistant
from tests.drafters.heads.layouts.head_gguf import write_head
from tests.drafters.heads.layouts.test_llama_cpp import EAGLE3_CONFIG, eagle3_file, of_block
from tests.drafters.heads.test_eagle import EAGLE3
from tests.engine.weights.family_gguf import random_model, write_family


def told(file: str) -> dict[str, str]:
    lines = lines_of_head(file)
    assert lines is not None
    return dict(line.split(": ", 1) for line in lines)


def test_an_eagle3_head_is_told_with_its_method_target_and_layers(tmp_path: Path) -> None:
    file = write_head(tmp_path / "x.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3, Kind.Q8_0)
    assert told(file) == {
        "drafter": f"an EAGLE-3 head: method=eagle3, or hybrid, with drafter.path={file}",
        "for": "a target of hidden size 32 and 64 tokens",
        "reads": "the states that enter layers 2, 3, 3",
        "types": "8 Q8_0, 5 F32, 1 I64",
        "memory": "0.00 GB of weights in the file's bits",
    }


def test_other_heads_are_told_with_their_methods(tmp_path: Path) -> None:
    config, tensors = of_block("dspark")
    block = told(write_head(tmp_path / "x.gguf", "dflash", config, tensors))
    assert "method=block" in block["drafter"] and block["reads"].endswith("enter layers 2, 4")
    assistant = told(str(write_assistant(tmp_path / "y.gguf", random_assistant(random_model("gemma4")))))
    assert "method=assistant" in assistant["drafter"] and assistant["reads"] == "the last state, keys and values"
    assert assistant["for"] == "a target of hidden size 64 and 262 tokens"
    random_assistant(random_model("gemma4")).save_pretrained(tmp_path / "z")
    assert told(str(tmp_path / "z"))["drafter"].startswith("an assistant: method=assistant")


def test_a_head_that_cannot_be_read_is_told_with_the_reason(tmp_path: Path) -> None:
    assert told(eagle3_file(tmp_path, target_layers=None))["will not work"].endswith(
        "eagle3.target_layers names no layers; convert the head again"
    )
    assistant = random_assistant(random_model("gemma4"))
    file = write_assistant(tmp_path / "y.gguf", assistant, changes={"attention.sliding_window_pattern": None})
    assert "its metadata describe no assistant" in told(str(file))["will not work"]


def test_a_model_and_a_file_that_is_cut_short_are_no_heads(tmp_path: Path) -> None:
    write_family(tmp_path / "x.gguf", "llama", random_model("llama"))
    assert lines_of_head(str(tmp_path / "x.gguf")) is None and lines_of_head(str(tmp_path)) is None
    file = Path(eagle3_file(tmp_path))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ModelError, match="cut short"):
        lines_of_head(str(file))


def test_the_command_tells_of_heads_and_of_files_that_are_cut_short_in_one_line(tmp_path: Path) -> None:
    file = Path(eagle3_file(tmp_path))
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 0 and found.output.startswith("drafter: an EAGLE-3 head: method=eagle3")
    file.write_bytes(file.read_bytes()[:200])
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 2 and len(found.output.strip().splitlines()) == 1
