from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.wire import aside, transport
from engine.wire.aside import OnDevice
from engine.wire.keys import Keys, create, load
from engine.wire.messages import Heartbeat, Hello, RoundVerdict, Start, Stop, encode
from engine.wire.transport import Dealer, Router
from tests.conftest import free_port

Pair = tuple[Router, Dealer]
TRANSPORTS = ("inproc", "ipc", "tcp")


def endpoint_of(transport: str, folder: Path) -> str:
    places = {"inproc": "inproc://meeting", "ipc": f"ipc://{folder}/meeting"}
    return places.get(transport) or f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def linked(
    endpoint: str,
    says: tuple[type, ...] = (Hello, Heartbeat),
    hears: tuple[type, ...] = (RoundVerdict, Start, Stop),
    keys: tuple[Keys | None, Keys | None] = (None, None),
    unread: int = 0,
) -> Iterator[Pair]:
    """A hub and one peer of it, which are closed at the end. keys: the hub's and the peer's."""
    with zmq.Context() as context:
        router = Router(context, endpoint, says, keys[0], unread)
        line = Dealer(context, endpoint, "peer", hears, keys[1], unread)
        yield router, line
        router.close()
        line.close()


def until(holds: Callable[[], bool], within_s: float = 30) -> None:
    ends = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.01)


def await_arrivals(source: Any, count: int) -> list[Any]:
    arrived: list[Any] = []
    deadline = time.monotonic() + 10
    while len(arrived) < count and time.monotonic() < deadline:
        arrived += source.received()
    return arrived


def join(router: Router, line: Dealer) -> None:
    """Let the hub know the peer."""
    line.send(Hello())
    assert len(await_arrivals(router, 1)) == 1


