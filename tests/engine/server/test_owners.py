"""A server of several clients, with a drafter that remembers answers."""

from __future__ import annotations

from typing import Any

import httpx

from tests.engine.server.process import ServerProcess, serving

OPTIONS = ("--served-model-name", "tiny", "--method", "suffix", "--set", "verifier.cut=false")


def retrieved(server: ServerProcess, key: str = "", session: str = "") -> int:
    """How many tokens of one and the same random answer a client is told were retrieved."""
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | ({"X-Session-Id": session} if session else {})
    body: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", headers=headers, json=body | {"return_sources": True})
    sources = [token["source"] for token in answer.raise_for_status().json()["choices"][0]["sources"]]
    assert len(sources) == 60
    return sources.count("retrieval")


def test_a_client_is_drafted_for_from_its_own_earlier_answers_and_from_nobody_elses(tiny: str) -> None:
    with serving("--set", f"model={tiny}", *OPTIONS, TALON_API_KEYS="one,two") as server:
        first, again, other = (retrieved(server, key) for key in ("one", "one", "two"))
    assert again > 40 > max(first, other)


def test_without_keys_only_a_session_is_remembered(tiny: str) -> None:
    with serving("--set", f"model={tiny}", *OPTIONS) as server:
        nobody, again = retrieved(server), retrieved(server)
        first, second, other = (retrieved(server, session=name) for name in ("s", "s", "t"))
    assert second > 40 > max(nobody, again, first, other)


def test_where_answers_are_shared_no_client_is_told_what_was_retrieved(tiny: str) -> None:
    shared = ("--set", "drafter.share_answers=true")
    with serving("--set", f"model={tiny}", *OPTIONS, *shared, TALON_API_KEYS="one,two") as server:
        assert [retrieved(server, key) for key in ("one", "one", "two")] == [0, 0, 0]
