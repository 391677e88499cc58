"""GGUF files with tensors that no model has: of NaN, and of the zeros of a download that was not finished."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.kernels.products import put_scales
from engine.core.errors import ModelError
from engine.model.target import Target
from engine.weights.gguf.damage import DamagedTensors, check_tensors
from engine.weights.gguf.describe_process import main
from engine.weights.gguf.file import GgufFile, read_gguf
from tests.engine.kernels.quant.random_blocks import random_blocks
from tests.engine.weights.tiny_gguf import tiny_llama, write_gguf

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


def written(folder: Path, **changes: object) -> GgufFile:
    write_gguf(folder / "tiny.gguf", **changes)  # type: ignore[arg-type]
    return read_gguf(folder / "tiny.gguf", "model=tiny")


def place_of(file: GgufFile, name: str) -> int:
    """Where a tensor begins in its file."""
    tensor = file.tensor(name)
    assert tensor is not None
    return file.parts[tensor.part].start + tensor.offset


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_tensor_with_a_number_that_is_none_is_named(tmp_path: Path, kind: Kind) -> None:
    """In a block of quantised weights its scale is none, or its offset."""
    file = written(tmp_path, kind=kind)
    assert check_tensors(file) == []
    start = place_of(file, "blk.1.ffn_up.weight")
    whole = file.path.read_bytes()[start : start + 4]
    for value in (np.nan, -np.inf):
        of_32_bits = np.float32(value).tobytes()
        number = {Kind.F32: of_32_bits, Kind.BF16: of_32_bits[2:]}.get(kind, np.float16(value).tobytes())
        for at in (0, 2) if kind in (Kind.Q4_1, Kind.Q5_1) else (0,):
            overwrite(file.path, start, whole)
            overwrite(file.path, start + at, number)
            with pytest.raises(DamagedTensors, match=r"^tensor 'blk.1.ffn_up.weight' holds NaN or infinity; get the f"):
                check_tensors(file)


def test_a_scale_in_four_places_is_read_from_all_of_them(tmp_path: Path) -> None:
    matrix, scales = random_blocks("IQ1_M", 40, 512), np.ones((40, 2), np.float16)
    put_scales(matrix.raw.reshape(40, 2, -1), 312, scales)
    assert check_tensors(written(tmp_path, tensors={"some": matrix})) == []
    scales[31, 1] = np.inf
    put_scales(matrix.raw.reshape(40, 2, -1), 312, scales)
    with pytest.raises(DamagedTensors, match="'some' holds NaN or infinity"):
        check_tensors(written(tmp_path, tensors={"some": matrix}))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_file_or_part_that_ends_in_zeros_is_told_to_be_a_download_that_was_not_finished(
    tmp_path: Path, parts: int
) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q8_0, part_tensors=9 if parts > 1 else 0)
    whole = read_gguf(min(tmp_path.glob("tiny*.gguf")), "model=tiny")
    assert len(whole.parts) == parts
    for number, part in enumerate(whole.parts):
        kept = part.path.read_bytes()
        last = [tensor for tensor in whole.tensors if tensor.part == number][-2:]
        start = place_of(whole, last[0].name)
        overwrite(part.path, start - 40, bytes(len(kept) - start + 40))
        told = f"^{part.path.name} ends in zeros: 2 of its tensors, '{last[0].name}' first, hold nothing else"
        with pytest.raises(DamagedTensors, match=told):
            check_tensors(whole)
        overwrite(part.path, 0, kept)


def test_other_tensors_of_zeros_are_named_and_biases_are_not(tmp_path: Path) -> None:
    zeros = {"blk.0.attn_q.weight": np.zeros((64, 64), np.float32), "blk.0.attn_q.bias": np.zeros(64, np.float32)}
    file = written(tmp_path, tensors={**zeros, "z": np.ones(4, np.float32)})
    assert check_tensors(file) == ["blk.0.attn_q.weight"]


def test_the_reader_ends_with_a_number_of_its_own_for_damage_and_tells_of_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "read", lambda *_: b"")  # standard input, which closes with the parent
    monkeypatch.setattr(os, "_exit", lambda _: None)
    path = tmp_path / "tiny.gguf"
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(sys, "argv", ["describe", str(path), str(tmp_path / "made"), "tiny", "Made for a test."])
    written(tmp_path, tensors={"blk.0.attn_q.weight": np.zeros((64, 64), np.float32)})
    main()
    assert "talon: tiny: 1 tensors hold zeros alone, 'blk.0.attn_q.weight' first" in capsys.readouterr().out
    overwrite(path, path.stat().st_size - 300, bytes(300))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == errno.EBADMSG and "ends in zeros" in capsys.readouterr().out


def test_a_model_whose_logits_are_all_the_same_is_told_to_have_weights_of_zeros() -> None:
    model = tiny_llama()
    torch.nn.init.zeros_(model.model.norm.weight)
    with pytest.raises(
        ModelError, match=r"^model=tiny: the logits of a short text are all the same: weights that decide"
    ):
        Target.of_model(model, "tiny")


def test_a_forward_that_fails_is_told_with_its_own_reason() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(7, 32)
    with pytest.raises(ModelError, match=r"^model=tiny: its own forward fails, of the llama family .*mat1 and mat2"):
        Target.of_model(model, "tiny")
