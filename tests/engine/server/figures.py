"""Reads what a server's /metrics say."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.server.process import ServerProcess


def metric(server: ServerProcess, name: str, key: str = "") -> float:
    """Return the sum of the samples of that name. key: for a server that wants one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).raise_for_status().text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    assert samples, f"no {name} in /metrics"
    return sum(sample.value for sample in samples)


def tokens(server: ServerProcess, key: str = "") -> float:
    """Return the tokens of all answers so far."""
    return metric(server, "vllm:generation_tokens_total", key)


def refusals(server: ServerProcess) -> int:
    """Return how many requests so far found no place."""
    return sum(line["status"] == 429 for line in server.requests())


def settle(server: ServerProcess, key: str = "") -> None:
    """Wait until nothing runs, nothing waits, and no blocks are held."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "talon:kv_blocks_held")
    until(lambda: not any(metric(server, name, key) for name in names))


def until(holds: Callable[[], bool], within_s: float = 60) -> None:
    """Wait until it holds; the test fails if that takes too long."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s, "it never came true"
        time.sleep(0.05)


def logged(server: ServerProcess, text: str) -> None:
    """Wait until the log says it."""
    until(lambda: any(text in line.get("event", "") for line in server.lines), within_s=10)
