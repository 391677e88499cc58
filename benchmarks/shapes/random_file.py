"""Writes a GGUF file of random weights: blocks of random codes, whose scales make the numbers about 0.03 large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import pre_tokenizers

from ..report.progress import progress_bar
from .shape import Shape
from .tensors import FileTensor, Kind, metadata_of, tensors_of

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant <think> let me see what is asked {% endif %}"
)
"""Opens an answer with a thought of more tokens than a block of the prefix cache has. Later turns do not repeat it, as
templates of reasoning models do not.
"""
_BLOCKS = 1 << 16  # different blocks of a type


class _Scale(NamedTuple):
    """A number of a block that the codes are multiplied with: where it is, and its bytes."""

    at: int
    bytes: bytes


_SCALES = {
    Type.Q4_K: [_Scale(0, np.float16(2e-4).tobytes()), _Scale(2, np.float16(1.5e-3).tobytes())],
    Type.Q5_K: [_Scale(0, np.float16(1e-4).tobytes()), _Scale(2, np.float16(1.5e-3).tobytes())],
    Type.Q6_K: [_Scale(208, np.float16(2.2e-5).tobytes())],
    Type.Q2_K: [_Scale(80, np.float16(2.2e-3).tobytes()), _Scale(82, np.float16(3.3e-3).tobytes())],
    Type.Q3_K: [_Scale(108, np.float16(7e-4).tobytes())],
    Type.IQ2_XXS: [_Scale(0, np.float16(6e-4).tobytes())],
    Type.IQ3_S: [_Scale(0, np.float16(2e-4).tobytes())],
    Type.Q8_0: [_Scale(0, np.float16(4e-4).tobytes())],
    Type.MXFP4: [_Scale(0, bytes([121]))],
}

MIXES: dict[str, dict[Kind, Type]] = {
    "Q4_K_M": {"matrix": Type.Q4_K, "fine": Type.Q6_K, "output": Type.Q6_K},
    "Q3_K_M": {"matrix": Type.Q3_K, "fine": Type.Q4_K, "output": Type.Q6_K},
    "IQ3_M": {"matrix": Type.IQ3_S, "fine": Type.Q4_K, "output": Type.Q6_K},
    "Q2_K": {"matrix": Type.Q2_K, "fine": Type.Q3_K, "output": Type.Q6_K},
    "IQ2_XXS": {"matrix": Type.IQ2_XXS, "fine": Type.Q2_K, "output": Type.Q5_K},
}
"""The types of llama.cpp's mixes: as many of each as in Q4_K_M, nearly as many in the others."""


def write_random(shape: Shape, path: Path, console: Console, mix: str = "Q4_K_M", seed: int = 0) -> None:
    """Write the file, a tensor at a time."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name("random weights")
    for key, value in metadata_of(shape).items():
        kind = gguf.GGUFValueType.get_type(value)
        if kind is gguf.GGUFValueType.ARRAY:
            writer.add_array(f"{shape.architecture}.{key}", value)
        else:
            whole = kind is gguf.GGUFValueType.INT32  # llama.cpp reads numbers without a sign alone
            writer.add_key_value(f"{shape.architecture}.{key}", value, gguf.GGUFValueType.UINT32 if whole else kind)
    _add_vocabulary(writer, shape.vocabulary)
    tensors = [*tensors_of(shape)]
    for tensor in tensors:
        kind = type_of(tensor, MIXES[mix])
        size = _stored_shape(tensor, kind)
        stored = np.dtype(np.float32 if kind is Type.F32 else np.uint8)
        writer.add_tensor_info(tensor.name, size, stored, math.prod(size) * stored.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    numbers = np.random.default_rng(seed)
    with progress_bar(console) as progress:
        task = progress.add_task(f"writing {path.name}", total=len(tensors))
        for tensor in tensors:
            writer.write_tensor_data(_random(tensor, type_of(tensor, MIXES[mix]), numbers))
            progress.advance(task)
    writer.close()


def type_of(tensor: FileTensor, mix: Mapping[Kind, Type]) -> Type:
    """Return the type of a tensor in a mix; rows that no block of 256 divides are in 8 bits."""
    if tensor.kind == "experts":
        return Type.MXFP4
    if tensor.kind not in mix:
        return Type.F32
    return Type.Q8_0 if tensor.shape[-1] % 256 else mix[tensor.kind]


def _stored_shape(tensor: FileTensor, kind: Type) -> tuple[int, ...]:
    """Return the shape in bytes, of a tensor in blocks; in numbers otherwise."""
    if kind is Type.F32:
        return tensor.shape
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    return *tensor.shape[:-1], tensor.shape[-1] // numbers * size


def _random(tensor: FileTensor, kind: Type, numbers: np.random.Generator) -> NDArray[Any]:
    size = _stored_shape(tensor, kind)
    if kind is not Type.F32:
        blocks = _blocks(kind)
        return np.resize(np.roll(blocks, int(numbers.integers(len(blocks))), axis=0), size)
    if tensor.kind == "decay":
        return -np.exp(numbers.uniform(-3, 2, size)).astype(np.float32)
    if tensor.kind == "factors":  # the last three quarters of the frequencies do not rotate
        return np.where(np.arange(size[0]) < size[0] // 4, 1, 1e30).astype(np.float32)
    mean, deviation = (1.0, 0.1) if tensor.kind == "norm" else (0.0, 0.03)
    return (mean + deviation * numbers.standard_normal(size)).astype(np.float32)


@cache
def _blocks(kind: Type) -> NDArray[np.uint8]:
    """Return [blocks, bytes] of random codes."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    found = np.random.default_rng(1).integers(0, 256, (_BLOCKS, size), dtype=np.uint8)
    for scale in _SCALES[kind]:
        found[:, scale.at : scale.at + len(scale.bytes)] = np.frombuffer(scale.bytes, np.uint8)
    return found


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add bytes, pairs of letters, and names that no text is encoded as."""
    pairs = [*product(ascii_lowercase, repeat=2)]
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    filled = [f"<|unused{number}|>" for number in range(size - len(known) - len(SPECIAL))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*known, *filled, *SPECIAL])
    writer.add_token_types([1] * (size - len(SPECIAL)) + [3] * len(SPECIAL))
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
