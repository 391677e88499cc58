"""Matrices kept in the blocks that they were quantised in: the same bits as the bfloat16 they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, dequantize
from torch import Tensor

from engine.batch import Segment
from engine.model.decoder import LeanDecoder
from engine.model.dequantise import dequantise
from engine.model.gguf_blocks import quantised_weights
from engine.model.gguf_file import read_gguf
from engine.model.matmul import Matmul, Unit, units
from engine.model.quantised import Quantised
from engine.model.quantised_file import NAME, read_quantised, write_quantised
from engine.target import Target
from tests.engine.model.tiny_gguf import write_gguf

KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
PAIRED = [unit for unit in units() if unit.paired]
multiplies = pytest.mark.skipif(not PAIRED, reason="this processor does not multiply bfloat16")


def random_matrix(bits: int, outputs: int, inputs: int) -> Quantised:
    generator = torch.Generator().manual_seed(bits)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (outputs, inputs), generator=generator).to(kind)
    scales, offsets = torch.randn(2, outputs, inputs // 32, generator=generator).half()
    return Quantised(codes, scales, offsets)


@pytest.mark.parametrize("unit", PAIRED, ids=lambda unit: unit.value)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(80, 32, False), (48, 1536, False), (96, 576, True)])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_has_the_bits_of_the_bfloat16_product(
    unit: Unit, bits: int, outputs: int, inputs: int, gated: bool, rows: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    matrix, bias = random_matrix(bits, outputs, inputs), torch.randn(outputs).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    quantised = Matmul(matrix.values(), bias, gated, unit, matrix)
    assert quantised.bits == bits
    assert torch.equal(quantised(x), Matmul(matrix.values(), bias, gated, unit)(x))


@multiplies
def test_a_matrix_that_is_not_the_weight_is_not_used() -> None:
    matrix, x = random_matrix(4, 32, 64), torch.randn(3, 64).bfloat16()
    weight = matrix.values()
    weight[5, 7] += 1
    product = Matmul(weight, quantised=matrix)
    assert product.bits == 0
    assert torch.equal(product(x), Matmul(weight)(x))


@multiplies
def test_it_takes_less_room() -> None:
    matrix = random_matrix(4, 64, 512)
    whole, quantised = Matmul(matrix.values()), Matmul(matrix.values(), quantised=matrix)
    assert quantised._weights.nbytes / whole._weights.nbytes == pytest.approx(5 / 16)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_are_read_as_the_gguf_package_reads_them(kind: Kind, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind)
    expected = {}
    for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors:
        if tensor.name in ("blk.0.ffn_up.weight", "blk.1.ffn_down.weight"):
            expected[tensor.name.replace(".", "_")] = torch.from_numpy(
                dequantize(tensor.data, tensor.tensor_type)
            ).bfloat16()
    model = torch.nn.ParameterDict(expected)
    found = quantised_weights(tmp_path / "tiny.gguf", model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].values(), weight) for name, weight in expected.items())


def test_rows_are_found_in_another_order_and_what_differs_is_left_out(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    tensor = next(t for t in GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).bfloat16()
    changed = weight.clone()
    changed[3, 3] *= 2
    model = torch.nn.ParameterDict({"turned": weight.flip(0), "changed": changed})
    found = quantised_weights(tmp_path / "tiny.gguf", model)
    assert list(found) == ["turned"]
    assert torch.equal(found["turned"].values(), weight.flip(0))


def test_what_is_written_is_read_again_and_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    matrices = {"a": random_matrix(4, 32, 64), "b": random_matrix(8, 16, 32)}
    model = torch.nn.ParameterDict({name: matrix.values() for name, matrix in matrices.items()})
    assert read_quantised(tmp_path, model) == {}
    write_quantised(tmp_path, matrices)
    found = read_quantised(tmp_path, model)
    for name, weight in model.items():
        matrix = found[weight.data_ptr()]
        assert matrix.bits == matrices[name].bits
        assert torch.equal(matrix.values(), weight)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:100])
    assert read_quantised(tmp_path, model) == {}


def test_other_engines_take_it_for_no_weights(tmp_path: Path) -> None:
    write_quantised(tmp_path, {"a": random_matrix(4, 32, 64)})
    assert (tmp_path / NAME).is_file() and not list(tmp_path.glob("*.safetensors"))


@multiplies
def test_a_converted_file_answers_the_same_with_its_blocks_and_without(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    folder = tmp_path / "converted"
    folder.mkdir()
    dequantise(read_gguf(tmp_path / "tiny.gguf", "file"), folder, "tiny", "")
    with_blocks = _logits(folder, 4)
    (folder / NAME).unlink()
    assert torch.equal(with_blocks, _logits(folder, 0))


def _logits(folder: Path, bits: int) -> Tensor:
    target = Target.load(str(folder), "bfloat16", "cpu")
    assert isinstance(target._forward, LeanDecoder)
    products = [product for layer in target._forward.layers for product in (layer.qkv, layer.down)]
    assert [product.matmul and product.matmul.bits for product in products] == [bits] * len(products)
    cache = target.new_cache(64)
    logits, _ = target.run([Segment.of_text([5, 6, 7, 8, 9] * 8, cache)])
    return logits
