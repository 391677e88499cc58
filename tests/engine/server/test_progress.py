"""How far a long prompt is: in a stream's comments and chunks, on the page, and what an answer took."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.server.figures import metric, until
from tests.engine.server.process import ServerProcess, serving
from tests.engine.weights.tiny_gguf import save_tiny_gguf

LONG = "a long story of a cat, a mat and a hat, which nobody has read so far. " * 8
SHORTER = LONG[:250]
SLOW = ("--set", "verifier.prefill_chunk=64", "--set", "verifier.simulated_latency_ms=450")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that reads 64 tokens of a prompt in half a second."""
    model = save_tiny_gguf(tmp_path_factory.mktemp("slow"), max_position_embeddings=2048)
    options = ("--set", f"model={model}", "--served-model-name", "tiny", "--method", "none", "--log-prompts")
    with serving(*options, *SLOW) as running:
        yield running


def lines(server: ServerProcess, path: str, body: dict[str, Any]) -> list[str]:
    """The lines of a stream."""
    asked = {"model": "tiny", "max_tokens": 2, "stream": True} | body
    with httpx.stream("POST", server.url + path, json=asked, timeout=60) as answer:
        return [line for line in answer.iter_lines() if line]


def chunks(told: list[str]) -> list[dict[str, Any]]:
    """The JSON of a stream's lines."""
    return [json.loads(line[6:]) for line in told if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "1" + LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "2" + LONG}]}),
    ],
)
def test_a_silent_stream_says_how_far_its_prompt_is(slow: ServerProcess, path: str, asked: dict[str, Any]) -> None:
    told = lines(slow, path, asked)
    comments = [line for line in told if line.startswith(":")]
    found = re.match(r": (\d+) of (\d+) tokens of the prompt are read, about (\d+) s to go$", comments[0])
    assert found is not None, comments
    read, total, left = map(int, found.groups())
    assert 0 < read < total and read % 64 == 0 and len(LONG) < total and 0 < left < 30
    assert not any("prompt_progress" in chunk for chunk in chunks(told)), "which only those get that ask for it"


def test_a_silent_stream_of_messages_gets_pings(slow: ServerProcess) -> None:
    found = chunks(lines(slow, "/v1/messages", {"messages": [{"role": "user", "content": "0" + LONG}]}))
    kinds = [chunk["type"] for chunk in found]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-1] == "message_stop", kinds


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "3" + SHORTER}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "4" + SHORTER}]}),
    ],
)
def test_a_stream_has_llama_cpps_events_where_they_are_wanted(
    slow: ServerProcess, path: str, asked: dict[str, Any]
) -> None:
    found = chunks(lines(slow, path, asked | {"return_progress": True}))
    told = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert all(len(chunk["choices"]) == 1 and chunk["choices"][0]["finish_reason"] is None for chunk in found[:-1])
    assert [one["processed"] for one in told] == [*range(0, told[0]["total"] - 1, 64)][: len(told)] and len(told) > 2
    assert all(one["cache"] == 0 and one["processed"] < one["total"] for one in told)
    times, left = [one["time_ms"] for one in told], [one["left_ms"] for one in told]
    assert times == sorted(times) and left == sorted(left, reverse=True)
    timings = found[-1]["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == told[0]["total"] and timings["predicted_n"] == 2
    assert timings["prompt_ms"] > times[-1]


def test_the_page_shows_what_is_being_read(slow: ServerProcess) -> None:
    body = {"prompt": "6" + SHORTER}
    asking = threading.Thread(target=lines, args=(slow, "/v1/completions", body))
    asking.start()
    until(lambda: bool(state(slow)["reading"]))
    [one] = state(slow)["reading"]
    assert one["read"] < one["total"] == 1 + len(SHORTER) and one["left_s"] > 0
    asking.join()
    assert state(slow)["reading"] == []


def state(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/prompts").raise_for_status().json()
    return found


def test_a_date_before_the_tools_is_shown_with_what_it_costs(slow: ServerProcess) -> None:
    for day in ("May 1", "June 12", "August 23"):
        body = {"prompt": f"You help. Today is {day}. {SHORTER}", "max_tokens": 1, "model": "tiny"}
        httpx.post(f"{slow.url}/v1/completions", json=body, timeout=60).raise_for_status()
    [change] = [one for one in state(slow)["changes"] if one["at"] == len("You help. Today is ")]
    assert change["text"] == "August 23" and change["times"] == 2 and change["behind"] == len(f". {SHORTER}")
    assert state(slow)["behind_changes"] == metric(slow, "talon:prompt_tokens_behind_changes_total") > 2 * len(SHORTER)
    told = [line["event"] for line in slow.lines if line["event"].startswith("prefix cache: ")]
    assert sum(f"behind {change['at']} tokens of a prompt 7 differ" in line for line in told) == 1, told


def test_texts_are_shown_only_where_the_log_may_hold_them(server: ServerProcess) -> None:
    for day in ("Monday", "Sunday"):
        body = {"prompt": f"{day}: {SHORTER}", "max_tokens": 1, "model": "tiny"}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert [one["text"] for one in state(server)["changes"] if one["behind"] > 150] == [None]
