"""Shapes of published models with random weights, made tiny."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.measure.profile import loaded
from benchmarks.shapes import __main__ as command
from benchmarks.shapes.forwards import llama_bench
from benchmarks.shapes.random_file import MIXES, write_random
from benchmarks.shapes.served import Server
from benchmarks.shapes.shape import SHAPES, Shape
from benchmarks.shapes.tensors import tensors_of
from engine.config import Config
from engine.core.errors import ConfigError
from engine.model.decoder import LeanDecoder
from tests.forked_process import ForkedProcess

APP = typer.Typer()
APP.command()(command.main)


def tiny(name: str) -> Shape:
    """The shape with four layers of little width, of which the third one attends where not all do."""
    whole = SHAPES[name]
    numbers = {"layers": 4, "hidden": 256, "inner": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 1024}
    if whole.state_heads:
        numbers |= {"groups": min(2, whole.groups), "state_heads": 4, "state_dim": 32, "state_head_dim": 128}
    if whole.architecture.startswith("qwen35"):
        numbers |= {"state_head_dim": 32}
    if whole.experts:
        numbers |= {"experts": 4, "used": 2, "shared": 256 if whole.shared else 0}
    if whole.wide_head_dim:
        numbers |= {"wide_kv_heads": 1, "wide_head_dim": 128}
    attends = whole.attends if whole.architecture != "granitehybrid" else {2}.__contains__
    return replace(whole, attends=attends, **numbers)


def weights(shape: Shape) -> float:
    """Billions of them."""
    return sum(torch.Size(tensor.shape).numel() for tensor in tensors_of(shape)) / 1e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3.5-0.8b", 0.75), ("qwen3.5-4b", 4.2), ("qwen3.5-9b", 8.95), ("qwen3.5-35b-a3b", 34.7),
     ("granite-4.0-h-350m", 0.34), ("gpt-oss-20b", 20.9), ("gemma-4-12b", 11.9), ("llama-3.1-8b", 8.03)],
)  # fmt: skip
def test_a_shape_has_the_published_number_of_weights(name: str, billions: float) -> None:
    assert weights(replace(SHAPES[name], mtp=False)) == pytest.approx(billions, rel=0.02)  # which counts no draft head


@pytest.mark.parametrize(
    ("name", "mix"),
    [
        ("qwen3.5-35b-a3b", "Q4_K_M"),
        ("granite-4.0-h-350m", "Q4_K_M"),
        ("gpt-oss-20b", "Q4_K_M"),
        ("gemma-4-12b", "Q4_K_M"),
        ("llama-3.1-8b", "Q4_K_M"),
        *(pytest.param("llama-3.1-8b", mix, marks=pytest.mark.slow) for mix in ("Q3_K_M", "IQ2_XXS")),
    ],
)
def test_the_lean_decoder_runs_a_file_of_random_weights(name: str, mix: str, tmp_path: Path) -> None:
    write_random(tiny(name), tmp_path / "tiny.gguf", Console(quiet=True), mix)
    target = loaded(Config(model=str(tmp_path / "tiny.gguf")))
    assert isinstance(target.forward, LeanDecoder)
    logits, _ = target.prefill(target.new_cache(64), [*range(40)])
    assert logits.isfinite().all() and logits.std() > 0.01


def test_matrices_are_mixed_as_q4_k_m_mixes_them(tmp_path: Path) -> None:
    write_random(replace(tiny("qwen3.5-0.8b"), layers=8), tmp_path / "tiny.gguf", Console(quiet=True))
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert reader.fields["qwen35.context_length"].types == [gguf.GGUFValueType.UINT32], "as llama.cpp reads it"
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["token_embd.weight"] == "Q6_K" and types["blk.1.ffn_up.weight"] == "Q4_K"
    down = [types[f"blk.{layer}.ffn_down.weight"] for layer in range(8)]
    assert down == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]


def test_numbers_are_about_as_large_in_every_type_of_a_mix(tmp_path: Path) -> None:
    for mix, types in MIXES.items():
        write_random(replace(tiny("llama-3.1-8b"), layers=8), tmp_path / "tiny.gguf", Console(quiet=True), mix)
        tensors = [tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if len(tensor.shape) == 2]
        assert {tensor.tensor_type for tensor in tensors} == {*types.values()}
        for tensor in tensors:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert 0.025 < numbers.std() < 0.055 and abs(numbers.mean()) < 0.005, (mix, tensor.name)


def test_layers_without_a_window_have_wide_heads_whose_keys_are_values(tmp_path: Path) -> None:
    write_random(replace(tiny("gemma-4-12b"), layers=7), tmp_path / "tiny.gguf", Console(quiet=True))
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert reader.fields["gemma4.attention.sliding_window_pattern"].contents() == [True] * 5 + [False] * 2
    assert reader.fields["gemma4.attention.head_count_kv"].contents() == [2] * 5 + [1] * 2
    sizes = {tensor.name: [*map(int, tensor.shape)] for tensor in reader.tensors}
    assert sizes["blk.4.attn_k.weight"] == sizes["blk.4.attn_v.weight"] == [256, 128]
    assert sizes["blk.5.attn_q.weight"] == [256, 512] and sizes["blk.5.attn_k.weight"] == [256, 128]
    assert {"blk.5.attn_v.weight", "blk.6.attn_v.weight"}.isdisjoint(sizes) and sizes["rope_freqs.weight"] == [64]


def test_the_command_writes_a_file_and_measures_it_beside_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Talon itself stands in for the other server."""
    monkeypatch.setitem(command.SHAPES, "tiny", tiny("qwen3.5-0.8b"))
    talon = [sys.executable, "-m", "engine", "serve", "--set", "activations=bfloat16"]
    drafts_of_llama: list[list[str]] = []
    depths_of_talon: list[str] = []

    def start(asked: list[str], *, env: dict[str, str], **_: int) -> ForkedProcess:
        if asked[0] == "llama-server":
            assert asked[1] == "-m" and asked[-2] == "--port"
            drafts_of_llama.append(asked[asked.index("draft-mtp") + 2 : -2] if "draft-mtp" in asked else [])
            asked = [*talon, "--set", f"model={asked[2]}", *asked[-2:]]
        elif "method=mtp" in asked:
            depths_of_talon.extend(part for part in asked if "depth" in part)
        return ForkedProcess(asked, env=env)

    processes = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("benchmarks.shapes.served.subprocess", processes)
    asked = ["tiny", "--out", str(tmp_path), "--tokens", "400", "--repeats", "1", "--llama-server", "llama-server"]
    done = CliRunner().invoke(APP, [*asked, "--set", "activations=bfloat16", "--set", "verifier.kv_type=auto"])
    assert done.exit_code == 0, done.output
    [row] = map(json.loads, (tmp_path / "shapes.jsonl").read_text().splitlines())
    assert (row["shape"], row["weights"], row["layers"]) == ("tiny", "random weights in Q4_K_M", 4)
    for figures in row["figures"].values():
        served, forwards = figures["server"], figures["forwards"]
        for turn in (served["whole"], served["aborted"]):
            assert turn["tokens"] > 300 and 0 < turn["read"] < 160 and turn["seconds"] > 0
        assert served["memory_mb"] > 10 and min(served["start_s"]) > 0, "a forked server shares most of its memory"
        assert [*figures["rounds"]] == ["1", "2", "3"] and min(figures["rounds"].values()) > 0
        assert forwards is None or (forwards["token_ms"] > 0 and [*forwards["tree_ms"]] == ["8", "16", "32"])
    assert row["figures"]["llama.cpp"]["forwards"] is None and "second turn" in done.output
    assert drafts_of_llama == [[], [], ["1"], ["2"], ["3"]]
    assert depths_of_talon == [f"drafter.growth.depth={drafts}" for drafts in (1, 2, 3)]


