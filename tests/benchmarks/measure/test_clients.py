"""Clients against a server of a tiny model."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console

pytest.importorskip("fastapi")

from benchmarks.measure.arrivals import arrival_times
from benchmarks.measure.clients import _spread, failures, run_clients, table
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from tests.engine.server.process import serving


@pytest.fixture
def questions(tmp_path: Path) -> list[Path]:
    path = tmp_path / "count.jsonl"
    rows = [{"question_id": i, "category": "count", "turns": [f"{i} and {i} and {i}"]} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


def test_every_client_asks_four_times_and_the_refused_are_counted(
    tiny_gguf: str, questions: list[Path], tmp_path: Path
) -> None:
    with serving("--set", f"model={tiny_gguf}", "--method", "pld", "--queue", "2") as server:
        sampling = SamplingParams(max_tokens=30, temperature=1.0)
        levels = asyncio.run(run_clients(server.url, questions, None, [2, 8], [], sampling, tmp_path))
    few, many = levels
    assert len(few.rows) == 8 and not few.refused
    assert len(many.rows) + many.refused[429] == 32 and many.refused[429] > 0
    assert all(0 < row.tokens <= 30 and row.emitted[0][1] == 1 for row in few.rows if len(row.emitted) > 1)
    console = Console(record=True, width=100)
    console.print(table(server.url, levels).rich())
    assert f"{many.refused[429]} x 429" in console.export_text()
    assert len((tmp_path / "clients.jsonl").read_text().splitlines()) == len(few.rows) + len(many.rows)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "does not speak OpenAI's API"),
        *[(url, "is no address") for url in ("http://[::1:9", "http://127.0.0.1:99999", "localhost:8000", "http://")],
    ],
)
def test_what_is_no_server_is_one_line(url: str, said: str, questions: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        asyncio.run(run_clients(url, questions, None, [1], [], SamplingParams(), tmp_path))


CHUNK = b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
BROKEN = b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n'


async def dropped() -> AsyncIterator[bytes]:
    yield CHUNK
    raise httpx.RemoteProtocolError("peer closed connection")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Serve these bodies of answers, one after the other; an exception is raised instead."""

    def serve(*bodies: bytes | AsyncIterator[bytes] | Exception) -> None:
        waiting = iter(bodies)

        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "some"}]})
            assert request.url.path == "/v1/chat/completions"
            if isinstance(body := next(waiting), Exception):
                raise body
            return httpx.Response(200, content=body)

        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(httpx, "AsyncClient", functools.partial(httpx.AsyncClient, transport=transport))

    return serve


def test_answers_that_break_off_are_counted_and_the_others_go_on(
    served: Callable[..., None], questions: list[Path], tmp_path: Path
) -> None:
    served(CHUNK + BROKEN, CHUNK, CHUNK + USAGE, httpx.ReadTimeout(""))
    (level,) = asyncio.run(run_clients("http://some", questions, None, [1], [], SamplingParams(), tmp_path))
    assert level.failed["its stream counts no tokens: it must honour stream_options.include_usage"] == 1
    served(CHUNK + BROKEN, dropped(), httpx.ReadTimeout(""), CHUNK + USAGE)
    (level,) = asyncio.run(run_clients("http://some", questions, None, [1], [], SamplingParams(), tmp_path))
    assert [row.tokens for row in level.rows] == [3]
    assert failures([level]) == [
        "1 at once: 1 failed: out of memory",
        "1 at once: 1 failed: peer closed connection",
        "1 at once: 1 failed: ReadTimeout",
    ]
    assert table("http://some", [level]).rows[0][:4] == ["1 at once", "1", "0", "3"]


@pytest.mark.parametrize("error", ["no room", {"message": "no room"}])
def test_an_error_may_have_the_form_of_any_server(
    served: Callable[..., None], questions: list[Path], tmp_path: Path, error: object
) -> None:
    served(*[b"data: " + json.dumps({"error": error}).encode() + b"\n\n"] * 4)
    (level,) = asyncio.run(run_clients("http://some", questions, None, [1], [], SamplingParams(), tmp_path))
    assert level.failed == {"no room": 4}


def test_rows_are_written_as_levels_end(served: Callable[..., None], questions: list[Path], tmp_path: Path) -> None:
    served(*[CHUNK + USAGE] * 4, OSError("unplugged"))
    with pytest.raises(OSError, match="unplugged"):
        asyncio.run(run_clients("http://some", questions, None, [1, 2], [], SamplingParams(), tmp_path))
    assert len((tmp_path / "clients.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("url", ["http://some", "http://some/", "http://some/v1", "http://some/v1/"])
def test_a_server_is_named_with_or_without_its_version(
    served: Callable[..., None], questions: list[Path], tmp_path: Path, url: str
) -> None:
    served(*[CHUNK + USAGE] * 4)
    (level,) = asyncio.run(run_clients(url, questions, None, [1], [], SamplingParams(), tmp_path))
    assert len(level.rows) == 4


def test_tokens_are_spread_over_chunks() -> None:
    assert _spread(10, 4) == [1, 3, 3, 3] and _spread(3, 1) == [3] and _spread(0, 0) == []


def test_requests_arrive_at_an_average_rate_at_the_same_times_for_every_server(
    served: Callable[..., None], questions: list[Path], tmp_path: Path
) -> None:
    served(*[CHUNK + USAGE] * 80)
    rates = [100.0, 400.0]
    levels = asyncio.run(run_clients("http://some", questions, None, [], rates, SamplingParams(), tmp_path))
    for level, rate in zip(levels, rates, strict=True):
        assert (level.clients, level.per_second) == (None, rate)
        assert len(level.rows) == 40 and {row.arrivals for row in level.rows} == {rate}
        times, asked_s = arrival_times(rate, 40, f"{rate:g}"), sorted(row.asked_s for row in level.rows)
        assert all(asked >= at - 0.001 for asked, at in zip(asked_s, times, strict=True))
    shown = table("http://some", levels).rows[0]
    assert shown[0] == "100 a second" and float(shown[4]) >= float(shown[5]) > 0, "tokens/s, and goodput"


def test_times_of_arrival_are_those_of_the_rate_and_the_same_whenever_they_are_drawn() -> None:
    times = arrival_times(5.0, 4000, "any")
    assert times == sorted(arrival_times(5.0, 4000, "any")) and times != arrival_times(5.0, 4000, "other")
    assert times[-1] == pytest.approx(4000 / 5, rel=0.1)
