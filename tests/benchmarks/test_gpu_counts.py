"""What a round does on CUDA, counted on a device without memory, in a process of its own: the device stays for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

Record = dict[str, Any]
LAYERS = 6  # not 32, each of which takes the same to trace
HEADS = ("eagle3", "eagle", "block", "medusa", "hydra")
SERVED = ("eagle3, as served, T=0", "block, as served, T=1")
BEHIND = ("eagle3, T=0", "eagle3, T=1", "eagle, dynamic, T=0", "block, T=0", *SERVED)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.step", "counts", "cpu", str(LAYERS)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        input="go\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(records: list[Record], check: str) -> list[Record]:
    return [record for record in records if record["check"] == check]


def test_everything_is_captured_without_a_wait_and_on_one_device(records: list[Record]) -> None:
    """Either would be an error where the work is traced."""
    assert [record for record in records if "failed" in record] == []


def test_a_lean_layer_is_ten_kernels(records: list[Record]) -> None:
    (target,) = of(records, "target")
    assert target["kernels_a_layer"] == 10
    assert target["kernels"] < 10 * LAYERS + 10


@pytest.mark.parametrize("check", sorted({*(f"{head}, T=0" for head in HEADS), *BEHIND}))
def test_a_round_of_many_requests_waits_as_often_as_of_one_and_takes_hardly_more_launches(
    check: str, records: list[Record]
) -> None:
    """The rows of several requests are joined once a draft step; keys and values are moved for all of them at once."""
    one, *more = of(records, check)
    assert one["waits"]["receipt"] == 1, "all comes in one receipt"
    for record in more:
        assert sum(record["waits"].values()) == sum(one["waits"].values())
        assert record["a_draft_step"]["waits"] <= one["a_draft_step"]["waits"]
        assert record["a_draft_step"]["launches"] <= one["a_draft_step"]["launches"] + 1
        assert record["launches"] <= one["launches"] + one["draft_steps"] + 3
    if check in BEHIND:  # drafted behind the walk down the trees before
        assert all(record["draft_steps"] == 1 and record["waits"]["draft"] == 0 for record in (one, *more))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_plain_round_is_launched_before_the_one_before_it_is_read_and_waits_once(
    temperature: int, records: list[Record]
) -> None:
    """The first would be an error; among the rounds that are counted, each request fills a block."""
    one, *more = of(records, f"plain, T={temperature}")
    assert all(record["waits"] == {"draft": 0, "receipt": 1} for record in (one, *more))
    assert max(record["launches"] for record in more) <= one["launches"] + 2


def test_a_table_shows_all_rounds(records: list[Record]) -> None:
    (table,) = of(records, "table")
    head, _, *rows = table["table"]
    assert head.startswith("| | requests | launches | waits: draft |")
    assert len(rows) == sum("waits" in record for record in records) == 3 * (len(HEADS) + 7) + 2


def test_hidden_states_of_accepted_rows_alone_come_to_the_host_and_none_within_a_process(records: list[Record]) -> None:
    """All rows of 32 requests would be 47 MB. The states of three rows of a request take 74 kB; within a process, the
    rows' numbers, tokens and chances are sent instead.
    """
    within, between = of(records, "eagle3, T=0"), of(records, "eagle3, T=0, ipc")
    assert len(between) == 3 and max(record["bytes_down"] for record in between) < 4e6
    for here, there in zip(within, between, strict=True):
        assert there["bytes_up"] - here["bytes_up"] > 70e3 * here["requests"]
        assert max(here["bytes_up"], here["bytes_down"]) < 30e3 * here["requests"]
        assert (sum(here["waits"].values()), sum(there["waits"].values())) == (1, 2)


def test_a_prompt_is_read_by_the_head_without_passing_the_host(records: list[Record]) -> None:
    """Hidden states of 512 positions are 12.6 MB each way."""
    (within,), (between,) = of(records, "eagle3, a prompt"), of(records, "eagle3, a prompt, ipc")
    assert max(within["bytes_up"], within["bytes_down"]) < 1e5
    assert min(between["bytes_up"], between["bytes_down"]) > 12e6
    assert within["waits"] == between["waits"] == {"draft": 1, "receipt": 1}
