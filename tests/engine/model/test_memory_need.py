from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from engine.core.errors import ModelError
from engine.model.memory_need import check_memory
from engine.weights.gguf_file import GgufFile, GgufTensor


def file_of(parameters: int, kind: Kind) -> GgufFile:
    tensor = GgufTensor("some", (4096, parameters // 4096), kind, 0)
    with Path(__file__).open("rb") as content:
        return GgufFile(Path("x.gguf"), {}, [tensor], 0, content)


def test_a_file_that_fits_is_taken() -> None:
    check_memory(file_of(8_192_000_000, Kind.Q4_K), "model=x", 6_000_000_000)


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
