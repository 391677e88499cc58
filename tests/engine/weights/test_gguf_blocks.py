"""The blocks of a GGUF file beside the bfloat16 weights that were made from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from torch import Tensor

from engine.core.batch import Segment
from engine.kernels.gemm.matmul import units
from engine.kernels.quant.stored import StoredMatrix
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from engine.weights.dequantise import dequantise
from engine.weights.gguf_blocks import quantised_weights
from engine.weights.gguf_file import read_gguf
from engine.weights.quantised_file import NAME, read_quantised, write_quantised
from tests.engine.kernels.quant.random_blocks import CODED, expected_values, random_blocks
from tests.engine.weights.tiny_gguf import write_gguf

multiplies = pytest.mark.skipif(
    not any(unit.paired for unit in units()), reason="this processor does not multiply bfloat16"
)


def write_tensor(path: Path, matrix: StoredMatrix) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("some.weight", matrix.raw, raw_dtype=Kind[matrix.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", CODED)
def test_the_blocks_of_a_weight_are_found_in_the_file(kind: str, tmp_path: Path) -> None:
    matrix = random_blocks(kind, 48, 512)
    write_tensor(tmp_path / "one.gguf", matrix)
    weight = expected_values(matrix)
    [(name, found)] = quantised_weights(tmp_path / "one.gguf", torch.nn.ParameterDict({"some": weight}))
    assert (name, found.kind) == ("some", kind)
    assert torch.equal(found.values(), weight)


def test_rows_are_found_in_another_order_and_what_differs_is_left_out(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    tensor = next(t for t in GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    weight = StoredMatrix.of("Q4_1", tensor.data, 64).values()
    changed = weight.clone()
    changed[3, 3] *= 2
    model = torch.nn.ParameterDict({"turned": weight.flip(0), "changed": changed})
    found = dict(quantised_weights(tmp_path / "tiny.gguf", model))
    assert list(found) == ["turned"]
    assert torch.equal(found["turned"].values(), weight.flip(0))


def test_what_is_written_is_read_again_and_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    matrices = {kind: random_blocks(kind, 32, 256) for kind in CODED}
    model = torch.nn.ParameterDict({name: matrix.values() for name, matrix in matrices.items()})
    assert read_quantised(tmp_path, model) == {}
    write_quantised(tmp_path, matrices.items())
    found = read_quantised(tmp_path, model)
    for name, weight in model.items():
        matrix = found[weight.data_ptr()]
        assert matrix.kind == name and torch.equal(matrix.values(), weight)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:100])
    assert read_quantised(tmp_path, model) == {}


def test_blocks_that_are_not_the_weight_are_passed_over(tmp_path: Path) -> None:
    matrix = random_blocks("Q8_0", 16, 64)
    changed = matrix.values()
    changed[5, 7] += 1
    for weight, kind in ((changed, "Q8_0"), (matrix.values(), "Q5_1"), (matrix.values(), "Q2_K")):
        write_quantised(tmp_path, [("a", StoredMatrix(kind, matrix.raw))])
        assert read_quantised(tmp_path, torch.nn.ParameterDict({"a": weight})) == {}


def test_other_engines_take_it_for_no_weights(tmp_path: Path) -> None:
    write_quantised(tmp_path, [("a", random_blocks("Q4_0", 32, 64))])
    assert (tmp_path / NAME).is_file() and not list(tmp_path.glob("*.safetensors"))


@multiplies
def test_a_converted_file_answers_the_same_with_its_blocks_and_without(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    folder = tmp_path / "converted"
    folder.mkdir()
    dequantise(read_gguf(tmp_path / "tiny.gguf", "file"), folder, "tiny", "")
    with_blocks = _logits(folder, "Q4_1")
    (folder / NAME).unlink()
    assert torch.equal(with_blocks, _logits(folder, "BF16"))


def _logits(folder: Path, kind: str) -> Tensor:
    target = Target.load(str(folder), "bfloat16", "cpu")
    assert isinstance(target._forward, LeanDecoder)
    products = [product for layer in target._forward.layers for product in (layer.products[0], layer.products[3])]
    tiled = [product.matmul.tiled[0] for product in products if product.matmul is not None]
    assert [matrix.layout.kind for matrix in tiled] == [kind] * len(products)
    cache = target.new_cache(64)
    logits, _ = target.run([Segment.of_text([5, 6, 7, 8, 9] * 8, cache)])
    return logits
