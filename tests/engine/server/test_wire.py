"""What goes over the connection: heads, bodies, streams, and clients that close their side."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.server.figures import settle, tokens, until
from tests.engine.server.process import ServerProcess, serving
from tests.engine.server.test_operations import BODY, SLOW, TINY


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request(body: dict[str, Any], version: str = "1.1", headers: str = "") -> bytes:
    """A completion, as bytes."""
    text = json.dumps(BODY | body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def answered(connection: socket.socket) -> Any:
    """Return the object that a connection which stays open answers with."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += (part := connection.recv(65536))
        assert part, "the connection was closed"
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def healthy(connection: socket.socket) -> None:
    """Ask whether the server is well, on a connection that stays open."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answered(connection)


@pytest.fixture(scope="module", autouse=True)
def idle(server: ServerProcess) -> Iterator[tuple[socket.socket, float]]:
    """A connection that says nothing while the other tests run, and since when."""
    with connect(server) as connection:
        healthy(connection)
        yield connection, time.monotonic()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    ],
    ids=["line", "header", "headers", "headers of an upgrade"],
)
def test_a_head_is_refused_when_it_grows_too_long(server: ServerProcess, head: bytes) -> None:
    with connect(server) as connection:
        sent, answer = 0, b""
        while sent < len(head) and not answer:  # bit by bit, or the end of the connection overtakes the answer
            connection.sendall(head[sent : sent + 4096])
            sent += 4096
            connection.settimeout(0.002 if sent < len(head) else 60)
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert answer.startswith(b"HTTP/1.1 431 ") and sent <= 3 * (64 << 10), answer[:200]


def test_headers_after_a_chunked_body_are_bounded_like_those_before_it(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
            + b"a: b\r\n" * 300
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


TEXT, LONGER = (json.dumps({"prompt": text}).encode() for text in ("abc", "abcd"))
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def upgrading(body: bytes, chunked: bool, headers: str = UPGRADE) -> tuple[bytes, bytes]:
    """The head and the body of a request for HTTP/2, as Java's HttpClient makes it."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST /tokenize HTTP/1.1\r\n{headers}Host: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    return head.encode(), b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("at", [0, 30, None, -3], ids=["one packet", "half a head", "head and body", "half a body"])
def test_a_request_for_another_protocol_is_answered_over_this_one(
    server: ServerProcess, chunked: bool, at: int | None
) -> None:
    with connect(server) as connection:
        for text, count in ((TEXT, 3), (LONGER, 4)):
            head, body = upgrading(text, chunked)
            whole, end = head + body, len(head) if at is None else at
            connection.sendall(whole[:end])
            time.sleep(0.05)
            connection.sendall(whole[end:])
            assert answered(connection)["count"] == count
        healthy(connection)


def test_requests_for_another_protocol_may_follow_each_other_without_waiting(server: ServerProcess) -> None:
    last = UPGRADE.replace("Upgrade, ", "close, Upgrade, ")
    with connect(server) as connection:
        asked = [upgrading(TEXT, False), upgrading(LONGER, True), upgrading(TEXT, True, last)]
        connection.sendall(b"".join(map(b"".join, asked)))
        answers = everything(connection)
    assert answers.count(b"HTTP/1.1 200 ") == 3 == answers.count(b"HTTP/1.1 ")
    assert [int(one[:1]) for one in answers.split(b'"count":')[1:]] == [3, 4, 3]


def test_a_client_that_closes_its_side_still_gets_its_answer(server: ServerProcess) -> None:
    for stream in (False, True):
        with connect(server) as connection:
            connection.sendall(request({"max_tokens": 200, "ignore_eos": True, "stream": stream}))
            connection.shutdown(socket.SHUT_WR)
            answer = everything(connection)
        assert b"HTTP/1.1 200 OK" in answer, answer
        assert b'"finish_reason":"length"' in answer


def test_a_stream_to_a_client_of_http_1_0_is_not_chunked_and_ends_with_the_connection(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(request({"stream": True, "ignore_eos": True}, version="1.0"))
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"content-length" not in head.lower()
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith(b"data: ") for event in body.split(b"\n\n")[:-1])


