"""Rivals as programs that speak JSON lines: the programs here are stand-ins of a few lines, the processes are real."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.console import Console

from benchmarks.report.rival_figures import Turn, table
from benchmarks.report.row_file import RowFile
from benchmarks.rivals.compare import RivalPlan, compare
from benchmarks.rivals.gguf import file_type, retype
from benchmarks.rivals.process import INSTALL, Missing, Process, Rival, rivals
from engine.core.errors import ConfigError

ECHO = """
import json, sys
print("loading"); print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"seconds": 2.0, "tokens": [asked["max_tokens"]] * len(asked["prompts"])}), flush=True)
"""


def rival(name: str, program: str = ECHO) -> Rival:
    return Rival(name, "float16", (sys.executable, "-c", program))


def state(process: int) -> str | None:
    """One letter, as Linux tells it; None if there is no such process."""
    status = Path(f"/proc/{process}/status")
    return status.read_text().partition("State:\t")[2][0] if status.exists() else None


async def test_a_rival_answers_all_prompts_and_what_else_it_prints_is_passed_over() -> None:
    process = await Process.start(rival("echo"))
    assert await process.answer([[1, 2], [3]], 5, 2) == (2.0, [5, 5])
    await process.stop()


async def test_a_rival_that_cannot_start_is_named() -> None:
    with pytest.raises(ConfigError, match="rival=broken"):
        await Process.start(rival("broken", "raise SystemExit('no model')"))


async def test_rivals_take_turns_at_every_level(tmp_path: Path) -> None:
    plan = RivalPlan([1, 8], 3, [[1], [2], [3]], repeats=2)
    said = Console(file=io.StringIO(), width=200)
    broken, gone = rival("broken", "raise SystemExit"), Missing("gone", "pip install gone")
    with RowFile(tmp_path / "turns.jsonl") as results:
        turns = await compare({}, [rival("one"), rival("two"), broken, gone], plan, results, said)
    taken = sorted((turn.repeat, turn.at_once, turn.contestant, len(turn.tokens)) for turn in turns)
    assert taken == [(r, n, name, count) for r in (0, 1) for n, count in ((1, 6), (8, 24)) for name in ("one", "two")]
    written = (tmp_path / "turns.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in written] == [turn.tokens for turn in turns]
    printed = said.file.getvalue()  # type: ignore[attr-defined]
    assert "broken" in printed and "pip install gone" in printed


async def test_a_rival_that_ends_in_its_turn_is_left_out_from_there_on_and_ends_no_other(tmp_path: Path) -> None:
    tried_and_one_turn = ECHO.replace("in sys.stdin", "in (sys.stdin.readline() for _ in range(2))")
    results, said = RowFile(tmp_path / "turns.jsonl"), Console(file=io.StringIO(), width=200)
    others = [rival("one"), rival("mortal", tried_and_one_turn)]
    turns = await compare({}, others, RivalPlan([1], 3, [[1]], repeats=3), results, said)
    assert sorted(turn.contestant for turn in turns) == ["mortal", "one", "one", "one"]
    printed = said.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("left out from here on: rival=mortal: ended") == 1


async def test_a_rival_rests_between_its_turns_and_leaves_nothing_behind() -> None:
    process = await Process.start(rival("echo"))
    number = process._process.pid
    for _ in range(500):
        if state(number) == "T":
            break
        await asyncio.sleep(0.01)
    assert state(number) == "T"
    await process.stop()
    assert state(number) is None


def test_the_table_gives_the_median_of_ratios_to_plain_decoding_in_the_same_repeat() -> None:
    rates = {"none": (10, 20, 40), "fast": (30, 40, 60)}
    turns = [
        Turn(name, "bfloat16", 1, repeat, 1.0, [rate])
        for name, by_repeat in rates.items()
        for repeat, rate in enumerate(by_repeat)
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(table(turns).rich())
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "40 (2.00x)" in printed and "20 (1.00x)" in printed
    assert printed.index("fast") < printed.index("none")


def test_rivals_that_are_not_installed_come_with_the_line_that_installs_them(tmp_path: Path) -> None:
    found = rivals(tmp_path, "model", {}, 2, 8)
    assert [one.name for one in found] == list(INSTALL)
    assert all(isinstance(one, Missing) and "pip install" in one.reason for one in found)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_weights_keep_their_numbers_in_another_type(tmp_path: Path, kind: str) -> None:
    matrix, vector = np.arange(64, dtype=np.float32).reshape(2, 32), np.arange(32, dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_context_length(128)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("vector", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(retype(tmp_path / "small.gguf", tmp_path / "other.gguf", kind))
    assert reader.fields["llama.context_length"].contents() == 128
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert file_type(tmp_path / "small.gguf") == "F32"
    assert found["matrix"].tensor_type.name == kind and found["vector"].tensor_type.name == "F32"
    for name, numbers in (("matrix", matrix), ("vector", vector)):
        tensor = found[name]
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(numbers.shape), numbers)
