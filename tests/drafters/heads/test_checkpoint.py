"""What heads borrow from the target's directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.layers import Linear
from engine.core.errors import ModelError

EMBEDDING, LM_HEAD = torch.randn(8, 4), torch.randn(8, 4)


def write_config(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "tie_word_embeddings": False}))


def test_a_tied_target_has_its_embedding_as_output_matrix(target_dir: Path, tmp_path: Path) -> None:
    weights = TargetWeights.read(str(target_dir))
    assert weights.lm_head is weights.embedding
    assert (weights.vocab_size, weights.hidden_size, weights.layers) == (64, 32, 6)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))  # transformers ties by default
    save_file({"model.embed_tokens.weight": EMBEDDING}, str(tmp_path / "model.safetensors"))
    assert TargetWeights.read(str(tmp_path)).lm_head.equal(EMBEDDING)


def test_a_target_saved_as_one_pickle_or_in_shards_by_their_index_is_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    torch.save({"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}, tmp_path / "pytorch_model.bin")
    assert TargetWeights.read(str(tmp_path)).lm_head.equal(LM_HEAD)
    (tmp_path / "pytorch_model.bin").unlink()
    save_file({"model.embed_tokens.weight": EMBEDDING, "x": torch.zeros(1)}, str(tmp_path / "model-1.safetensors"))
    save_file({"lm_head.weight": LM_HEAD}, str(tmp_path / "model-2.safetensors"))
    index = {"model.embed_tokens.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = TargetWeights.read(str(tmp_path))
    assert weights.embedding.equal(EMBEDDING) and weights.lm_head.equal(LM_HEAD)


def test_a_target_without_what_heads_need_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        TargetWeights.read(str(tmp_path))
    write_config(tmp_path)
    with pytest.raises(ModelError, match="no safetensors"):
        TargetWeights.read(str(tmp_path))
    save_file({"other": EMBEDDING}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight"):
        TargetWeights.read(str(tmp_path))
    save_file({"model.embed_tokens.weight": EMBEDDING}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        TargetWeights.read(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelError, match="cannot be read"):
        TargetWeights.read(str(tmp_path))


@pytest.mark.parametrize("bias", [None, torch.randn(2100)])
def test_a_packed_matrix_gives_the_product_of_the_plain_one(bias: torch.Tensor | None) -> None:
    weight = torch.randn(2100, 1000)
    linear = Linear(weight, bias)
    for rows in (1, 3, 10):
        x = torch.randn(rows, 1000)
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias), atol=1e-3, rtol=1e-4)