def test_a_round_is_what_an_answer_took_by_its_tokens_without_the_first_and_those_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timings = {"predicted_n": 65, "predicted_ms": 500.0, "draft_n_accepted": 14}
    monkeypatch.setattr(Server, "_ask", lambda *_, **__: io.BytesIO(json.dumps({"timings": timings}).encode()))
    assert Server(["none"]).round_ms() == 10.0


def test_a_file_of_ones_own_is_measured_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random(tiny("llama-3.1-8b"), tmp_path / "own.gguf", Console(quiet=True))
    monkeypatch.setattr(command, "serve", lambda asked, tokens: None)
    done = CliRunner().invoke(APP, [str(tmp_path / "own.gguf"), "--out", str(tmp_path / "out"), "--repeats", "1"])
    assert done.exit_code == 0, done.output
    row = json.loads((tmp_path / "out" / "shapes.jsonl").read_text())
    assert (row["shape"], row["layers"]) == ("own", None) and "Q4_K" in row["weights"] and "own, 0.0 GB" in done.output
    refused = CliRunner().invoke(APP, [str(tmp_path / "own.gguf"), "--layers", "3", "--out", str(tmp_path / "none")])
    assert refused.exit_code == 2 and not [*(tmp_path / "none").glob("*")]


def test_an_unknown_shape_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["llama", "--out", str(tmp_path)])
    assert done.exit_code == 2 and not [*tmp_path.iterdir()]
    done = CliRunner().invoke(APP, ["llama-3.1-8b", "--mix", "Q1", "--out", str(tmp_path)])
    assert done.exit_code == 2 and not [*tmp_path.iterdir()]


def test_what_llama_bench_prints_is_read_and_its_failure_is_told(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(
        '#!/bin/sh\necho \'[{"n_prompt":512,"n_gen":0,"avg_ts":200.0},{"n_prompt":0,"n_gen":32,"avg_ts":20.0}]\'\n'
    )
    program.chmod(0o755)
    found = llama_bench(program, tmp_path / "file.gguf", 2, 1)
    assert (found.token_ms, found.prompt_tokens_per_s) == (50.0, 200.0)
    program.write_text("#!/bin/sh\necho unknown model >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"--llama-bench .*unknown model"):
        llama_bench(program, tmp_path / "file.gguf", 2, 1)