@pytest.fixture(params=[*TRANSPORTS, "tcp with keys"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    keys: tuple[Keys | None, Keys | None] = (None, None)
    if request.param == "tcp with keys":
        create(tmp_path / "keys")
        keys = load(tmp_path / "keys", "verifier"), load(tmp_path / "keys", "drafter")
    with linked(endpoint_of(request.param, tmp_path), keys=keys) as both:
        yield both


def test_messages_come_in_order_with_their_senders_name_and_are_answered_by_it(pair: Pair) -> None:
    router, line = pair
    line.send(Hello(feature_layers=(1,)))
    line.send(Heartbeat())
    arrived = [(name, message) for name, message, _ in await_arrivals(router, 2)]
    assert arrived == [("peer", Hello(feature_layers=(1,))), ("peer", Heartbeat())]
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
    with linked("inproc://meeting", unread=8) as (router, line):
        join(router, line)
        for numbers in (*given, np.ones((1, 1, 2), np.uint16)):
            router.send("peer", VERDICT, [*PATH, numbers])
        arrived = await_arrivals(line, 3)
    assert not aside._waiting and router.in_process
    assert [arrays[-1] for _, arrays in arrived[:2]] == [[id(one)] for one in given]
    assert [[part.tolist() for part in arrays[:2]] for _, arrays in arrived] == [[[0], [1]]] * 3
    assert arrived[2][1][-1].tolist() == [[[1, 1]]]


def test_numbers_whose_message_is_not_sent_or_not_read_are_held_no_longer() -> None:
    with linked("inproc://meeting", unread=2) as (router, line):
        assert router.send("nobody", VERDICT, [*PATH, Numbers()]) and not aside._waiting
        other = Dealer(line.socket.context, "inproc://meeting", "other", (RoundVerdict,), unread=2)
        for one in (line, other):
            join(router, one)
        sent = 0
        while sent < 500 and router.send("peer", VERDICT, [*PATH, Numbers()]):
            sent += 1
        assert 2 <= sent < 500 and len(aside._waiting) == sent
        router.send("other", VERDICT, [*PATH, Numbers()])
        assert len(aside._waiting) == 1, "the first one is gone"
        assert [*line.received()] == [] and line.malformed == sent
        router.close()
        assert not aside._waiting
        other.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_between_processes_a_message_has_no_third_frame(transport: str, tmp_path: Path) -> None:
    with linked(endpoint_of(transport, tmp_path)) as (router, line):
        join(router, line)
        frames = encode(VERDICT, [*PATH, np.zeros((0, 0, 0), np.uint16)])
        router.socket.send_multipart([b"peer", *frames, b"1"])
        router.socket.send_multipart([b"peer", *frames])
        assert len(await_arrivals(line, 1)) == 1 and line.malformed == 1 and not router.in_process


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hub_refuses_to_send_to_a_peer_that_leaves_too_much_unread(transport: str, tmp_path: Path) -> None:
    message, text = Start(request=1, round=0, sampling=SamplingParams()), np.zeros(1 << 16, np.int32)
    with linked(endpoint_of(transport, tmp_path), unread=8) as (router, line):
        join(router, line)
        sent = 0
        while sent < 500 and router.send("peer", message, [text]):
            sent += 1
        assert 8 <= sent < 500
        assert len(await_arrivals(line, sent)) == sent
        until(lambda: router.send("peer", message, [text]))


def test_a_line_joins_once_for_every_hub_it_finds() -> None:
    endpoint = endpoint_of("tcp", Path())
    with zmq.Context() as context:
        line = Dealer(context, endpoint, "peer", (Stop,))
        assert not line.joined()
        for _ in range(2):
            with zmq.Context() as its_own:  # whose end waits until the port is free again
                router = Router(its_own, endpoint, (Hello,))
                until(line.joined)
                assert not line.joined()
                join(router, line)
                router.close()
        line.close()


@pytest.mark.parametrize(
    ("verifier", "drafter", "told"),
    [
        ("ours", "stranger", "does not let this drafter in; put its drafter.key into the verifier's keys"),
        ("ours", "mixed", "has another key than this drafter's verifier.key"),
        ("ours", None, "goes with keys and this drafter without, or the reverse"),
        (None, "ours", "goes with keys and this drafter without, or the reverse"),
    ],
)
def test_a_link_whose_ends_hold_different_keys_is_told_instead_of_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifier: str | None, drafter: str | None, told: str
) -> None:
    monkeypatch.setattr(transport, "_REFUSED_S", 0.5)
    for name in ("ours", "theirs"):
        create(tmp_path / name)
    ours, theirs = load(tmp_path / "ours", "drafter"), load(tmp_path / "theirs", "drafter")
    keys = {"ours": ours, "mixed": ours._replace(verifier=theirs.verifier), None: None}
    keys["stranger"] = theirs._replace(verifier=ours.verifier)
    hubs = load(tmp_path / verifier, "verifier") if verifier else None
    with linked(endpoint_of("tcp", tmp_path), keys=(hubs, keys[drafter])) as (router, line):
        line.send(Hello())
        with pytest.raises(ConfigError) as error:
            until(line.joined)
        assert str(error.value).startswith(f"tcp.keys: {line.endpoint} {told}")
        assert not list(router.received())


class Forwarding:
    """A port whose connections are accepted and then ended, as by `ssh -L` while nobody listens at its other end.
    ended: how many so far.
    """

    def __init__(self, endpoint: str):
        self.ended = 0
        self._socket = socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                self._socket.accept()[0].close()
                self.ended += 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def ends_many(forwarding: Forwarding, line: Dealer) -> None:
    """Let the line try again and again; it must not give up."""
    last = forwarding.ended + 8
    until(lambda: line.joined() or forwarding.ended >= last)


def test_a_line_without_keys_waits_for_a_verifier_behind_something_that_accepts_connections_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_REFUSED_S", 0.0)
    endpoint = endpoint_of("tcp", Path())
    with zmq.Context() as context, closing(Dealer(context, endpoint, "peer", ())) as line:
        with closing(Forwarding(endpoint)) as forwarding:
            ends_many(forwarding, line)
        with closing(Router(context, endpoint, (Hello,))) as router:
            until(line.joined)
            join(router, line)


@pytest.mark.parametrize("joined_before", [True, False])
def test_a_line_with_keys_waits_for_a_verifier_that_it_has_known_and_a_while_for_another(
    joined_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "keys")
    verifier, drafter = (load(tmp_path / "keys", side) for side in ("verifier", "drafter"))
    endpoint = endpoint_of("tcp", tmp_path)
    with zmq.Context() as context, closing(Dealer(context, endpoint, "peer", (), drafter)) as line:
        if joined_before:
            monkeypatch.setattr(transport, "_REFUSED_S", 0.0)
            with zmq.Context() as its_own, closing(Router(its_own, endpoint, (Hello,), verifier)):
                until(line.joined)
        with closing(Forwarding(endpoint)) as forwarding:
            ends_many(forwarding, line)
        with closing(Router(context, endpoint, (Hello,), verifier)) as router:
            until(line.joined)
            join(router, line)


def open_to_all(folder: Path) -> None:
    """Make the folder again as others could, once a cleaner of temporary files has removed it: all may write to it."""
    folder.mkdir()
    folder.chmod(0o777)


def link_to_ours(folder: Path) -> None:
    folder.with_name("ours").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("ours"))


