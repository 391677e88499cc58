from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.wire import aside
from engine.wire.aside import OnDevice
from engine.wire.keys import Keys, create, load
from engine.wire.messages import Heartbeat, Hello, RoundVerdict, Start, Stop, encode
from engine.wire.transport import Dealer, Router
from tests.conftest import free_port

Pair = tuple[Router, Dealer]


@pytest.fixture(params=["inproc", "ipc", "tcp", "tcp with keys"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    endpoints = {"inproc": "inproc://meeting", "ipc": f"ipc://{tmp_path}/meeting"}
    endpoint = endpoints.get(request.param) or f"tcp://127.0.0.1:{free_port()}"
    keys: list[Keys | None] = [None, None]
    if request.param == "tcp with keys":
        create(tmp_path / "keys")
        keys = [load(tmp_path / "keys", "verifier"), load(tmp_path / "keys", "drafter")]
    with zmq.Context() as context:
        router = Router(context, endpoint, (Hello, Heartbeat), keys[0])
        line = Dealer(context, endpoint, "peer", (Stop,), keys[1])
        yield router, line
        router.close()
        line.close()


def await_arrivals(source: Any, count: int) -> list[Any]:
    arrived: list[Any] = []
    deadline = time.monotonic() + 10
    while len(arrived) < count and time.monotonic() < deadline:
        arrived += source.received()
    return arrived


def test_messages_come_in_order_with_their_senders_name(pair: Pair) -> None:
    router, line = pair
    line.send(Hello(feature_layers=(1,)))
    line.send(Heartbeat())
    arrived = await_arrivals(router, 2)
    assert [(name, message) for name, message, _ in arrived] == [
        ("peer", Hello(feature_layers=(1,))),
        ("peer", Heartbeat()),
    ]


def test_the_hub_answers_a_peer_by_name(pair: Pair) -> None:
    router, line = pair
    line.send(Heartbeat())
    await_arrivals(router, 1)
    router.send("peer", Stop())
    assert await_arrivals(line, 1) == [(Stop(), [])]


def test_malformed_messages_are_counted_and_dropped(pair: Pair) -> None:
    router, line = pair
    for garbage in ([b""], [b"\xff\xff"], [b"a", b"b", b"c"]):
        line.socket.send_multipart(garbage)
    line.send(Heartbeat())
    assert [message for _, message, _ in await_arrivals(router, 1)] == [Heartbeat()]
    assert router.malformed == 3


def test_sending_to_a_peer_that_is_gone_neither_blocks_nor_fails(pair: Pair) -> None:
    router, _ = pair
    for _ in range(100):
        router.send("nobody", Stop())


class Numbers(OnDevice):
    """Numbers on a device, which only one who takes them has."""

    def take(self) -> list[int]:
        return [id(self)]


VERDICT = RoundVerdict(request=1, round=1, draft=0)
PATH = [np.asarray([at], np.int32) for at in range(2)]
PATH += [np.zeros((0, 0), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)]


def test_within_a_process_numbers_on_a_device_are_handed_over_and_bytes_are_sent() -> None:
    given = [Numbers(), Numbers()]
    with zmq.Context() as context:
        router = Router(context, "inproc://meeting", (Hello,), unread=8)
        line = Dealer(context, "inproc://meeting", "peer", (RoundVerdict,))
        line.send(Hello())
        await_arrivals(router, 1)
        for numbers in given:
            router.send("peer", VERDICT, [*PATH, numbers])
        router.send("peer", VERDICT, [*PATH, np.ones((1, 1, 2), np.uint16)])
        arrived = await_arrivals(line, 3)
        router.close()
        line.close()
    assert not aside._waiting and router.in_process
    assert [arrays[-1] for _, arrays in arrived[:2]] == [[id(one)] for one in given]
    assert [[part.tolist() for part in arrays[:2]] for _, arrays in arrived] == [[[0], [1]]] * 3
    assert arrived[2][1][-1].tolist() == [[[1, 1]]]


def test_numbers_whose_message_is_not_sent_or_not_read_are_held_no_longer() -> None:
    with zmq.Context() as context:
        router = Router(context, "inproc://meeting", (Hello,), unread=2)
        assert router.send("nobody", VERDICT, [*PATH, Numbers()]) and not aside._waiting
        lines = [Dealer(context, "inproc://meeting", name, (RoundVerdict,), unread=2) for name in ("one", "two")]
        for line in lines:
            line.send(Hello())
        await_arrivals(router, 2)
        sent = 0
        while sent < 500 and router.send("one", VERDICT, [*PATH, Numbers()]):
            sent += 1
        assert 2 <= sent < 500 and len(aside._waiting) == sent
        router.send("two", VERDICT, [*PATH, Numbers()])
        assert len(aside._waiting) == 1, "the first one is gone"
        assert [*lines[0].received()] == [] and lines[0].malformed == sent
        router.close()
        assert not aside._waiting
        for line in lines:
            line.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_between_processes_a_message_has_no_third_frame(transport: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/x" if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        router = Router(context, endpoint, (Hello,))
        line = Dealer(context, endpoint, "peer", (RoundVerdict,))
        line.send(Hello())
        await_arrivals(router, 1)
        frames = encode(VERDICT, [*PATH, np.zeros((0, 0, 0), np.uint16)])
        router.socket.send_multipart([b"peer", *frames, b"1"])
        router.socket.send_multipart([b"peer", *frames])
        assert len(await_arrivals(line, 1)) == 1 and line.malformed == 1 and not router.in_process
        router.close()
        line.close()


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_a_hub_refuses_to_send_to_a_peer_that_leaves_too_much_unread(transport: str, tmp_path: Path) -> None:
    endpoints = {"inproc": "inproc://x", "ipc": f"ipc://{tmp_path}/x", "tcp": f"tcp://127.0.0.1:{free_port()}"}
    endpoint = endpoints[transport]
    message, text = Start(request=1, round=0, sampling=SamplingParams()), np.zeros(1 << 16, np.int32)
    with zmq.Context() as context:
        router = Router(context, endpoint, (Hello,), unread=8)
        line = Dealer(context, endpoint, "peer", (Start,), unread=8)
        line.send(Hello())
        await_arrivals(router, 1)
        sent = 0
        while sent < 500 and router.send("peer", message, [text]):
            sent += 1
        assert 8 <= sent < 500
        assert len(await_arrivals(line, sent)) == sent
        deadline = time.monotonic() + 10
        while not (sends_again := router.send("peer", message, [text])) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sends_again
        router.close()
        line.close()


def test_a_line_joins_once_for_every_hub_it_finds() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        line = Dealer(context, endpoint, "peer", (Stop,))
        assert not line.joined()
        for _ in range(2):
            with zmq.Context() as its_own:  # whose end waits until the port is free again
                router = Router(its_own, endpoint, (Hello,))
                deadline = time.monotonic() + 10
                while not (joined := line.joined()) and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert joined and not line.joined()
                line.send(Hello())
                assert len(await_arrivals(router, 1)) == 1
                router.close()
        line.close()


def test_a_line_with_another_key_is_not_let_in(tmp_path: Path) -> None:
    create(tmp_path / "ours")
    create(tmp_path / "theirs")
    ours, theirs = load(tmp_path / "ours", "verifier"), load(tmp_path / "theirs", "drafter")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        router = Router(context, endpoint, (Hello,), ours)
        stranger = Dealer(context, endpoint, "stranger", (Stop,), theirs._replace(verifier=ours.public))
        stranger.send(Hello())
        with pytest.raises(ConfigError, match=r"does not let this drafter in; put its drafter\.key"):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not stranger.joined():
                time.sleep(0.01)
        assert not list(router.received())
        stranger.close()
        router.close()


@pytest.mark.parametrize(
    ("verifier", "drafter", "told"),
    [
        ("ours", "mixed", "has another key than this drafter's verifier.key"),
        ("ours", None, "goes with keys and this drafter without, or the reverse"),
        (None, "ours", "goes with keys and this drafter without, or the reverse"),
    ],
)
def test_a_link_whose_ends_hold_different_keys_is_told_instead_of_tried_for_ever(
    tmp_path: Path, verifier: str | None, drafter: str | None, told: str
) -> None:
    create(tmp_path / "ours")
    create(tmp_path / "theirs")
    ours = load(tmp_path / "ours", "drafter")
    keys = {"ours": ours, "mixed": ours._replace(verifier=load(tmp_path / "theirs", "drafter").verifier), None: None}
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        router = Router(context, endpoint, (Hello,), load(tmp_path / verifier, "verifier") if verifier else None)
        line = Dealer(context, endpoint, "peer", (Stop,), keys[drafter])
        with pytest.raises(ConfigError) as error:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not line.joined():
                time.sleep(0.01)
        assert str(error.value).startswith(f"tcp.keys: {endpoint} {told}; ")
        line.close()
        router.close()


def test_a_taken_port_is_told_in_one_line() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        first = Router(context, endpoint, (Hello,))
        with pytest.raises(ConfigError, match=f"^tcp.endpoint={endpoint}: cannot be bound: address already in use; "):
            Router(context, endpoint, (Hello,))
        first.close()


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A socket's folder that a cleaner of temporary files removed, and that others can write to since."""
    folder = tmp_path / "talon-1"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_a_folder_that_is_not_ours_alone_is_refused_by_both_sides(taken: Path) -> None:
    with zmq.Context() as context:
        for side in (
            lambda: Router(context, f"ipc://{taken}/x", ()),
            lambda: Dealer(context, f"ipc://{taken}/x", "a", ()),
        ):
            with pytest.raises(ConfigError, match=r"^TMPDIR: .*talon-1 is not a folder of this user alone; remove it"):
                side()


def test_a_link_to_a_folder_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    with zmq.Context() as context, pytest.raises(ConfigError, match="TMPDIR"):
        Router(context, f"ipc://{tmp_path}/link/x", ())


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with zmq.Context() as context, pytest.raises(ConfigError, match="TMPDIR"):
        Dealer(context, f"ipc://{tmp_path}/x", "a", ())


def test_a_hub_whose_folder_was_taken_serves_its_peers_and_binds_nothing_there(tmp_path: Path) -> None:
    folder = tmp_path / "talon-1"
    with zmq.Context() as context:
        router = Router(context, f"ipc://{folder}/x", (Heartbeat,))
        line = Dealer(context, f"ipc://{folder}/x", "peer", (Stop,))
        line.send(Heartbeat())
        assert len(await_arrivals(router, 1)) == 1
        (folder / "x").unlink()
        folder.chmod(0o777)
        router.restore()
        assert not list(folder.iterdir())
        line.send(Heartbeat())
        assert len(await_arrivals(router, 1)) == 1
        router.close()
        line.close()
