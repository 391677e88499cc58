"""`activations: auto`: chosen by measuring, once, and written down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from engine.config import Activations, Config
from engine.core.params import SamplingParams
from engine.frontend.processes import Workers
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.matmul import Unit
from engine.model.loading import open_stored
from engine.model.target import Target
from engine.model.trial import activations
from engine.model.trial.activations import ActivationsRecord, activations_of, preferred
from engine.weights.gguf.file import GgufFile
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.weights.tiny_gguf import described_gguf, write_gguf

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
ROWS = (1, 4, 8, 16, 128)
FASTER = {
    "bfloat16": dict(zip(ROWS, (4.0, 5.0, 8.0, 16.0, 100.0), strict=True)),
    "int8": dict(zip(ROWS, (3.0, 4.0, 6.0, 10.0, 70.0), strict=True)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return what a tiny model in blocks gets."""
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    return Path(described_gguf(tmp_path / "tiny.gguf"))


def gguf_of(folder: Path) -> GgufFile:
    stored = open_stored(folder)
    assert isinstance(stored, GgufFile)
    return stored


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No model is small, 8 bits are faster, and each measurement adds its number of matrices."""
    found: list[int] = []

    def timed(matrices: Any) -> Any:
        found.append(len(matrices))
        return FASTER

    monkeypatch.setattr(activations, "_SMALL", 0)
    monkeypatch.setattr(activations, "_timed", timed)
    return found


@pytest.mark.parametrize(
    "bfloat16, int8, expected",
    [
        pytest.param((52, 56, 58, 66, 210), (39, 47, 54, 82, 540), "bfloat16", id="AMX"),
        pytest.param((38, 60, 90, 150, 950), (22, 38, 55, 96, 640), "int8", id="slow bfloat16"),
        pytest.param((10, 10, 10, 10, 100), (9, 9, 9, 9, 90), "bfloat16", id="hardly faster"),
    ],
)
def test_8_bits_are_taken_where_they_are_clearly_faster(
    bfloat16: tuple[int, ...], int8: tuple[int, ...], expected: Activations
) -> None:
    seconds = {"bfloat16": dict(zip(ROWS, bfloat16, strict=True)), "int8": dict(zip(ROWS, int8, strict=True))}
    assert preferred(seconds) == expected  # type: ignore[arg-type]


def test_the_choice_is_made_once_and_stays(folder: Path, measured: list[int]) -> None:
    for _ in range(3):
        assert activations_of(folder, gguf_of(folder)) == "int8"
    assert len(measured) == 1 and measured[0] > 0


def test_another_model_or_processor_is_measured_again(
    folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    activations_of(folder, gguf_of(folder))
    with monkeypatch.context() as patch:
        patch.setattr(activations, "features", lambda: frozenset({"+another"}))
        assert ActivationsRecord(folder).read() is None
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert ActivationsRecord(folder).read() is None


def test_a_damaged_record_is_none(folder: Path, measured: list[int]) -> None:
    activations_of(folder, gguf_of(folder))
    [file] = folder.glob("activations*")
    file.write_bytes(file.read_bytes()[:-1])
    assert ActivationsRecord(folder).read() is None


@pytest.mark.parametrize("found, expected", [((Unit.AMX, Unit.VECTORS), "bfloat16"), ((Unit.FMA,), "int8")])
def test_where_nothing_can_be_written_the_instructions_decide(
    folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch, found: tuple[Unit, ...], expected: str
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(activations, "units", lambda: found)
    monkeypatch.setattr(activations, "write_checked", refuse)
    assert activations_of(folder, gguf_of(folder)) == expected
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert activations_of(folder, gguf_of(folder)) == expected and len(measured) == 1


def test_a_small_model_keeps_bfloat16_unmeasured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_timed", None)
    assert activations_of(folder, gguf_of(folder)) == "bfloat16"


def test_both_kinds_are_timed_with_the_models_own_matrices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def take(seconds: Any) -> Activations:
        found.append(seconds)
        return "int8"

    monkeypatch.setattr(activations, "_SMALL", 0)
    monkeypatch.setattr(activations, "preferred", take)
    assert activations_of(folder, gguf_of(folder)) == "int8"
    assert {kind: tuple(by_rows) for kind, by_rows in found[0].items()} == {"bfloat16": ROWS, "int8": ROWS}
    assert all(0 < seconds < 60 for by_rows in found[0].values() for seconds in by_rows.values())


def test_a_target_takes_its_rows_as_chosen(folder: Path, measured: list[int]) -> None:
    config = Config(model=str(folder), dtype="bfloat16", device="cpu")
    assert config.activations == "auto"
    assert [Target.of_config(config).activations for _ in range(2)] == ["int8", "int8"] and len(measured) == 1


def test_what_has_no_blocks_needs_no_choice(tiny: str) -> None:
    assert Target.of_config(Config(model=tiny, device="cpu")).activations == "bfloat16"


async def test_answers_and_the_engine_say_what_was_chosen(folder: Path, measured: list[int]) -> None:
    options = {"dtype": "bfloat16", "verifier.kv_memory": 1 << 22}
    async with tiny_engine(str(folder), str(folder), "suffix", **options) as engine:
        result = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=4))
        assert (result.metrics.activations, engine.target.activations) == ("int8", "int8")
        assert engine._workers.config.activations == "int8", "a verifier that replaces this one may find no record"


def test_a_replaced_verifier_keeps_the_activations_of_the_first() -> None:
    workers = Workers(Config(transport="inproc"), None)  # type: ignore[arg-type]
    workers.keep_activations("int8")
    workers.keep_activations("bfloat16")
    assert workers.config.activations == "int8"
