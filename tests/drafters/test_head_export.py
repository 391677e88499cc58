"""Heads written for vLLM and llama.cpp: they draft what the head drafts, and what a layout cannot hold is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from drafters.head_export import export_head
from drafters.heads.checkpoint import TargetWeights, coded
from drafters.heads.eagle3 import Eagle3Head
from engine.cli.models import app
from engine.core.errors import DrafterMismatch, ModelError
from engine.weights.gguf.source import GgufSource
from tests.drafters.conftest import HIDDEN, LLAMA, VOCAB, random_tensors, write_checkpoint
from tests.drafters.heads.layouts.head_gguf import llama3_factors, write_head
from tests.drafters.heads.layouts.test_llama_cpp import EAGLE3_CONFIG, LLAMA3, check_equal, drafted
from tests.drafters.heads.one_pass.test_block import CONFIGS, shapes
from tests.drafters.heads.test_eagle import DRAFT_VOCAB, EAGLE, EAGLE3
from tests.engine.weights.tiny_gguf import MERGES, TEMPLATE, TOKENS, WEIGHTS, write_gguf

BFLOAT16 = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in EAGLE3.items()}
LAYOUTS = ("speculators", "gguf")
Targets = dict[str, str]


@pytest.fixture(scope="module")
def targets(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """The target as each layout wants it: a directory, and one that describes a GGUF file."""
    folder = tmp_path_factory.mktemp("described")
    write_gguf(folder / WEIGHTS, model=LlamaForCausalLM.from_pretrained(target_dir))
    (folder / "config.json").write_bytes((target_dir / "config.json").read_bytes())
    GgufSource.of(folder / WEIGHTS, WEIGHTS).write(folder)
    return {"speculators": str(target_dir), "gguf": str(folder)}


def public(
    path: Path, tensors: Mapping[str, Tensor] = MappingProxyType(BFLOAT16), config: Mapping[str, Any] = EAGLE3_CONFIG
) -> str:
    return write_checkpoint(path / "public", "model.safetensors", dict(config), dict(tensors))


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("bits", "changes"),
    [
        (16, {}),
        (8, {"norm_before_residual": True}),
        (16, {"norm_before_fc": True}),
        (8, {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
    ],
)
def test_a_head_drafts_the_same_tokens_with_the_same_scores_in_either_layout(
    bits: int, changes: dict[str, Any], layout: str, tmp_path: Path, targets: Targets, target: TargetWeights
) -> None:
    norm = random_tensors({"input_norm.weight": (3 * HIDDEN,)}) if changes.get("norm_before_fc") else {}
    tensors = coded(BFLOAT16 | norm) if bits == 8 else BFLOAT16 | norm
    head = public(tmp_path, tensors, EAGLE3_CONFIG | changes)
    export_head(head, layout, targets[layout], tmp_path / "out")
    one, other = (Eagle3Head.load(path, target) for path in (head, str(tmp_path / "out")))
    assert one.feature_layers == other.feature_layers
    check_equal((drafted(one), drafted(other)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_without_an_output_matrix_and_with_embeddings_is_written_so(
    layout: str, tmp_path: Path, targets: Targets, target: TargetWeights
) -> None:
    dropped = ("d2t", "t2d", "lm_head.weight")
    tensors = {name: tensor for name, tensor in EAGLE3.items() if name not in dropped}
    tensors |= random_tensors({"embed_tokens.weight": (VOCAB, HIDDEN)}, seed=6)
    head = public(tmp_path, tensors, LLAMA)
    export_head(head, layout, targets[layout], tmp_path / "out")
    check_equal((drafted(Eagle3Head.load(head, target)), drafted(Eagle3Head.load(str(tmp_path / "out"), target))))


def test_a_gguf_file_has_the_metadata_and_tensors_that_llama_cpps_converter_writes(
    tmp_path: Path, targets: Targets
) -> None:
    out = tmp_path / "x.gguf"
    export_head(public(tmp_path, EAGLE3), "gguf", targets["gguf"], out)
    expected = write_head(tmp_path / "y.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3)
    written, wanted = fields(out), fields(Path(expected))
    assert {name: written[name] for name in wanted if name != "GGUF.kv_count"} == {
        name: value for name, value in wanted.items() if name != "GGUF.kv_count"
    }
    arrays = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    for tensor in gguf.GGUFReader(expected).tensors:
        found = arrays.pop(tensor.name)
        assert found.tensor_type == tensor.tensor_type and np.array_equal(found.data, tensor.data)
    assert not arrays


def test_a_gguf_file_has_the_targets_tokenizer(tmp_path: Path, targets: Targets) -> None:
    export_head(public(tmp_path), "gguf", targets["gguf"], tmp_path / "x.gguf")
    found = {name: value for name, value in fields(tmp_path / "x.gguf").items() if name.startswith("tokenizer.")}
    assert found["tokenizer.ggml.tokens"] == TOKENS and found["tokenizer.ggml.merges"] == MERGES
    assert found["tokenizer.chat_template"] == TEMPLATE and found["tokenizer.ggml.eos_token_id"] == 3
    theirs = fields(Path(targets["gguf"]) / WEIGHTS)
    assert found == {name: value for name, value in theirs.items() if name.startswith("tokenizer.")}


def test_codes_of_8_bits_are_q8_0_and_other_matrices_keep_their_type(tmp_path: Path, targets: Targets) -> None:
    export_head(public(tmp_path, coded(BFLOAT16)), "gguf", targets["gguf"], tmp_path / "x.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert kinds["fc.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "BF16"  # of 48 inputs
    assert kinds["output_norm.weight"] == "F32" and kinds["d2t"] == "I64"


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3"} | LLAMA3])
def test_scaled_positions_are_factors_of_the_frequencies(
    scaling: dict[str, Any], tmp_path: Path, targets: Targets, target: TargetWeights
) -> None:
    head = public(tmp_path, config=EAGLE3_CONFIG | {"rope_parameters": LLAMA["rope_parameters"] | scaling})
    export_head(head, "gguf", targets["gguf"], tmp_path / "x.gguf")
    factors = next(t.data for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors if t.name == "rope_freqs.weight")
    expected = llama3_factors(EAGLE3_CONFIG, LLAMA3) if scaling["rope_type"] == "llama3" else [4.0] * 4
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    one, other = (Eagle3Head.load(path, target) for path in (head, str(tmp_path / "x.gguf")))
    torch.testing.assert_close(one.layer.rotary.halves(200), other.layer.rotary.halves(200), atol=1e-4, rtol=0)


def test_a_speculators_folder_has_every_field_that_vllm_reads(tmp_path: Path, targets: Targets) -> None:
    scaled = LLAMA["rope_parameters"] | {"rope_type": "linear", "factor": 4.0}
    head = public(tmp_path, config=EAGLE3_CONFIG | {"rope_parameters": scaled})
    export_head(head, "speculators", targets["speculators"], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": targets["speculators"], "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 3],
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    assert layer == {
        **LLAMA,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": scaled,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }


def test_the_command_prints_what_serves_the_head(tmp_path: Path, targets: Targets) -> None:
    def told(layout: str) -> str:
        out = str(tmp_path / layout)
        asked = ["export", head, "--as", layout, "--target", targets[layout], "--out", out]
        found = CliRunner().invoke(app, asked)
        assert found.exit_code == 0, found.output
        return found.output.replace(out, "OUT").strip()

    head = public(tmp_path)
    assert told("speculators") == "vllm serve OUT"
    assert told("gguf") == f"llama-server -m {targets['gguf']}/{WEIGHTS} --spec-type draft-eagle3 -md OUT"


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
ANOTHER = "drafter vocabulary 128 != target vocabulary 64"


@pytest.mark.parametrize(
    ("layout", "target", "changes", "problem"),
    [
        *((layout, layout, {"vocab_size": 128}, ANOTHER) for layout in LAYOUTS),
        ("gguf", "gguf", {"attention_bias": True}, "as=gguf: attention_bias=true: llama.cpp's EAGLE-3 adds no biases"),
        ("gguf", "gguf", {"rope_parameters": YARN}, "as=gguf: rope_parameters=.*: rope_type default, linear, llama3 "),
        ("gguf", "speculators", {}, r"^target=.*: is no GGUF file, whose tokenizer the head gets"),
        ("speculators", "gguf", {}, r"^target=.*: is a GGUF file, and vLLM is told a directory"),
        ("gguf", "nowhere.gguf", {}, r"^target=nowhere.gguf: cannot be read"),
        ("onnx", "gguf", {}, r"^as='onnx': is none of speculators, gguf$"),
    ],
)
def test_what_a_layout_or_a_target_does_not_take_is_refused_and_nothing_is_written(
    layout: str, target: str, changes: dict[str, Any], problem: str, tmp_path: Path, targets: Targets
) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj") if "attention_bias" in changes else ()
    biases = {f"midlayer.self_attn.{name}.bias": (16 if name[0] in "kv" else HIDDEN,) for name in names}
    head = public(tmp_path, BFLOAT16 | random_tensors(biases), EAGLE3_CONFIG | changes)
    with pytest.raises(DrafterMismatch if problem == ANOTHER else ModelError, match=problem):
        export_head(head, layout, targets.get(target, target), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["public"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_that_no_layout_holds_are_refused_with_the_part(layout: str, tmp_path: Path, targets: Targets) -> None:
    parts = random_tensors(shapes("dspark gated") | {"entry.weight": (HIDDEN, 2 * HIDDEN)})
    block = public(tmp_path / "block", parts, CONFIGS["dspark gated"])
    eagle = public(tmp_path / "eagle", EAGLE, LLAMA)
    (tmp_path / "empty").mkdir()
    export_head(public(tmp_path), "speculators", targets["speculators"], tmp_path / "exported")
    for head, problem in (
        (block, r"is no EAGLE-3 head, and DFlash and DSpark have no place for entry.weight"),
        (eagle, r'GGUF holds others of Talon.s; train one that fits: "talon train eagle3"$'),
        (str(tmp_path / "exported"), "is in a layout of other engines already"),
        (str(tmp_path / "empty"), f"^drafter.path={tmp_path}/empty: config.json cannot be read"),
    ):
        with pytest.raises(ModelError, match=problem):
            export_head(head, layout, targets[layout], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_path_that_is_taken_or_cannot_be_written_is_refused_in_one_line(
    layout: str, tmp_path: Path, targets: Targets
) -> None:
    (out := tmp_path / "x").write_text("mine")
    head = public(tmp_path)
    asked = ["export", head, "--as", layout, "--target", targets[layout], "--out", str(out)]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 2 and len(found.output.strip().splitlines()) == 1
    assert "is there already; name another path, or remove it" in found.output and out.read_text() == "mine"
    with pytest.raises(ModelError, match=r"out=.*nowhere/x: cannot be written \(No such file or directory\); name"):
        export_head(head, layout, targets[layout], tmp_path / "nowhere" / "x")
