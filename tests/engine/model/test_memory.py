from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.core.errors import ModelError
from engine.core.state_shape import StateShape
from engine.model import loading
from engine.model.loading import load_model
from engine.model.memory import check_memory, check_whole_memory, free_memory, pool_of
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.header import GgufHeader, GgufTensor
from tests.engine.weights.tiny_gguf import described_gguf, write_gguf

MEMINFO = (
    "MemTotal:       24684000 kB\nMemFree:          300000 kB\nMemAvailable:   20000000 kB\nCached:  19000000 kB\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def test_the_page_cache_counts_as_free(machine: Path) -> None:
    assert free_memory(machine, machine / "none") == 20_000_000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "anon 200\ninactive_file 100\n"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "inactive_file 7\ntotal_inactive_file 100\n"),
    ],
)
def test_a_container_has_what_its_limit_leaves(machine: Path, limit: str, used: str, stat: str) -> None:
    (machine / "memory").mkdir()
    (machine / limit).write_text("2000\n")
    (machine / used).write_text("300\n")
    (machine / limit).with_name("memory.stat").write_text(stat)
    assert free_memory(machine, machine) == 2000 - 300 + 100


def test_a_container_without_a_limit_has_what_the_machine_has(machine: Path) -> None:
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("300\n")
    assert free_memory(machine, machine) == 20_000_000 * 1024


def test_where_nobody_tells_it_is_a_guess(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) == 4 << 30


def file_of(parameters: int, kind: Kind) -> GgufFile:
    tensor = GgufTensor("some", (4096, parameters // 4096), kind, 0)
    with Path(__file__).open("rb") as content:
        return GgufFile([GgufHeader(Path("x.gguf"), {}, [tensor], 0, content)])


def test_a_file_that_fits_is_taken() -> None:
    check_memory(file_of(8_192_000_000, Kind.Q4_K), "model=x", 6_000_000_000)


@pytest.mark.parametrize("kind", [Kind.IQ2_XXS, Kind.Q3_K, Kind.NVFP4])
def test_a_file_needs_what_its_types_take_in_memory(kind: Kind) -> None:
    file, bits = file_of(8_192_000_000, kind), {Kind.IQ2_XXS: 3.1875, Kind.Q3_K: 3.5625}.get(kind, 16)
    needed = int(1.05 * 8_192_000_000 * bits / 8) + 600_000_000
    check_memory(file, "model=x", needed)
    with pytest.raises(ModelError, match=f"needs {needed / 1e9:.1f} GB of memory"):
        check_memory(file, "model=x", needed - 1)


@pytest.mark.parametrize(
    ("free", "choice"),
    [(8e9, "its Q6_K (7.7 GB)"), (5e9, "its IQ4_XS (5.2 GB)"), (2e9, "a model of fewer parameters")],
)
def test_one_that_does_not_names_the_next_smaller_choice(free: float, choice: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_memory(file_of(8_192_000_000, Kind.Q8_0), "model=x", int(free + 0.3e9))
    told = str(caught.value)
    assert told.startswith("model=x: the file of 8.7 GB needs 9.7 GB of memory, and ") and "\n" not in told
    assert f"take {choice}, or free memory" in told


@pytest.mark.parametrize(("dtype", "needed"), [(torch.bfloat16, 17.0), (torch.float32, 33.4)])
def test_what_a_whole_model_needs_is_said_with_the_reason_why_it_is_needed(dtype: torch.dtype, needed: float) -> None:
    file = file_of(8_192_000_000, Kind.Q4_K)
    check_whole_memory(file, dtype, "model=x", "it is read whole", int(1e9 * needed))
    with pytest.raises(ModelError) as caught:
        check_whole_memory(file, dtype, "model=x", "it is read whole", int(1e9 * needed) - 100_000_000)
    told = str(caught.value)
    assert told.startswith("model=x: it is read whole, ") and "\n" not in told
    assert f"needs {needed} GB of memory, where {needed - 0.1:.1f} GB are free" in told


def test_nearly_twice_as_many_positions_of_8_bits_fit_into_the_same_memory() -> None:
    parts, cpu = [(2, 2, 64)], torch.device("cpu")
    usual, blocks = (pool_of(parts, torch.bfloat16, kind, 1 << 20, cpu).blocks for kind in ("auto", "q8_0"))
    assert 1.8 * usual < blocks < 2 * usual


def test_a_file_that_is_too_large_for_transformers_forward_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = described_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(loading, "free_memory", lambda: 1_000_000)
    with pytest.raises(ModelError, match=r"transformers' own forward reads it as float32, which needs 0\.\d GB"):
        load_model(folder, "float32", torch.device("cpu"))


def test_too_little_room_for_states_and_keys_is_refused_with_what_is_needed() -> None:
    states, cpu = StateShape((1_000_000,), (8,)), torch.device("cpu")
    with pytest.raises(
        ModelError, match=r"^verifier\.kv_memory: 4 MB have no room .* beside 4 states of 1\.0 MB; set 5 MB"
    ):
        pool_of([(1, 1, 16)], torch.float32, "auto", 4_000_000, cpu, states)
    pool = pool_of([(1, 1, 16)], torch.float32, "auto", 5_000_000, cpu, states)
    assert pool.blocks >= 16 and pool.layer_states is not None and pool.layer_states.slots == 4
    assert pool.layer_states.memory > 4_000_000
    assert pool.blocks * pool.block_bytes + pool.layer_states.memory <= 5_000_000
