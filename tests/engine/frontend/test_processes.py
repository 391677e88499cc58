"""What is looked at before a worker starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq

from engine.config import load
from engine.frontend.processes import Workers
from engine.wire.keys import create
from engine.wire.keys import load as load_keys
from engine.wire.messages import Stop
from engine.wire.transport import Dealer, Router
from tests.conftest import free_port


def test_a_drafter_that_waits_elsewhere_outlives_the_look_whether_the_port_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys it would be told that its own can never match, and end."""
    create(tmp_path / "keys")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    link = {"transport": "tcp", "tcp.endpoint": endpoint, "tcp.keys": str(tmp_path / "keys"), "tcp.remote": True}
    joined, close = False, Router.close

    def close_once_found(hub: Router) -> None:
        nonlocal joined
        deadline = time.monotonic() + 10
        while not joined and time.monotonic() < deadline:
            joined = line.joined()
        close(hub)

    with zmq.Context() as context:
        line = Dealer(context, endpoint, "drafter", (Stop,), load_keys(tmp_path / "keys", "drafter"))
        monkeypatch.setattr(Router, "close", close_once_found)
        workers = Workers(load({"model": "any", "method": "pld"}, link), context)
        try:
            workers.check()
        finally:
            workers.close()
            line.close()
    assert joined