def test_a_plain_answer_to_a_client_of_http_1_0_has_its_length(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(request({}, version="1.0"))
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower() and json.loads(body)["choices"]


@pytest.fixture(scope="module")
def proxied(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Below a path, with keys beyond ASCII, and slow enough that answers are under way when they are left."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_bytes("\ufeffschlüssel\nплюч\nplain\n".encode())
    options = ("--api-keys", str(keys), "--root-path", "/talon/")
    with serving("--set", f"model={tiny}", *TINY, *options, *SLOW, "--max-body", "2000", "--queue", "2") as running:
        yield running


KEY = {"Authorization": "Bearer plain"}


def test_a_client_that_closed_its_side_and_then_left_is_noticed(proxied: ServerProcess) -> None:
    before = tokens(proxied, "plain")
    with connect(proxied) as connection:
        body = {"max_tokens": 450, "ignore_eos": True, "speculation": {"off": True}}
        connection.sendall(request(body, headers="Authorization: Bearer plain\r\n"))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: tokens(proxied, "plain") > before)
    until(lambda: any(line["status"] == 499 for line in proxied.requests()))
    settle(proxied, "plain")
    assert tokens(proxied, "plain") - before < 450


def test_a_key_may_have_letters_beyond_ascii_and_does_not_match_in_another_spelling(proxied: ServerProcess) -> None:
    right = ["schlüssel".encode(), "schlüssel".encode("latin1"), "плюч".encode()]
    for key in (*right, b"schlussel", b"schl?ssel", "schlÜssel".encode()):
        answer = httpx.get(f"{proxied.url}/v1/models", headers={"Authorization": b"Bearer " + key})
        assert answer.status_code == (200 if key in right else 401), key


@pytest.mark.parametrize("path", ["/talon/v1/models", "//v1/models", "/talon//v1//models", "/v1//models/tiny"])
def test_paths_may_have_the_proxys_root_and_doubled_slashes(proxied: ServerProcess, path: str) -> None:
    assert httpx.get(f"{proxied.url}{path}", headers=KEY).status_code == 200
    assert httpx.get(f"{proxied.url}{path}").status_code == 401


def test_below_a_root_the_open_routes_need_no_key_and_the_document_names_the_root(proxied: ServerProcess) -> None:
    assert httpx.get(f"{proxied.url}/talon//ready").status_code == 200
    document = httpx.get(f"{proxied.url}/openapi.json", headers=KEY).json()
    assert document["servers"] == [{"url": "/talon"}]


def test_a_full_queue_is_a_streams_status_too(proxied: ServerProcess) -> None:
    body = BODY | {"stream": True, "n": 2, "max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{proxied.url}/v1/completions", json=body, headers=KEY, timeout=60) as answer:
        assert answer.status_code == 200
        refused = httpx.post(f"{proxied.url}/v1/completions", json=BODY | {"stream": True}, headers=KEY)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"


def zipped(server: ServerProcess, body: bytes | Iterator[bytes], coding: str = "gzip") -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding, **KEY}
    return httpx.post(f"{server.url}/tokenize", content=body, headers=headers, timeout=60)


def test_a_body_may_be_compressed(proxied: ServerProcess) -> None:
    assert zipped(proxied, gzip.compress(TEXT)).json()["count"] == 3
    assert zipped(proxied, gzip.compress(TEXT[:5]) + gzip.compress(TEXT[5:])).json()["count"] == 3
    assert zipped(proxied, TEXT, "identity").json()["count"] == 3


def test_a_compressed_body_that_is_too_long_as_it_comes_or_as_text_is_refused(proxied: ServerProcess) -> None:
    bomb = gzip.compress(json.dumps({"prompt": "a" * (100 << 10)}).encode())
    assert len(bomb) < 2000
    for body in (bomb, iter([gzip.compress(b"") * 200, gzip.compress(TEXT)])):  # in chunks, which hold little
        answer = zipped(proxied, body)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_long"


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [(b"{}", "gzip", 400), (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400), (b"{}", "br", 415)],
    ids=["not compressed", "cut", "another encoding"],
)
def test_a_body_that_is_not_what_its_encoding_says_is_refused(
    proxied: ServerProcess, body: bytes, coding: str, status: int
) -> None:
    answer = zipped(proxied, body, coding)
    assert answer.status_code == status and "gzip" in answer.json()["error"]["message"]


def test_a_connection_that_was_idle_for_seconds_takes_another_request(
    server: ServerProcess, idle: tuple[socket.socket, float]
) -> None:
    connection, since_s = idle
    time.sleep(max(0.0, since_s + 6 - time.monotonic()))  # pools keep connections for longer than that
    healthy(connection)