@pytest.mark.parametrize("made", [open_to_all, link_to_ours, Path.mkdir])
def test_a_folder_that_is_not_ours_alone_is_refused_by_both_sides(
    made: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "talon-1"
    made(folder)
    if made is Path.mkdir:
        folder.chmod(0o700)
        monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)  # somebody else's
    told = r"^TMPDIR: .*talon-1 is not a folder of this user alone; remove it"
    with zmq.Context() as context:
        with pytest.raises(ConfigError, match=told):
            Router(context, f"ipc://{folder}/x", ())
        with pytest.raises(ConfigError, match=told):
            Dealer(context, f"ipc://{folder}/x", "a", ())


def test_a_hub_whose_folder_was_taken_serves_its_peers_and_binds_nothing_there(tmp_path: Path) -> None:
    folder = tmp_path / "talon-1"
    with linked(f"ipc://{folder}/x") as (router, line):
        join(router, line)
        (folder / "x").unlink()
        folder.chmod(0o777)
        router.restore()
        assert not list(folder.iterdir())
        join(router, line)


def test_a_hub_binds_again_where_the_folder_above_its_own_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "tmp" / "talon-1"
    with linked(f"ipc://{folder}/x") as (router, line):
        join(router, line)
        shutil.rmtree(tmp_path / "tmp")
        router.restore()
        assert folder.stat().st_mode & 0o777 == 0o700
        with closing(Dealer(line.socket.context, line.endpoint, "other", ())) as other:
            join(router, other)
        join(router, line)


def test_a_hub_whose_folder_cannot_be_made_serves_its_peers_and_binds_again_later(tmp_path: Path) -> None:
    folder = tmp_path / "tmp" / "talon-1"
    with linked(f"ipc://{folder}/x") as (router, line):
        join(router, line)
        shutil.rmtree(tmp_path / "tmp")
        (tmp_path / "tmp").write_text("something else")
        router.restore()
        join(router, line)
        with pytest.raises(
            ConfigError, match=r"^TMPDIR: .*talon-1 cannot be made: not a directory; set another TMPDIR"
        ):
            Dealer(line.socket.context, line.endpoint, "other", ())
        (tmp_path / "tmp").unlink()
        router.restore()
        with closing(Dealer(line.socket.context, line.endpoint, "other", ())) as other:
            join(router, other)


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hub_that_cannot_bind_again_keeps_its_socket(tmp_path: Path) -> None:
    folder = tmp_path / "talon-1"
    with linked(f"ipc://{folder}/x") as (router, line):
        join(router, line)
        (folder / "x").unlink()
        with no_more_files():
            router.restore()
        assert not (folder / "x").exists()
        join(router, line)
        router.restore()
        assert (folder / "x").exists()
