from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.kernels.quant.layouts import layout_of
from engine.kernels.quant.quantise import quantised

KINDS = [Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def numbers(rows: int = 48, inputs: int = 96) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((rows, inputs)).astype(np.float32)


@every_kind
@pytest.mark.parametrize(
    "values",
    [
        numbers(),
        numbers() * np.float32(1e-6),
        np.round(numbers() * 3) / 4,
        -np.round(numbers() * 3) / 4,
        np.zeros((2, 64), np.float32),
        np.abs(numbers()) + 5,
        np.repeat(numbers(4, 1), 32, axis=1),
    ],
    ids=["normal", "small", "ties", "negative ties", "zeros", "far from zero", "all equal"],
)
def test_blocks_are_those_of_llama_cpps_rule_bit_for_bit(kind: Kind, values: NDArray[np.float32]) -> None:
    assert np.array_equal(quantised(values, kind.name), gguf.quantize(values, kind))


@every_kind
def test_what_is_read_back_is_near_by_the_bits_of_a_code(kind: Kind) -> None:
    values = numbers()
    found = gguf.dequantize(quantised(values, kind.name), kind)
    step = np.ptp(values.reshape(-1, 32), axis=1).max() / (2 ** layout_of(kind.name).bits - 1)
    assert np.abs(found - values).max() < (0.6 if layout_of(kind.name).offset is not None else 1.1) * step


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="48 inputs are not blocks of 32"):
        quantised(numbers(inputs=48), "Q8_0")
