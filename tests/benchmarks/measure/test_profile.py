"""The profile of a tiny model: its parts add up, and everything that is watched is left as it was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cli.studies import profile
from benchmarks.kernels.arithmetic import loop_of_integers, loop_of_type, multiply_adds_per_s
from benchmarks.measure import forward_parts as parts
from benchmarks.measure.forward_parts import PARTS, Clock, forward_name, multiplied, split
from benchmarks.measure.machine_limits import READ, Limits, read_kernel
from benchmarks.measure.profile import Profile, profile_target, table
from engine.core.batch import Segment
from engine.core.tree import TokenTree
from engine.kernels.threads import Kernel, address_of
from engine.model.masked import MaskedForward
from engine.model.stock import StockForward
from engine.model.target import Target
from tests.engine.tiny_families import build

APP = typer.Typer()
APP.command()(profile)


@pytest.fixture(scope="module")
def profiled(tiny: str) -> Profile:
    target = Target.load(tiny, "float32", "cpu")
    return profile_target(target, [1, 4], behind=20, repeats=2, console=Console(quiet=True))


def test_the_parts_of_a_forward_add_up_to_it(profiled: Profile) -> None:
    for forward in profiled.forwards:
        assert sum(getattr(forward, f"{part}_ms") for part in PARTS) == pytest.approx(forward.total_ms)
        assert min(getattr(forward, f"{part}_ms") for part in PARTS) >= 0
        assert min(forward.products_ms, forward.attention_ms, forward.gaps_ms) > 0
        assert forward.memory_ms > 0 and 0 <= forward.outside < 1
    one, four = profiled.forwards  # arithmetic grows with the rows, and memory does not
    assert four.arithmetic_ms == pytest.approx(4 * one.arithmetic_ms)
    assert four.memory_ms == one.memory_ms


def test_both_limits_of_arithmetic_are_measured_here(profiled: Profile) -> None:
    loops = [loop for loop in (loop_of_type(torch.float32), loop_of_integers()) if loop is not None]
    assert all(multiply_adds_per_s(loop) > 1e8 for loop in loops)
    assert profiled.multiply_adds_per_s > 1e8
    if loop_of_integers() is not None:
        assert profiled.int8_multiply_adds_per_s is not None
        one, four = profiled.forwards
        assert one.int8_ms is not None and four.int8_ms == pytest.approx(4 * one.int8_ms)


def test_the_table_fits_eighty_columns(profiled: Profile) -> None:
    console = Console(width=80)
    for forward in profiled.forwards:
        forward.total_ms, forward.products_ms, forward.arithmetic_ms = 12345.6, 12340.1, 1234.5
        forward.int8_ms = 1234.5
    with console.capture() as captured:
        console.print(table(profiled).rich())
    assert "…" not in captured.get() and "float32" in captured.get()


def test_a_call_within_a_call_counts_for_its_own_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(parts.time, "perf_counter", lambda: next(now))
    clock = Clock()
    inner = clock.around("attention", lambda: None)
    clock.around("other", inner)()
    assert clock.seconds() == {"products": 0.0, "attention": 2.0, "other": 8.0}


def forward_of(target: Target, rows: int = 3) -> Any:
    cache = target.new_cache(40)
    target.prefill(cache, [5, 6, 7])
    segment = Segment.of_tree(TokenTree.chain(1, [2] * (rows - 1), [1.0] * (rows - 1)), cache)
    return lambda: target.run([segment])


@pytest.mark.parametrize("family", ["llama", "phi with norms of heads"])
def test_watching_leaves_the_forward_as_it_was(family: str) -> None:
    target = Target.of_model(build(family, "float32"), family)
    before = Kernel.__call__
    seconds = split(target, forward_of(target))
    assert Kernel.__call__ is before
    assert parts.Product.__call__.__qualname__ == "Product.__call__"
    assert set(seconds) == set(PARTS) and seconds["products"] > 0 and seconds["attention"] > 0


def test_a_stock_forward_and_one_with_masks_are_told_apart_and_split() -> None:
    target = Target.of_model(build("phi with norms of heads", "float32"), "phi with norms of heads")
    assert isinstance(target.forward, StockForward)
    assert forward_name(target) == "stock forward with exact attention"
    masked = Target.of_model(build("phi with norms of heads", "float32"), "phi with norms of heads")
    masked.model.set_attn_implementation("sdpa")
    masked.forward, masked.pool = MaskedForward(masked.model, "phi with norms of heads"), None
    assert forward_name(masked) == "stock forward with masks"
    assert split(masked, forward_of(masked))["attention"] > 0


@pytest.mark.parametrize("family", ["llama", "phi with norms of heads"])
def test_the_numbers_multiplied_are_those_of_all_matrices_but_the_embedding(family: str) -> None:
    model = build(family, "float32")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    expected = sum(w.numel() for w in model.parameters() if w.dim() > 1 and id(w) not in tables)
    assert multiplied(Target.of_model(model, family)) == expected


def test_limits_keep_the_best_rates_seen() -> None:
    limits = Limits(1 << 16, torch.float32, torch.device("cpu"))
    limits.measure()
    first = limits.bytes_per_s, limits.multiply_adds_per_s
    limits.measure()
    assert min(first) > 0 and limits.bytes_per_s >= first[0] and limits.multiply_adds_per_s >= first[1]


@pytest.mark.parametrize("threads", [1, 2])
def test_every_line_is_read_once(threads: int) -> None:
    buffer, sums, record = torch.ones(1003, 16), np.zeros((2, 16), np.float32), np.zeros(1, READ)
    record[0] = buffer.data_ptr(), len(buffer), sums.ctypes.data
    torch.set_num_threads(threads)
    read_kernel()(address_of(record), 2)
    assert (sums.sum(axis=0) == len(buffer)).all()


def test_the_command_prints_json(tiny: str) -> None:
    options = ["--rows", "1,2", "--behind", "16", "--repeats", "1", "--set", f"model={tiny}"]
    done = CliRunner().invoke(APP, [*options, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [forward["rows"] for forward in found["forwards"]] == [1, 2] and found["behind"] == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "1,x"], "talon: --rows 1,x: give numbers from 1 to 1024"),
        (["--rows", "0"], "talon: --rows 0: give numbers"),
        (["--behind", "511", "--rows", "8"], "talon: --behind 511: with 8 rows it exceeds the model's 512 positions"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], said: str, tiny: str) -> None:
    done = CliRunner().invoke(APP, ["--set", f"model={tiny}", *options])
    assert done.exit_code == 2
    assert done.stderr.strip().splitlines()[-1].startswith(said)
