"""Other engines as programs that speak JSON lines: here stand-ins of a few lines, in processes that are real."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.console import Console

from benchmarks.baselines import compare as comparison
from benchmarks.baselines import engines
from benchmarks.baselines.compare import compare, own_contestants, turns, warn_of_repeats
from benchmarks.baselines.engines import INSTALL, Baseline, Given, Missing, Process, baselines
from benchmarks.baselines.gguf import retype
from benchmarks.measure.budget import Budget
from benchmarks.measure.plan import MeasurementPlan
from benchmarks.report.engine_figures import Turn, table
from engine.config import Config, load
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.weights.gguf.file import read_gguf
from tests.engine.weights.tiny_gguf import write_all

ECHO = """
import json, sys
print("loading"); print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"seconds": 2.0, "tokens": [asked["max_tokens"]] * len(asked["prompts"])}), flush=True)
"""


def engine(name: str, program: str = ECHO) -> Baseline:
    return Baseline(name, "float16", "float32", (sys.executable, "-c", program))


def state(process: int) -> str | None:
    """One letter, as Linux tells it; None if there is no such process."""
    status = Path(f"/proc/{process}/status")
    return status.read_text().partition("State:\t")[2][0] if status.exists() else None


async def test_an_engine_answers_all_prompts_what_else_it_prints_is_passed_over_and_it_leaves_nothing_behind() -> None:
    process = await Process.start(engine("echo"))
    assert await process.answer([[1, 2], [3]], 5, 2) == (2.0, [5, 5])
    number = process._process.pid
    assert state(number) is not None
    await process.stop()
    assert state(number) is None


async def test_an_engine_that_cannot_start_is_named() -> None:
    with pytest.raises(ConfigError, match="engine=broken"):
        await Process.start(engine("broken", "raise SystemExit('no model')"))


@pytest.mark.parametrize(("asked_for", "kinds"), [("auto", ["bfloat16", "int8"]), ("int8", ["int8"])])
def test_talon_takes_part_with_both_kinds_of_activations_or_with_the_one_that_is_named(
    asked_for: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "weights_of", lambda config: "Q4_K")
    config = load(Config(), {"activations": asked_for})
    plan = MeasurementPlan(config, ["suffix"], [], tmp_path, [SamplingParams()])
    assert [(one.name, one.activations) for one in own_contestants(plan)] == [
        (name, kind) for kind in kinds for name in ("none", "suffix")
    ]


async def compared(
    others: list[Baseline | Missing], levels: list[int], prompts: list[list[int]]
) -> tuple[list[Turn], str]:
    """The turns of two repeats, three tokens an answer, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    order = turns(levels, prompts, 2, Budget(None), lambda level: [])
    found = [turn async for turn in compare([], others, order, [9], 3, console)]
    return found, console.file.getvalue()  # type: ignore[attr-defined]


async def test_engines_take_turns_at_every_level() -> None:
    broken, gone = engine("broken", "raise SystemExit"), Missing("gone", "pip install gone")
    large = f"held = b'x' * {20 << 20}\n{ECHO}"  # what an idle interpreter shares with others can be all of it
    found, printed = await compared([engine("one", large), engine("two", large), broken, gone], [1, 8], [[1], [2], [3]])
    assert [turn.at_once for turn in found] == [1, 8] * 4, "an engine started answers all levels"
    taken = sorted((turn.repeat, turn.at_once, turn.contestant, len(turn.tokens)) for turn in found)
    assert taken == [(r, n, name, count) for r in (0, 1) for n, count in ((1, 20), (8, 24)) for name in ("one", "two")]
    assert all(set(turn.tokens) == {3} and 0 < turn.start_s < 60 and 20 < turn.memory_mb < 500 for turn in found)
    assert "broken" in printed and "pip install gone" in printed


