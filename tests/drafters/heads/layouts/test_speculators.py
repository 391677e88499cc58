"""Heads in the `speculators` format: written under its names, they give the logits of an independent reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.feature_head import FeatureHead
from engine.core.errors import DrafterMismatch, ModelError
from tests.drafters import reference
from tests.drafters.conftest import HIDDEN, LAYERS, LLAMA, VOCAB, write_checkpoint
from tests.drafters.heads.test_eagle import DRAFT_VOCAB, EAGLE, EAGLE3, true_features

TOKENS = [4, 9, 2, 33, 7, 61]
LAYER = {key: value for key, value in LLAMA.items() if key != "rope_parameters"} | {
    "num_hidden_layers": 1,
    "head_dim": HIDDEN // 4,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
"""As published files have it: of transformers 4, with the rotary base at the top."""


def config(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
        "speculators_version": "0.2.0",
        "target_hidden_size": None,
        "transformer_layer_config": LAYER,
        "torch_dtype": "float32",
        **fields,
    }


def eagle3_file() -> dict[str, Tensor]:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in EAGLE3.items()}
    return tensors | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))}


def eagle_file() -> dict[str, Tensor]:
    own = {name: tensor for name, tensor in EAGLE.items() if name != "embed_tokens.weight"}
    return {name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): own[name] for name in own}


def load(path: Path, kind: str, tensors: dict[str, Tensor], target: TargetWeights, **fields: Any) -> FeatureHead:
    fields = ({"draft_vocab_size": DRAFT_VOCAB} if kind == "eagle3" else {"fusion_bias": True}) | fields
    where = write_checkpoint(path, "model.safetensors", config(kind, **fields), tensors)
    return Eagle3Head.load(where, target) if kind == "eagle3" else EagleHead.load(where, target)


def root_logits(head: FeatureHead, features: Tensor) -> Tensor:
    session = head.open([], 32, 8)
    session.commit(0, features, TOKENS)
    return session.root()[0]


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_an_eagle3_head_gives_the_reference_logits(
    norm_before_residual: bool, tmp_path: Path, target: TargetWeights
) -> None:
    tensors, true = eagle3_file(), true_features(len(TOKENS), "eagle3")
    fused = true.flatten(1) @ EAGLE3["fc.weight"].T
    guessed = reference.eagle3_features(EAGLE3, tensors["embed_tokens.weight"], fused, TOKENS, norm_before_residual)
    expected = reference.rms(guessed[-1], EAGLE3["norm.weight"]) @ EAGLE3["lm_head.weight"].T
    head = load(tmp_path, "eagle3", tensors, target, norm_before_residual=norm_before_residual)
    torch.testing.assert_close(root_logits(head, true), expected, atol=1e-4, rtol=1e-4)


def test_an_eagle_head_gives_the_reference_logits(tmp_path: Path, target: TargetWeights) -> None:
    true = true_features(len(TOKENS), "eagle")
    guessed = reference.eagle_features(EAGLE | {"embed_tokens.weight": target.embedding}, true[:, 0], TOKENS)
    head = load(tmp_path, "eagle", eagle_file(), target)
    torch.testing.assert_close(root_logits(head, true), guessed[-1] @ target.lm_head.T, atol=1e-4, rtol=1e-4)


def test_the_hidden_states_it_was_trained_on_are_asked_for(tmp_path: Path, target: TargetWeights) -> None:
    assert load(tmp_path / "a", "eagle3", eagle3_file(), target).feature_layers == (2, LAYERS // 2, LAYERS - 3)
    named = load(tmp_path / "b", "eagle3", eagle3_file(), target, eagle_aux_hidden_state_layer_ids=[1, 2, 5])
    assert named.feature_layers == (1, 2, 5)
    with pytest.raises(DrafterMismatch, match="reads layers 1, 2, 6"):
        load(tmp_path / "c", "eagle3", eagle3_file(), target, eagle_aux_hidden_state_layer_ids=[1, 2, 6])
    with pytest.raises(ModelError, match="does not name three layers"):
        load(tmp_path / "d", "eagle3", eagle3_file(), target, eagle_aux_hidden_state_layer_ids=[1, 2])


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_a_wrong_tensor_is_refused_by_the_name_it_has_in_the_file(
    damage: str, tmp_path: Path, target: TargetWeights
) -> None:
    tensors, name = eagle3_file(), "layers.0.hidden_norm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        name = "layers.1.hidden_norm.weight"
        tensors[name] = torch.zeros(HIDDEN)
    else:
        tensors[name] = torch.zeros(7)
    with pytest.raises(ModelError, match=f"tensor {name} "):
        load(tmp_path, "eagle3", tensors, target)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"speculators_model_type": "mlp"}, "'mlp' is none of eagle, eagle3"),
        ({"speculators_model_type": "eagle"}, "is a head for method eagle, not eagle3"),
        ({"transformer_layer_config": LAYER | {"vocab_size": 128}}, "vocabulary 128 != target vocabulary"),
        ({"transformer_layer_config": None}, "does not describe a Llama layer"),
        ({"transformer_layer_config": LAYER | {"model_type": "qwen3"}}, "does not describe a Llama layer"),
        ({"layernorms": True}, "norms that EAGLE-1 does not have"),
    ],
)
def test_a_head_that_cannot_be_read_is_refused_before_its_tensors(
    fields: dict[str, Any], told: str, tmp_path: Path, target: TargetWeights
) -> None:
    with pytest.raises(ModelError, match=told):
        load(tmp_path, "eagle3", eagle3_file(), target, **fields)
