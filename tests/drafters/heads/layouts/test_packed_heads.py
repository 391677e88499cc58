"""Heads and what they borrow from the target lie in memory in the bits of their GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.layers import Linear
from drafters.heads.matrices import FileMatrix
from drafters.heads.one_pass.block import BlockHead
from engine.kernels.gemm.product import multiplies
from engine.weights.gguf.file import read_gguf
from tests.drafters.conftest import LLAMA, random_tensors, write_checkpoint
from tests.drafters.heads.layouts.head_gguf import write_file, write_head
from tests.drafters.heads.layouts.test_llama_cpp import drafted

pytestmark = [
    pytest.mark.skipif(not multiplies(torch.bfloat16), reason="this processor does not multiply bfloat16"),
    pytest.mark.usefixtures("_native"),
]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}


def wide(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head whose matrices are all of whole blocks and panels: its configuration and tensors."""
    hidden, ffn, both = 64, 96, 128
    names: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    inputs, prefix = (both, "midlayer.") if name == "eagle3" else (hidden, "layers.0.")
    names |= {
        f"{prefix}self_attn.{part}_proj.weight": (size, inputs) for part, size in zip("qkv", (64, 32, 32), strict=True)
    }
    names |= {f"{prefix}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
    names |= {f"{prefix}{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
    names |= {f"{prefix}self_attn.o_proj.weight": (hidden, 64), f"{prefix}mlp.down_proj.weight": (hidden, ffn)}
    if name == "eagle3":
        names |= {"midlayer.hidden_norm.weight": (hidden,), "lm_head.weight": (64, hidden)}
        return LLAMA | WIDE, random_tensors(names)
    names |= {f"layers.0.self_attn.{part}_norm.weight": (16,) for part in "qk"} | {"hidden_norm.weight": (hidden,)}
    flash = {"target_layer_ids": [1, 2, 3], "mask_token_id": 7}
    if name == "dflash":
        config = LLAMA | WIDE | {"num_hidden_layers": 1, "block_size": 5, "dflash_config": flash}
        return config, random_tensors(names)
    names |= {"embed_tokens.weight": (64, hidden), "lm_head.weight": (64, hidden)}
    names |= {f"markov_head.markov_w{part}.weight": (64, 16) for part in "12"}
    names |= {"confidence_head.proj.weight": (1, hidden + 16), "confidence_head.proj.bias": (1,)}
    confident = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    options = {"num_hidden_layers": 1, "block_size": 5, "markov_rank": 16, "markov_head_type": "vanilla"} | confident
    return LLAMA | WIDE | options | flash, random_tensors(names)


def linears(head: Any) -> dict[str, Linear]:
    """The products of a head."""
    layers = [head.layer] if isinstance(head, Eagle3Head) else [layer.decoder for layer in head.layers]
    found = {
        f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(layers) for name in ("out", "gate_up", "down")
    }
    if isinstance(head, Eagle3Head):
        return found | {"fc": head.fc, "qkv": head.qkv.linear, "head": head.lm_head}
    return found | {"fc": head.fc, "qkv": head.layers[0].qkv, "kv": head.layers[0].kv, "head": head.output}


@pytest.fixture
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heads compute as they do on this processor."""
    monkeypatch.setattr("drafters.heads.layers.multiplies", multiplies)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_a_heads_matrices_lie_in_memory_in_the_bits_of_the_file(name: str, kind: Kind, tmp_path: Path) -> None:
    config, tensors = wide(name)
    embedding = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 4
    target = TargetWeights(embedding, embedding, 6)
    of_file = write_head(tmp_path / "x.gguf", "eagle3" if name == "eagle3" else "dflash", config, tensors, kind)
    held = {n: rounded(t, kind) if t.dim() == 2 and t.shape[1] % 32 == 0 else t for n, t in tensors.items()}
    load: Callable[..., Any] = Eagle3Head.load if name == "eagle3" else BlockHead.load
    head = load(of_file, target)
    public = load(write_checkpoint(tmp_path / "public", "model.safetensors", config, held), target)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(3)).bfloat16()
    for part, linear in linears(head).items():
        assert linear.matmul is not None
        if not (part == "head" and name == "dflash"):  # which is the target's
            assert {tiled.layout.kind for tiled in linear.matmul.tiled} <= {kind.name, "Q8_0"}, part
            assert linear.matmul.tiled[0].layout.kind == kind.name, part
        rows, other = x[:, : linear.inputs], linears(public)[part]
        out, expected = linear(rows).float(), other(rows).float()
        assert (out - expected).norm() < 0.03 * expected.norm(), part


def rounded(tensor: Tensor, kind: Kind) -> Tensor:
    """A matrix as a file of that type holds it."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).copy())


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_head_of_few_bits_drafts_what_its_numbers_draft(name: str, tmp_path: Path) -> None:
    config, tensors = wide(name)
    embedding = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 4
    target = TargetWeights(embedding, embedding, 6)
    held = {n: rounded(t, Kind.Q8_0) if t.dim() == 2 and t.shape[1] % 32 == 0 else t for n, t in tensors.items()}
    load: Callable[..., Any] = Eagle3Head.load if name == "eagle3" else BlockHead.load
    of_file = write_head(tmp_path / "x.gguf", "eagle3" if name == "eagle3" else "dflash", config, tensors, Kind.Q8_0)
    trees = [
        drafted(load(path, target), 64)
        for path in (of_file, write_checkpoint(tmp_path / "public", "model.safetensors", config, held))
    ]
    assert trees[0].tokens[:3].tolist() == trees[1].tokens[:3].tolist()
    assert trees[0].confidence[:3] == pytest.approx(trees[1].confidence[:3], abs=0.05)


def test_a_head_borrows_the_targets_matrices_in_the_bits_of_its_file(tmp_path: Path) -> None:
    config, tensors = wide("dflash")
    drawn = torch.Generator().manual_seed(2)
    matrices = {name: torch.randn(64, 64, generator=drawn) / 4 for name in ("token_embd.weight", "output.weight")}
    arrays = {name: tensor.numpy() for name, tensor in matrices.items()}
    file = write_file(tmp_path / "target.gguf", "llama", {}, arrays, Kind.Q4_0)
    stored = read_gguf(file, "model=x")
    embedding, lm_head = (FileMatrix(stored, stored.tensors[i]) for i in range(2))
    public = write_checkpoint(tmp_path / "public", "model.safetensors", config, tensors)
    head = BlockHead.load(public, TargetWeights(embedding, lm_head, 6))
    assert head.output.matmul is not None and [t.layout.kind for t in head.output.matmul.tiled] == ["Q4_0"]
    tokens = torch.tensor([5, 63, 5])
    of_numbers = [rounded(matrix, Kind.Q4_0).bfloat16() for matrix in matrices.values()]
    assert torch.equal(head.entered(torch.empty(0), tokens), of_numbers[0][tokens])
    other = BlockHead.load(public, TargetWeights(*of_numbers, 6))
    assert torch.equal(head.mask, other.mask)
    x = torch.randn(3, 64, generator=drawn).bfloat16()
    torch.testing.assert_close(head.output(x).float(), other.output(x).float(), atol=0.05, rtol=0.05)
