"""Clients against a server of a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("fastapi")

from benchmarks.clients import _spread, run_clients, table
from engine.errors import ConfigError
from engine.sampling import SamplingParams
from tests.engine.server.process import serving


@pytest.fixture
def questions(tmp_path: Path) -> list[Path]:
    path = tmp_path / "count.jsonl"
    rows = [{"question_id": i, "category": "count", "turns": [f"{i} and {i} and {i}"]} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


def test_every_client_asks_four_times_and_the_refused_are_counted(
    tiny: str, questions: list[Path], tmp_path: Path
) -> None:
    with serving("--set", f"model={tiny}", "--method", "pld", "--queue", "2") as server:
        sampling = SamplingParams(max_tokens=30, temperature=1.0)
        levels = asyncio.run(run_clients(server.url, questions, None, [2, 8], sampling, tmp_path))
    few, many = levels
    assert len(few.rows) == 8 and not few.refused
    assert len(many.rows) + many.refused[429] == 32 and many.refused[429] > 0
    assert all(0 < row.tokens <= 30 and row.emitted[0][1] == 1 for row in few.rows if len(row.emitted) > 1)
    console = Console(record=True, width=100)
    console.print(table(server.url, levels).rich())
    assert f"{many.refused[429]} x 429" in console.export_text()
    assert len((tmp_path / "clients.jsonl").read_text().splitlines()) == len(few.rows) + len(many.rows)


def test_what_is_no_server_is_one_line(questions: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not speak OpenAI's API"):
        asyncio.run(run_clients("http://127.0.0.1:9", questions, None, [1], SamplingParams(), tmp_path))


def test_tokens_are_spread_over_chunks() -> None:
    assert _spread(10, 4) == [1, 3, 3, 3] and _spread(3, 1) == [3] and _spread(0, 0) == []