@pytest.mark.parametrize(("prompts", "told"), [(44, False), (43, True)])
def test_repeats_of_prompts_which_flatter_engines_that_remember_are_told(prompts: int, told: bool) -> None:
    console = Console(file=io.StringIO(), width=400)
    warn_of_repeats(prompts, [1, 8], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("43 prompts for 44 answers" in printed) == bool(printed) == told


async def test_an_engine_that_ends_in_its_turn_is_left_out_from_there_on_and_ends_no_other() -> None:
    tried_and_one_turn = ECHO.replace("in sys.stdin", "in (sys.stdin.readline() for _ in range(2))")
    found, printed = await compared([engine("one"), engine("mortal", tried_and_one_turn)], [1, 8], [[1]])
    assert sorted(turn.contestant for turn in found) == ["mortal", *["one"] * 4]
    assert printed.count("left out from here on: engine=mortal: ended") == 1


async def test_the_first_answer_of_an_engine_which_compiles_is_not_measured(tmp_path: Path) -> None:
    noting = ECHO.replace(
        "    print", f"    open({str(tmp_path / 'asked')!r}, 'a').write(f'{{asked[\"prompts\"][0]}}\\n')\n    print"
    )
    found, _ = await compared([engine("one", noting)], [1], [[1], [2]])
    assert (tmp_path / "asked").read_text().split() == ["[9]", "[1]"] * 2
    assert [turn.repeat for turn in found] == [0, 1]


async def test_an_engine_is_alone_in_memory_in_its_turn(tmp_path: Path) -> None:
    """Each notes when it begins and when it ends."""
    noting = f"""
import json, sys
from pathlib import Path
note = Path({str(tmp_path / "notes")!r}).open("a")
print("begun", file=note, flush=True)
{ECHO}
print("ended", file=note, flush=True)
"""
    found, _ = await compared([engine("one", noting), engine("two", noting)], [1], [[1]])
    assert len(found) == 4
    assert (tmp_path / "notes").read_text().split() == ["begun", "ended"] * 4


def printed(taken: list[Turn]) -> str:
    """The table."""
    console = Console(width=120, file=io.StringIO())
    console.print(table(taken).rich())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_gives_the_median_of_ratios_to_plain_decoding_in_the_same_repeat() -> None:
    rates = {"none": (10, 20, 40), "fast": (30, 40, 60)}
    taken = [
        Turn(name, "Q4_K", "int8", 1, repeat, 1.0, [rate], talon=True)
        for name, by_repeat in rates.items()
        for repeat, rate in enumerate(by_repeat)
    ]
    shown = printed(taken)
    assert "40.0, 30.0-60.0 (2.00x)" in shown and "20.0, 10.0-40.0 (1.00x)" in shown
    assert shown.index("Talon, fast") < shown.index("Talon, plain")


def test_the_table_gives_the_median_of_starts_and_the_most_memory() -> None:
    taken = [
        Turn("none", "Q4_K", "int8", 1, repeat, 1.0, [9], True, start_s, memory_mb)
        for repeat, (start_s, memory_mb) in enumerate([(5.0, 2100.0), (9.0, 2300.0), (6.0, 2200.0)])
    ]
    assert table(taken).rows[0][-2:] == ["6.0", "2300"]
    assert table([Turn("none", "Q4_K", "int8", 1, 0, 1.0, [9])]).rows[0][-2:] == ["-", "-"], "an older run has neither"


def test_an_engine_is_compared_with_plain_decoding_of_the_same_weights_and_activations_alone() -> None:
    ours = [
        Turn("none", "Q4_K", kind, 1, 0, 1.0, [rate], talon=True) for kind, rate in (("bfloat16", 10), ("int8", 20))
    ]
    shown = printed(
        [*ours, Turn("other", "Q4_K", "int8", 1, 0, 1.0, [30]), Turn("third", "F16", "int8", 1, 0, 1.0, [5])]
    )
    assert "30.0 (1.50x)" in shown and "5.0 (" not in shown
    assert shown.count("Q4_K by int8") == 2


def test_engines_that_are_not_installed_come_with_the_line_that_installs_them(tmp_path: Path) -> None:
    found = baselines(tmp_path, Given(lambda: "model", "bfloat16", {}, None, 2, 8))
    assert [one.name for one in found] == list(INSTALL)
    assert all(isinstance(one, Missing) and "pip install" in one.reason for one in found)


def test_an_engine_comes_with_the_version_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy" / "bin").mkdir(parents=True)
    python = tmp_path / "numpy" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(engines, "INSTALL", {"numpy": "numpy"})
    monkeypatch.setattr(engines, "_MAKERS", {"numpy": lambda python, given: [engine("one")]})
    (found,) = baselines(tmp_path, Given(lambda: "model", "bfloat16", {}, None, 2, 8))
    assert isinstance(found, Baseline) and found.package == f"numpy {np.__version__}"


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_weights_keep_their_numbers_in_another_type(tmp_path: Path, kind: str) -> None:
    matrix, vector = np.arange(64, dtype=np.float32).reshape(2, 32), np.arange(32, dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_context_length(128)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("vector", vector)
    write_all(writer)
    reader = gguf.GGUFReader(retype(tmp_path / "small.gguf", tmp_path / "other.gguf", kind))
    assert reader.fields["llama.context_length"].contents() == 128
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert read_gguf(tmp_path / "small.gguf", "model").kind == "F32"
    assert found["matrix"].tensor_type.name == kind and found["vector"].tensor_type.name == "F32"
    for name, numbers in (("matrix", matrix), ("vector", vector)):
        tensor = found[name]
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(numbers.shape), numbers)


CRASHES = """
import http.server, json, os, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({})

    def do_POST(self):
        if "--no-repack" not in sys.argv:
            os._exit(139)
        self.reply({"tokens_predicted": 7})

    def reply(self, body):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


async def test_a_llama_server_that_ends_at_its_first_prompt_is_started_again_without_repacked_weights(
    tmp_path: Path,
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}{CRASHES}")
    program.chmod(0o755)
    command = (sys.executable, str(engines.SCRIPTS / "run_llama_cpp.py"), str(program), "model.gguf", "1", "2")
    process = await Process.start(Baseline("llama.cpp", "Q4_K", "int8", command))
    assert (await process.answer([[1], [2]], 7, 2))[1] == [7, 7]
    await process.stop()
