"""What `talon models` says of families and of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from engine.config import Config
from engine.core.errors import ModelError
from engine.model.loading import load_model
from engine.model.trial import check
from engine.model.trial.check import lines_of
from engine.model.trial.families import FAMILIES, table
from tests.engine import tiny_families
from tests.engine.weights import family_table
from tests.engine.weights.family_gguf import draft_head, random_model, write_family

ROOT = Path(__file__).parents[3]


def test_the_table_of_the_documents_is_that_of_the_command() -> None:
    assert table() in (ROOT / "docs" / "models.md").read_text(encoding="utf8")


def test_every_family_that_the_table_names_is_proved_exact_by_a_test() -> None:
    tested = {config for config, _ in tiny_families.FAMILIES.values()}
    stock = {"GPT2Config", "Ministral3Config"}  # the first has no lm_head, the second scales queries by position
    assert {family.config for family in FAMILIES} - stock <= tested


def test_every_architecture_that_the_table_names_is_read_from_a_file_by_a_test_and_no_other_is() -> None:
    tested = {family.architecture for family in family_table.FAMILIES.values()}
    assert {name for family in FAMILIES for name in family.gguf} == tested


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, describes_here: None) -> Path:
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    return tmp_path


def checked(path: Path) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines_of(str(path)))


def test_a_file_is_told_by_family_types_memory_and_drafter(home: Path) -> None:
    write_family(home / "x.gguf", "gemma4", random_model("gemma4"), Kind.Q8_0)
    found = checked(home / "x.gguf")
    assert found["family"].startswith("gemma4_text, 0.00 billion parameters, 6 layers")
    assert "Q8_0" in found["types"] and found["forward"].startswith("lean")
    # a position of three layers with keys of 2 heads of 16, and three of 2 heads of 32, in bfloat16
    assert f"{2 * 2 * 3 * 2 * (16 + 32) * 8192 / 1e9:.2f} GB of keys and values" in found["memory"]
    assert found["positions"] == "512 of 512" and found["drafter"] == "none of its own: method=suffix"
    assert found["will not work"].startswith("a GPU")


def test_types_that_become_bfloat16_are_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(home / "x.gguf", "llama", random_model("llama"), Kind.Q8_0)
    monkeypatch.setattr(check, "has_layout", lambda kind: kind != "Q8_0")  # as of those that gguf cannot write
    assert checked(home / "x.gguf")["will take more memory than its file"] == "Q8_0 become bfloat16"


def test_a_draft_head_in_the_file_is_found(home: Path) -> None:
    model = random_model("qwen3.5")
    write_family(home / "x.gguf", "qwen3.5", model, head=draft_head(model))
    assert checked(home / "x.gguf")["drafter"] == "its own head: method=mtp or hybrid"


def test_a_draft_head_is_found_for_a_model_of_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("qwen3.5")
    write_family(home / "x.gguf", "qwen3.5", model, head=draft_head(model))
    folder = check.target_folder(Config(model=str(home / "x.gguf")))
    monkeypatch.setattr(check, "target_folder", lambda config: {"org/name": folder}[config.model])
    assert dict(line.split(": ", 1) for line in lines_of("org/name"))["drafter"].startswith("its own head")


def test_quantised_weights_that_are_not_read_here_are_refused_with_the_way_out(home: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(home / "x")
    config = json.loads((home / "x" / "config.json").read_text())
    for method in ("gptq", "fp8"):
        found = {"quant_method": method, "bits": 4, "group_size": 128}
        (home / "x" / "config.json").write_text(json.dumps(config | {"quantization_config": found}))
        if method == "fp8":  # which transformers makes numbers of
            assert checked(home / "x")["types"] == "bfloat16, quantised as fp8"
            continue
        for read in (checked, lambda path: load_model(str(path), "auto", torch.device("cpu"))):
            with pytest.raises(ModelError, match=r"cannot be read here: .+; or take a GGUF file of the model"):
                read(home / "x")


def test_what_is_no_model_is_refused_in_one_line(home: Path) -> None:
    LlamaConfig(hidden_act="zebra").save_pretrained(home / "y")
    with pytest.raises(ModelError, match=r"^model=.*: transformers makes no llama model of its configuration: .*zebra"):
        checked(home / "y")
    (home / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="cut short"):
        checked(home / "x.gguf")
