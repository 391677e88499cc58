"""GGUF files that mix the types of blocks, as published mixes do: a lean decoder runs them in the bits of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from benchmarks.kernels.products import put_scales
from engine.config import Activations
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.gemm.product import multiplies
from engine.kernels.quant.layouts import bits_in_memory, layout_of
from engine.kernels.quant.stored import StoredMatrix
from engine.model import target as targets
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from engine.weights.gguf.describe import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from tests.engine.kernels.quant.random_blocks import CODED, random_blocks
from tests.engine.weights.tiny_gguf import TOKENS, tiny_llama, write_gguf

pytestmark = pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor")
TEXT = list(range(5, 45))
_SIZES, _LAYERS = (256, 512), 4
_SHAPES = {
    "attn_q": (256, 256),
    "attn_k": (128, 256),
    "attn_v": (128, 256),
    "attn_output": (256, 256),
    "ffn_gate": (512, 256),
    "ffn_up": (512, 256),
    "ffn_down": (256, 512),
}
_NAMES = [f"blk.{layer}.{part}.weight" for layer in range(_LAYERS) for part in _SHAPES]
_EMBEDDING = "token_embd.weight"


def usual_matrix(kind: str, outputs: int, inputs: int, seed: int) -> StoredMatrix:
    """Random blocks whose weights have the size of a model's."""
    matrix, layout = random_blocks(kind, outputs, inputs, seed), layout_of(kind)
    blocks = matrix.raw.reshape(outputs, inputs // layout.inputs, -1)
    size = 1.0
    for _ in range(2):
        if layout.exponents:
            blocks[:, :, 0] = 124
            return matrix
        for at in (layout.scale, layout.offset):
            if at is not None:
                put_scales(blocks, at, np.full(blocks.shape[:2], size, np.float16))
        size = float(0.08 / dequantize(matrix.raw, GGMLQuantizationType[kind]).std())
    return matrix


def mixed(folder: Path, embedding: str) -> str:
    """Write a model with all types of blocks, the embedding, which is the output matrix too, of that one."""
    kinds = dict(zip(_NAMES, CODED, strict=False))
    assert len(kinds) == len(CODED), "a type is in no matrix"
    shapes = [_SHAPES[name.split(".")[2]] for name in kinds]
    tensors = {
        name: usual_matrix(kind, *shape, seed)
        for seed, ((name, kind), shape) in enumerate(zip(kinds.items(), shapes, strict=True))
    }
    tensors[_EMBEDDING] = usual_matrix(embedding, len(TOKENS), 256, 99)
    path = folder / "tiny.gguf"
    write_gguf(path, tensors=tensors, model=tiny_llama(*_SIZES, layers=_LAYERS))
    made = folder / "described"
    made.mkdir()
    describe(read_gguf(path, "model=tiny"), made, "tiny", "")
    GgufSource.of(path, f"../{path.name}").write(made)
    return str(made)


@pytest.mark.parametrize("activations", ["bfloat16", "int8"])
@pytest.mark.parametrize("embedding", ["Q2_K", "IQ3_S"])
@torch.inference_mode()
def test_a_file_with_every_type_runs_in_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedding: str, activations: Activations
) -> None:
    folder = mixed(tmp_path, embedding)
    packed = Target.load(folder, activations=activations)
    assert isinstance(packed.forward, LeanDecoder) and packed.exact
    weights = sum(
        np.prod(tensor.shape) * bits_in_memory(tensor.kind.name) / 8
        for tensor in read_gguf(tmp_path / "tiny.gguf", "model=tiny").tensors
        if len(tensor.shape) == 2
    )
    assert packed.matrix_bytes is not None and packed.matrix_bytes < 1.1 * weights
    found = packed.prefill(packed.new_cache(len(TEXT)), TEXT)[0]
    monkeypatch.setattr(targets, "open_stored", lambda folder: None)
    whole = Target.load(folder)
    expected = whole.prefill(whole.new_cache(len(TEXT)), TEXT)[0]
    if activations == "bfloat16" and units()[0] is not Unit.VECTORS:
        assert torch.equal(found, expected)
    else:
        assert (found - expected).float().norm() < 0.1 * expected.float().norm()
