"""A server that is started again with a cache folder."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from tests.engine.server.figures import until
from tests.engine.server.process import ServerProcess, serving

FIRST = {"role": "user", "content": "Tell me of the cat that sat on the mat, and of the dog that ate the hat. " * 2}
SECOND = {"role": "user", "content": "And then?"}


def ask(server: ServerProcess, messages: list[dict[str, Any]], key: str = "one", session: str = "") -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were found in a cache."""
    headers = {"Authorization": f"Bearer {key}"} | ({"X-Session-Id": session} if session else {})
    body = {"model": "tiny", "messages": messages, "max_tokens": 40, "seed": 5, "ignore_eos": True}
    before = hits(server, headers)
    answer = httpx.post(f"{server.url}/v1/chat/completions", headers=headers, json=body, timeout=60)
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text, hits(server, headers) - before


def hits(server: ServerProcess, headers: dict[str, str]) -> int:
    """Tokens of all prompts that were found."""
    text = httpx.get(f"{server.url}/metrics", headers=headers).raise_for_status().text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return int(float(line.split()[-1]))


def options(model: str, cache: Path) -> list[str]:
    return ["--set", f"model={model}", "--served-model-name", "tiny", "--method", "suffix", "--cache", str(cache)]


def test_a_conversation_goes_on_after_a_restart_for_its_own_key_alone(tiny: str, tmp_path: Path) -> None:
    with serving(*options(tiny, tmp_path), TALON_API_KEYS="one,two") as server:
        first, cached = ask(server, [FIRST])
        assert cached == 0 and server.end() == 0
    turn = [FIRST, {"role": "assistant", "content": first}, SECOND]
    with serving(*options(tiny, tmp_path), TALON_API_KEYS="one,two") as server:
        other, others = ask(server, turn, "two")
        again, cached = ask(server, turn, "one", "a session")
        until(lambda: len(server.requests()) > 2)
    assert others == 0 and cached >= len(FIRST["content"]) // 16 * 16 and again == other
    told = [line["cached_tokens"] for line in server.requests() if line["path"] == "/v1/chat/completions"]
    assert told == [others, cached], "the log says it of each request"


def test_a_server_killed_while_it_writes_leaves_nothing_that_changes_a_text(
    tiny: str, tmp_path: Path, server: ServerProcess
) -> None:
    prompts = [[{**FIRST, "content": f"{number} {FIRST['content']}"}] for number in range(4)]
    plain = [ask(server, prompt)[0] for prompt in prompts]  # it has no folder
    for _ in range(2):
        with serving(*options(tiny, tmp_path)) as kept:
            assert [ask(kept, prompt)[0] for prompt in prompts] == plain
            kept.end(signal.SIGKILL)
    assert [*(tmp_path / "blocks").glob("*.talon")]
