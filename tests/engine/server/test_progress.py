"""How far a long prompt is: in a stream's comments and chunks, on the page, and what an answer took."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.server.figures import metric, settle, until
from tests.engine.server.process import ServerProcess, serving
from tests.engine.weights.tiny_gguf import save_tiny_gguf

LONG = "a long story of a cat, a mat and a hat, which nobody has read so far. " * 8
SHORTER = LONG[:250]
SLOW = ("--set", "verifier.prefill_chunk=64", "--set", "verifier.simulated_latency_ms=450")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that reads 64 tokens of a prompt in half a second."""
    model = save_tiny_gguf(tmp_path_factory.mktemp("slow"), max_position_embeddings=2048)
    with serving("--set", f"model={model}", "--served-model-name", "tiny", "--method", "none", *SLOW) as running:
        settle(running)  # what a server does for a first grammar takes rows of the first rounds
        yield running


def state(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/prompts").raise_for_status().json()
    return found


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_silent_stream_says_how_far_its_prompt_is(slow: ServerProcess, path: str) -> None:
    body = {"messages": [{"role": "user", "content": path + LONG}], "max_tokens": 2, "stream": True}
    told = [line for line in slow.post(path, **body).text.splitlines() if line]
    chunks = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
    comments = [line for line in told if line.startswith(":")]
    found = re.match(r": (\d+) of (\d+) tokens of the prompt are read, about (\d+) s to go$", comments[0])
    assert found is not None, comments
    read, total, left = map(int, found.groups())
    assert 0 < read < total and read % 64 == 0 and len(LONG) < total and 0 < left < 30
    assert not any("prompt_progress" in chunk for chunk in chunks), "which only those get that ask for it"
    if path == "/v1/messages":
        kinds = [chunk["type"] for chunk in chunks]
        assert kinds[:2] == ["message_start", "ping"] and kinds[-1] == "message_stop", kinds
    else:
        assert '"role":"assistant"' in told[0] and told[1] == comments[0] and told[-1] == "data: [DONE]"


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
    found = slow.events(path, max_tokens=2, return_progress=True, **asked)
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
    body = {"prompt": "6" + SHORTER, "max_tokens": 1}
    asking = threading.Thread(target=slow.ask, args=("/v1/completions",), kwargs=body)
    asking.start()
    until(lambda: bool(state(slow)["reading"]))
    [one] = state(slow)["reading"]
    assert one["read"] < one["total"] == 1 + len(SHORTER) and one["left_s"] > 0
    asking.join()
    assert state(slow)["reading"] == []


def test_a_date_before_the_tools_is_told_with_what_it_costs_and_without_its_text(server: ServerProcess) -> None:
    """test_changed_text.py sees where its text is shown."""
    for day in ("May 1", "June 12", "August 23"):
        server.ask("/v1/completions", prompt=f"You help. Today is {day}. {SHORTER}", max_tokens=1)
    [change] = [one for one in state(server)["changes"] if one["at"] == len("You help. Today is ")]
    assert change["text"] is None and change["times"] == 2 and change["behind"] == len(f". {SHORTER}")
    assert state(server)["behind_changes"] == metric(server, "talon:prompt_tokens_behind_changes_total")
    assert state(server)["behind_changes"] > 2 * len(SHORTER)
    told = [line["event"] for line in server.lines if line["event"].startswith("prefix cache: ")]
    assert sum(f"behind {change['at']} tokens of a prompt 7 differ" in line for line in told) == 1, told
