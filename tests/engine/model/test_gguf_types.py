"""GGUF files that mix the types of blocks, as published mixes do: a lean decoder runs them in the bits of the file, and
computes what their numbers give.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.kernels.products import put_scales
from engine.config import Activations
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.gemm.product import Product, multiplies
from engine.kernels.quant.layouts import STEP, bits_in_memory, layout_of
from engine.kernels.quant.stored import StoredMatrix
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from tests.engine.kernels.quant.random_blocks import CODED, expected_values, random_blocks, read_apart
from tests.engine.weights.tiny_gguf import HEADS, KEY_HEADS, TOKENS, described_gguf, tiny_llama, write_gguf

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
_PRODUCTS = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
_EMBEDDING = "token_embd.weight"
_HALF = 2.0**-8
"""What rounding to bfloat16 changes at most, of a number of 1."""
_SUMMED = 2.0**-23
"""What each of a sum's operations in float32 changes at most, those of the scales and the exponential included."""


def usual_matrix(kind: str, outputs: int, inputs: int, seed: int) -> StoredMatrix:
    """Random blocks whose weights have the size of a model's; each block has scales of its own, of both signs."""
    matrix, layout = random_blocks(kind, outputs, inputs, seed), layout_of(kind)
    blocks = matrix.raw.reshape(outputs, inputs // layout.inputs, -1)
    generator = np.random.default_rng(seed)
    if layout.exponents:
        blocks[:, :, 0] = generator.integers(121, 125, blocks.shape[:2])
        return matrix
    size = 1.0
    for _ in range(2):
        for at in (layout.scale, layout.offset):
            if at is not None:
                signs = generator.choice([-1, 1], blocks.shape[:2])
                scales = size * signs * generator.uniform(0.5, 1.5, blocks.shape[:2])
                put_scales(blocks, at, scales.astype(np.float16))
        size = float(0.08 / dequantize(matrix.raw, GGMLQuantizationType[kind]).std())
    return matrix


def of_every_type(embedding: str) -> dict[str, StoredMatrix]:
    """All types of blocks in one model, the embedding, which is the output matrix too, of that one."""
    names = [(layer, part) for layer in range(_LAYERS) for part in _SHAPES]
    assert len(names) >= len(CODED), "a type is in no matrix"
    tensors = {
        f"blk.{layer}.{part}.weight": usual_matrix(kind, *_SHAPES[part], seed)
        for seed, ((layer, part), kind) in enumerate(zip(names, cycle(CODED), strict=False))
    }
    return tensors | {_EMBEDDING: usual_matrix(embedding, len(TOKENS), 256, 99)}


def loaded(folder: Path, tensors: Mapping[str, StoredMatrix], activations: Activations = "bfloat16") -> Target:
    """A target of a file with these matrices."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "tiny.gguf", tensors=tensors, model=tiny_llama(*_SIZES, layers=_LAYERS))
    return Target.load(described_gguf(folder / "tiny.gguf"), activations=activations)


@pytest.mark.skipif(units()[:1] != (Unit.AMX,), reason="only AMX rounds weights to bfloat16")
@pytest.mark.parametrize("embedding", ["Q2_K", "IQ3_S"])
@torch.inference_mode()
def test_a_file_of_every_type_has_the_logits_of_its_numbers_in_bfloat16(tmp_path: Path, embedding: str) -> None:
    tensors = of_every_type(embedding)
    numbers = {name: StoredMatrix.of_numbers(expected_values(matrix)) for name, matrix in tensors.items()}
    found, expected = (
        target.prefill(target.new_cache(len(TEXT)), TEXT)[0]
        for target in (loaded(tmp_path / "types", tensors), loaded(tmp_path / "numbers", numbers))
    )
    assert torch.equal(found, expected) and found.std() > 0.1


@pytest.mark.parametrize("activations", ["bfloat16", "int8"])
@torch.inference_mode()
def test_every_product_of_such_a_file_is_as_near_its_weights_as_roundings_allow(
    tmp_path: Path, activations: Activations
) -> None:
    tensors = of_every_type("Q3_K")
    target = loaded(tmp_path, tensors, activations)
    decoder = target.forward
    assert isinstance(decoder, LeanDecoder) and target.exact
    weights = sum(np.prod(matrix.shape) * bits_in_memory(matrix.kind) / 8 for matrix in tensors.values())
    assert target.matrix_bytes is not None and target.matrix_bytes < 1.05 * weights
    for layer, made in enumerate(decoder.layers):
        for names, product in zip(_PRODUCTS, made.products, strict=True):
            check(product, {name: tensors[f"blk.{layer}.{name}.weight"] for name in names})
    check(decoder.head, {"output": tensors[_EMBEDDING]})


def check(product: Product, parts: Mapping[str, StoredMatrix]) -> None:
    """Compare a product with that of the weights in float64. Rows are whole numbers that 8 bits hold, so that int8
    activations do not round them.
    """
    matmul = product.matmul
    assert matmul is not None and all(matrix.layout.coded for matrix in matmul.tiled)
    rounded = product.activations == "bfloat16" and matmul.unit is Unit.AMX
    pairs = [in_order(name, matrix) for name, matrix in parts.items()]
    weights, amounts = (torch.cat(some) for some in zip(*pairs, strict=True))
    x = whole_rows(weights.shape[1])
    sums, errors = x @ weights.T, x.abs() @ amounts.T * (_HALF * rounded + len(x.T) * _SUMMED)
    if len(parts) == 2:
        (gate, up), (of_gate, of_up) = sums.chunk(2, dim=1), errors.chunk(2, dim=1)
        sums, of_silu = silu(gate) * up, 1.1 * of_gate + 8 * _SUMMED * silu(gate).abs()
        errors = of_silu * (up.abs() + of_up) + silu(gate).abs() * of_up
    wrong = (product(x.bfloat16()).double() - sums).abs() - errors - _HALF * (sums.abs() + errors)
    assert (wrong <= 0).all(), [matrix.kind for matrix in parts.values()]


def in_order(name: str, matrix: StoredMatrix) -> tuple[Tensor, Tensor]:
    """The weights as `gguf` reads them, and scale * code and offset by their sizes: [outputs, inputs] float64, outputs
    in transformers' order, where the file has neighbouring dimensions of a head.
    """
    weights = torch.from_numpy(dequantize(matrix.raw, GGMLQuantizationType[matrix.kind])).double()
    amounts = weights.abs()
    if layout_of(matrix.kind).offset is not None:
        offsets = torch.from_numpy(read_apart(matrix).offsets).double().flatten(1).abs()
        amounts += 2 * offsets.repeat_interleave(weights.shape[1] // offsets.shape[1], dim=1)
    if heads := {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name):
        weights, amounts = (x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) for x in (weights, amounts))
    return weights, amounts


def whole_rows(inputs: int) -> Tensor:
    """[21, inputs] float64: 64ths up to 127 of them, which is in each group."""
    x = torch.randint(-127, 128, (21, inputs // STEP, STEP), generator=torch.Generator().manual_seed(0)).double()
    x[:, :, 7] = 127
    return x.flatten(1) / 64
