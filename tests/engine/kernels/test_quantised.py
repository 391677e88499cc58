"""Matrices kept in the blocks that they were quantised in: the same bits as the bfloat16 they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter, dequantize
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import Segment
from engine.kernels.gemm.matmul import Matmul, Unit, units
from engine.kernels.quantised import Form, Quantised
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from engine.weights.dequantise import dequantise
from engine.weights.gguf_blocks import quantised_weights
from engine.weights.gguf_file import read_gguf
from engine.weights.quantised_file import NAME, read_quantised, write_quantised
from tests.engine.weights.tiny_gguf import write_gguf

KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_KINDS = {Kind.Q4_K: Form.FOUR_WIDE, Kind.Q5_K: Form.EIGHT_WIDE, Kind.Q6_K: Form.EIGHT_HALVES}
HALVES = {Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208]}
"""Where in a block its float16 numbers are: not every number of two bytes is one."""
FORMS = [form for form in Form if form is not Form.BFLOAT16]
PAIRED = [unit for unit in units() if unit.paired]
multiplies = pytest.mark.skipif(not PAIRED, reason="this processor does not multiply bfloat16")


def random_matrix(form: Form, outputs: int, inputs: int) -> Quantised:
    """Scales are of few bits: see `engine.kernels.quantised`."""
    generator = torch.Generator().manual_seed(int(form))
    most = 128 if form is Form.EIGHT else 32
    if form.bits == 4:
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    else:
        codes = torch.randint(-most, most, (outputs, inputs), generator=generator).to(torch.int8)
    scales, offsets = torch.randn(2, outputs, inputs // 32, generator=generator).half()
    if form is Form.EIGHT_HALVES:
        factors = torch.randint(-128, 128, (outputs, inputs // 32, 2), generator=generator)
        return Quantised(codes, (scales[..., None].float() * factors).flatten(1), None)
    return Quantised(codes, *(some.float() * 63 if form.wide else some for some in (scales, offsets)))


def k_blocks(kind: Kind, outputs: int, inputs: int) -> NDArray[np.uint8]:
    """A random matrix of a GGUF file, [outputs, bytes]."""
    generator = np.random.default_rng(int(kind))
    blocks = generator.integers(0, 256, (outputs, inputs // 256, GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in HALVES[kind]:
        numbers = generator.standard_normal((outputs, inputs // 256)).astype(np.float16)
        blocks[:, :, at : at + 2] = numbers.view(np.uint8).reshape(*numbers.shape, 2)
    return blocks.reshape(outputs, -1)


@pytest.mark.parametrize("unit", PAIRED, ids=lambda unit: unit.value)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(80, 32, False), (48, 1536, False), (96, 576, True)])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_has_the_bits_of_the_bfloat16_product(
    unit: Unit, form: Form, outputs: int, inputs: int, gated: bool, rows: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    matrix, bias = random_matrix(form, outputs, inputs), torch.randn(outputs).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    quantised = Matmul(matrix.values(), bias, gated, unit, matrix)
    assert quantised.form is form
    assert torch.equal(quantised(x), Matmul(matrix.values(), bias, gated, unit)(x))


@multiplies
def test_a_matrix_that_is_not_the_weight_is_not_used() -> None:
    matrix, x = random_matrix(Form.FOUR, 32, 64), torch.randn(3, 64).bfloat16()
    weight = matrix.values()
    weight[5, 7] += 1
    product = Matmul(weight, quantised=matrix)
    assert product.form is Form.BFLOAT16
    assert torch.equal(product(x), Matmul(weight)(x))


@multiplies
@pytest.mark.parametrize(("form", "bits"), list(zip(FORMS, (5, 9, 6, 10, 10), strict=True)))
def test_it_takes_less_room(form: Form, bits: int) -> None:
    matrix = random_matrix(form, 64, 512)
    assert Matmul(matrix.values(), quantised=matrix).bytes == 64 * 512 * bits / 8


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
    found = dict(quantised_weights(tmp_path / "tiny.gguf", model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].values(), weight) for name, weight in expected.items())


@pytest.mark.parametrize("kind", K_KINDS, ids=lambda kind: kind.name)
def test_blocks_of_256_are_read_as_the_gguf_package_reads_them(kind: Kind, tmp_path: Path) -> None:
    data = k_blocks(kind, 48, 512)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("some.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = torch.from_numpy(dequantize(data, kind)).bfloat16()
    [(name, matrix)] = quantised_weights(tmp_path / "one.gguf", torch.nn.ParameterDict({"some": weight}))
    assert (name, matrix.form) == ("some", K_KINDS[kind])
    assert torch.equal(matrix.values(), weight)


def test_rows_are_found_in_another_order_and_what_differs_is_left_out(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    tensor = next(t for t in GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).bfloat16()
    changed = weight.clone()
    changed[3, 3] *= 2
    model = torch.nn.ParameterDict({"turned": weight.flip(0), "changed": changed})
    found = dict(quantised_weights(tmp_path / "tiny.gguf", model))
    assert list(found) == ["turned"]
    assert torch.equal(found["turned"].values(), weight.flip(0))


def test_what_is_written_is_read_again_and_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    matrices = {form.name: random_matrix(form, 32, 64) for form in FORMS}
    model = torch.nn.ParameterDict({name: matrix.values() for name, matrix in matrices.items()})
    assert read_quantised(tmp_path, model) == {}
    write_quantised(tmp_path, matrices.items())
    found = read_quantised(tmp_path, model)
    for name, weight in model.items():
        matrix = found[weight.data_ptr()]
        assert matrix.form is matrices[name].form
        assert torch.equal(matrix.values(), weight)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:100])
    assert read_quantised(tmp_path, model) == {}


def test_parts_that_do_not_go_together_are_passed_over(tmp_path: Path) -> None:
    matrix = random_matrix(Form.EIGHT, 16, 64)
    model = torch.nn.ParameterDict({"a": matrix.values()})
    for scales, offsets in ((matrix.scales[:, :1].contiguous(), matrix.offsets), (matrix.scales, None)):
        write_quantised(tmp_path, [("a", Quantised(matrix.codes, scales, offsets))])
        assert read_quantised(tmp_path, model) == {}


def test_the_nearest_codes_miss_a_matrix_by_half_a_step_at_most() -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    matrix[5, 32:64] = 0  # a block without a scale
    codes = Quantised.nearest(matrix)
    assert codes.form is Form.EIGHT and codes.whole
    step = matrix.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    missed = (codes.values().float() - matrix.float()).unflatten(1, (-1, 32)).abs()
    rounded = matrix.float().abs().unflatten(1, (-1, 32)) / 256  # to bfloat16
    assert (missed <= 0.51 * step + rounded).all() and codes.values()[5, 32:64].eq(0).all()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_the_nearest_codes_of_small_numbers_are_as_near(size: float) -> None:
    matrix = (size * torch.randn(32, 64, generator=torch.Generator().manual_seed(3))).bfloat16()
    values = Quantised.nearest(matrix).values()
    assert (values.float() - matrix.float()).norm() < 0.01 * matrix.float().norm()


def test_matrices_of_one_form_are_joined_and_others_are_not() -> None:
    four, eight = random_matrix(Form.FOUR, 16, 64), random_matrix(Form.EIGHT, 16, 64)
    halves = random_matrix(Form.EIGHT_HALVES, 16, 64)
    for part in (four, halves):
        joined = Quantised.joined([part, part])
        assert joined is not None and torch.equal(joined.values(), torch.cat([part.values()] * 2))
    assert Quantised.joined([four, eight]) is None
    assert Quantised.joined([four, None]) is None


def test_other_engines_take_it_for_no_weights(tmp_path: Path) -> None:
    write_quantised(tmp_path, [("a", random_matrix(Form.FOUR, 32, 64))])
    assert (tmp_path / NAME).is_file() and not list(tmp_path.glob("*.safetensors"))


@multiplies
def test_a_converted_file_answers_the_same_with_its_blocks_and_without(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    folder = tmp_path / "converted"
    folder.mkdir()
    dequantise(read_gguf(tmp_path / "tiny.gguf", "file"), folder, "tiny", "")
    with_blocks = _logits(folder, Form.FOUR)
    (folder / NAME).unlink()
    assert torch.equal(with_blocks, _logits(folder, Form.BFLOAT16))


def _logits(folder: Path, form: Form) -> Tensor:
    target = Target.load(str(folder), "bfloat16", "cpu")
    assert isinstance(target._forward, LeanDecoder)
    products = [product for layer in target._forward.layers for product in (layer.qkv, layer.down)]
    assert [product.matmul and product.matmul.form for product in products] == [form] * len(products)
    cache = target.new_cache(64)
    logits, _ = target.run([Segment.of_text([5, 6, 7, 8, 9] * 8, cache)])
    return logits
