"""A server of several clients, with a drafter that remembers answers. Without keys, and where the operator shares
answers, whose a request is and what it is told is seen by test_guard, test_translate and test_render.
"""

from __future__ import annotations

from typing import Any

import httpx

from tests.engine.server.process import ServerProcess, serving


def retrieved(server: ServerProcess, key: str) -> int:
    """How many tokens of one and the same random answer a client is told were retrieved."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/v1/completions", headers=headers, json=body | {"return_sources": True})
    sources = [token["source"] for token in answer.raise_for_status().json()["choices"][0]["sources"]]
    assert len(sources) == 60
    return sources.count("retrieval")


def test_a_client_is_drafted_for_from_its_own_earlier_answers_and_from_nobody_elses(tiny: str) -> None:
    options = ("--set", f"model={tiny}", "--served-model-name", "tiny", "--method", "suffix")
    with serving(*options, "--set", "verifier.cut=false", TALON_API_KEYS="one,two") as server:
        first, again, other = (retrieved(server, key) for key in ("one", "one", "two"))
    assert again > 40 > max(first, other)
