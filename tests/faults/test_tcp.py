"""A drafter over tcp: beside the engine or started by hand, known or a stranger, there or gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
import zmq

from engine import Engine
from engine.core.errors import ConfigError
from engine.wire.keys import create, load
from engine.wire.messages import Hello, Start, encode
from engine.wire.transport import Dealer
from tests.conftest import free_port
from tests.faults.test_faults import LONG, PROMPT, _own_temporary_folder, drafts_arrive, expected_text, pid_of, replaced
from tests.forked_process import ForkedProcess

__all__ = ["_own_temporary_folder"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create(tmp_path / "keys")
    return tmp_path / "keys"


@asynccontextmanager
async def tcp_engine(model: str, keys: Path, **overrides: Any) -> AsyncIterator[Engine]:
    """An engine whose verifier waits on a free port, with forwards long enough for drafts to arrive."""
    settings = {
        "transport": "tcp",
        "tcp.endpoint": f"tcp://127.0.0.1:{free_port()}",
        "tcp.keys": str(keys),
        "verifier.cut": False,
        "verifier.threads": 1,
        "verifier.simulated_latency_ms": 1,
    }
    async with await Engine.start({"model": model}, **settings | overrides) as engine:
        yield engine


@asynccontextmanager
async def drafter_process(model: str, method: str, endpoint: str, keys: Path) -> AsyncIterator[ForkedProcess]:
    """`talon drafter`, as a person on another machine would start it."""
    config = keys.parent / "drafter.yaml"
    config.write_text(yaml.safe_dump({"model": model, "method": method}))
    command = [sys.executable, "-m", "engine", "drafter", "--config", str(config), "--connect", endpoint]
    process = ForkedProcess([*command, "--keys", str(keys)], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("method", ["pld", pytest.param("sps", marks=pytest.mark.slow)])
async def test_the_text_over_tcp_is_that_of_plain_decoding(tiny: str, keys: Path, method: str) -> None:
    expected = await expected_text(tiny)
    async with tcp_engine(tiny, keys, method=method, mode="async", **{"drafter.path": tiny}) as engine:
        await drafts_arrive(engine, expected)


async def test_without_keys_tcp_is_refused_unless_told_to(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"^tcp\.keys: transport tcp needs keys; run: talon keys DIR"):
        await Engine.start({"model": tiny}, transport="tcp")
    expected = await expected_text(tiny)
    async with tcp_engine(tiny, Path(), method="pld", **{"tcp.keys": None, "tcp.insecure": True}) as engine:
        await drafts_arrive(engine, expected)


async def test_a_drafter_started_by_hand_drafts_and_joins_again_when_the_verifier_is_back(
    tiny: str, keys: Path
) -> None:
    expected = await expected_text(tiny)
    async with tcp_engine(tiny, keys, method="pld", **{"tcp.remote": True}) as engine:
        assert list(engine._workers.running) == ["verifier"]
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected  # nobody drafts yet
        async with drafter_process(tiny, "pld", engine.config.tcp.endpoint, keys):
            await drafts_arrive(engine, expected)
            first = pid_of(engine, "verifier")
            os.kill(first, signal.SIGKILL)
            await replaced(engine, "verifier", first)
            await drafts_arrive(engine, expected)
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected  # it is gone
        async with drafter_process(tiny, "pld", engine.config.tcp.endpoint, keys):
            await drafts_arrive(engine, expected)


async def test_a_drafter_with_an_unknown_key_is_told_so_and_changes_nothing(
    tiny: str, keys: Path, tmp_path: Path
) -> None:
    expected = await expected_text(tiny)
    create(tmp_path / "theirs")
    shutil.copy(keys / "verifier.key", tmp_path / "theirs")
    async with tcp_engine(tiny, keys, method="pld", **{"tcp.remote": True}) as engine:
        endpoint = engine.config.tcp.endpoint
        async with drafter_process(tiny, "pld", endpoint, tmp_path / "theirs") as stranger:
            assert await asyncio.to_thread(stranger.wait, 60) == 2
            assert stranger.stderr is not None
            assert "does not let this drafter in; put its drafter.key" in stranger.stderr.read().splitlines()[-1]
        with plain_client(endpoint) as liar:
            liar.send_multipart(encode(Hello()))
            result = await engine.generate(PROMPT, LONG)
            assert not liar.poll(0)  # no Start: the prompt stays private
    assert result.token_ids == expected
    assert result.metrics.mean_accepted_tokens == 1


async def test_strangers_and_a_second_engine_at_the_port_change_nothing_under_load(
    tiny: str, keys: Path, tmp_path: Path
) -> None:
    expected = await expected_text(tiny)
    create(tmp_path / "theirs")
    ours, theirs = load(keys, "drafter"), load(tmp_path / "theirs", "drafter")
    wrong = [theirs._replace(verifier=ours.verifier), ours._replace(verifier=theirs.verifier), None]
    async with tcp_engine(tiny, keys, method="pld") as engine:
        endpoint, before = engine.config.tcp.endpoint, [pid_of(engine, role) for role in ("verifier", "drafter")]
        await drafts_arrive(engine, expected)
        asked = [asyncio.create_task(engine.generate(PROMPT, LONG)) for _ in range(8)]
        with zmq.Context() as context, contextlib.ExitStack() as open_files:
            strangers = [Dealer(context, endpoint, f"drafter-{n}", (Start,), wrong[n % 3]) for n in range(12)]
            for stranger in strangers:
                open_files.callback(stranger.close)
                stranger.send(Hello())
            for _ in range(20):
                raw = open_files.enter_context(socket.create_connection(("127.0.0.1", int(endpoint.split(":")[2]))))
                raw.sendall(os.urandom(256))
            running = children()
            with pytest.raises(ConfigError, match=f"^tcp.endpoint={endpoint}: cannot be bound: .*name another$"):
                await Engine.start(engine.config)
            assert children() <= running
            assert [(await answer).token_ids for answer in asked] == [expected] * 8
            assert not any(list(stranger.received()) for stranger in strangers)
        await drafts_arrive(engine, expected)
        assert [pid_of(engine, role) for role in ("verifier", "drafter")] == before


def plain_client(endpoint: str) -> zmq.Socket[bytes]:
    """A peer that has no keys at all."""
    client = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(endpoint)
    return client


def children() -> set[int]:
    """Processes that this one and its own have started."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
