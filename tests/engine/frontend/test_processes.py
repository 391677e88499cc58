"""What is looked at before a worker starts, and when it counts as dead."""

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


class Hanging:
    """A worker that lives and says nothing."""

    name = "verifier-1"

    def alive(self) -> bool:
        return True

    def end(self, timeout_s: float) -> None: ...


def test_of_a_silence_only_the_time_in_which_nobody_listened_is_forgiven() -> None:
    with zmq.Context() as context:
        workers = Workers(load({"model": "any", "method": "none"}, {"transport": "inproc"}), context)
    workers.running, workers.heard_s = {"verifier": Hanging()}, {"verifier": 100.0}
    for now_s in (120.0, 140.0):
        workers.forgive_silence(1.0, now_s)
        assert (workers.dead("verifier", 30.0, now_s) is None) == (now_s < 132)
    workers.heard_s["verifier"] = 139.9
    workers.forgive_silence(1.0, 140.0)
    assert workers.dead("verifier", 2.0, 142.5) == "was silent for 2 s", "nobody is heard in the future"
