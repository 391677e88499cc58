"""Writes a GGUF file's weights in another type, for comparisons of engines that read 16 bits a weight.

python -m benchmarks.baselines.gguf SOURCE GOAL BF16
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

_FILE_TYPES = {"BF16": 32, "F16": 1}  # `general.file_type`


def retype(source: Path, goal: Path, kind: str) -> Path:
    """Write the weights of `source`, dequantised, as "BF16" or "F16"; vectors (norms, biases) as float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(goal, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = _FILE_TYPES[kind] if name == "general.file_type" else field.contents()
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(name, value, field.types[0], field.types[1])
        else:
            writer.add_key_value(name, value, field.types[0])
    stored = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return goal


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in _FILE_TYPES:
        sys.exit("python -m benchmarks.baselines.gguf SOURCE GOAL BF16 (or F16)")
    retype(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
