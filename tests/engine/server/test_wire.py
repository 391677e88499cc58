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

from tests.engine.server.figures import tokens, until
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


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    ],
    ids=["line", "header", "headers"],
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


def test_a_connection_that_was_idle_for_seconds_takes_another_request(server: ServerProcess) -> None:
    with connect(server) as connection:
        for pause_s in (6, 0):  # pools keep connections for longer than that
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += (part := connection.recv(65536))
                assert part, "the connection was closed"
            assert answer.startswith(b"HTTP/1.1 200 ")
            time.sleep(pause_s)


def test_headers_after_a_chunked_body_are_bounded_like_those_before_it(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
            + b"a: b\r\n" * 300
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_a_client_that_closes_its_side_still_gets_its_answer(server: ServerProcess) -> None:
    for stream in (False, True):
        with connect(server) as connection:
            connection.sendall(request({"max_tokens": 200, "ignore_eos": True, "stream": stream}))
            connection.shutdown(socket.SHUT_WR)
            answer = everything(connection)
        assert b"HTTP/1.1 200 OK" in answer, answer
        assert b'"finish_reason":"length"' in answer


def test_a_client_that_closed_its_side_and_then_left_is_noticed(tiny: str) -> None:
    with serving("--set", f"model={tiny}", *TINY, *SLOW) as server:
        before = tokens(server)
        with connect(server) as connection:
            connection.sendall(request({"max_tokens": 450, "ignore_eos": True, "speculation": {"off": True}}))
            connection.shutdown(socket.SHUT_WR)
            until(lambda: tokens(server) > before)
        until(lambda: any(line["status"] == 499 for line in server.requests()))
        assert tokens(server) - before < 450


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
    """Below a path, with a key beyond ASCII; a prompt of 80 tokens takes ten forwards, and these seconds."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_bytes("\ufeffschlüssel\nплюч\n".encode())
    options = ("--api-keys", str(keys), "--root-path", "/talon/", "--cors-origin", "https://a.example")
    slow = ("--set", "verifier.simulated_latency_ms=400", "--set", "verifier.prefill_chunk=8")
    with serving("--set", f"model={tiny}", *TINY, *options, *slow, "--max-body", "2000", "--queue", "2") as running:
        yield running


KEY = {"Authorization": b"Bearer " + "schlüssel".encode()}


@pytest.mark.parametrize("key", ["schlüssel".encode(), "schlüssel".encode("latin1"), "плюч".encode()])
def test_a_key_may_have_letters_beyond_ascii(proxied: ServerProcess, key: bytes) -> None:
    answer = httpx.get(f"{proxied.url}/v1/models", headers={"Authorization": b"Bearer " + key})
    assert answer.status_code == 200, answer.text


def test_a_key_in_another_spelling_does_not_match(proxied: ServerProcess) -> None:
    for key in (b"schlussel", b"schl?ssel", "schlÜssel".encode()):
        assert httpx.get(f"{proxied.url}/v1/models", headers={"Authorization": b"Bearer " + key}).status_code == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/talon/v1/models", "//v1/models", "/talon//v1//models", "/v1//models/tiny"]
)
def test_paths_may_have_the_proxys_root_and_doubled_slashes(proxied: ServerProcess, path: str) -> None:
    assert httpx.get(f"{proxied.url}{path}", headers=KEY).status_code == 200
    assert httpx.get(f"{proxied.url}{path}").status_code == 401


def test_below_a_root_the_open_routes_need_no_key_and_the_document_names_the_root(proxied: ServerProcess) -> None:
    assert httpx.get(f"{proxied.url}/talon/health").status_code == 200
    assert httpx.get(f"{proxied.url}/talon//ready").status_code == 200
    document = httpx.get(f"{proxied.url}/openapi.json", headers=KEY).json()
    assert document["servers"] == [{"url": "/talon"}]


def test_a_page_of_a_public_site_may_reach_a_server_in_a_private_network(proxied: ServerProcess) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Private-Network"] = "true"
    answer = httpx.options(f"{proxied.url}/v1/models", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-private-network"] == "true"


def test_a_stream_begins_before_its_first_token_and_has_comments_until_then(proxied: ServerProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi" * 40}], "max_tokens": 1, "stream": True}
    with httpx.stream("POST", f"{proxied.url}/v1/chat/completions", json=body, headers=KEY, timeout=60) as answer:
        events = [event for event in answer.iter_lines() if event]
    role, comment, text = events[:3]
    assert '"role":"assistant"' in role and comment.startswith(": ") and '"content":' in text, events
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"n": 3}, 400), ({"prompt": "x" * 600}, 400), ({"max_tokens": -2}, 400), ({"model": "other"}, 404)],
)
def test_what_is_wrong_with_a_stream_is_its_status(proxied: ServerProcess, wrong: dict[str, Any], status: int) -> None:
    answer = httpx.post(f"{proxied.url}/v1/completions", json=BODY | {"stream": True} | wrong, headers=KEY)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_full_queue_is_a_streams_status_too(proxied: ServerProcess) -> None:
    body = BODY | {"stream": True, "n": 2, "max_tokens": 60, "ignore_eos": True}
    with httpx.stream("POST", f"{proxied.url}/v1/completions", json=body, headers=KEY, timeout=60) as answer:
        assert answer.status_code == 200
        refused = httpx.post(f"{proxied.url}/v1/completions", json=BODY | {"stream": True}, headers=KEY)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"


def zipped(server: ServerProcess, body: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"} | headers
    return httpx.post(f"{server.url}/tokenize", content=body, headers=headers | KEY, timeout=60)  # type: ignore[arg-type]


def test_a_body_may_be_compressed(proxied: ServerProcess) -> None:
    text = json.dumps({"prompt": "abc"}).encode()
    assert zipped(proxied, gzip.compress(text)).json()["count"] == 3
    assert zipped(proxied, gzip.compress(text[:5]) + gzip.compress(text[5:])).json()["count"] == 3
    assert zipped(proxied, text, **{"Content-Encoding": "identity"}).json()["count"] == 3


def test_a_small_compressed_body_that_holds_too_much_is_refused(proxied: ServerProcess) -> None:
    bomb = gzip.compress(json.dumps({"prompt": "a" * (100 << 10)}).encode())
    assert len(bomb) < 2000
    answer = zipped(proxied, bomb)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_long"


def test_a_body_in_chunks_that_is_too_long_as_it_comes_is_refused_though_it_holds_little(
    proxied: ServerProcess,
) -> None:
    parts = [gzip.compress(b"") * 200, gzip.compress(json.dumps({"prompt": "abc"}).encode())]
    answer = zipped(proxied, iter(parts))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_long"


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [(b"{}", "gzip", 400), (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400), (b"{}", "br", 415)],
    ids=["not compressed", "cut", "another encoding"],
)
def test_a_body_that_is_not_what_its_encoding_says_is_refused(
    proxied: ServerProcess, body: bytes, coding: str, status: int
) -> None:
    answer = zipped(proxied, body, **{"Content-Encoding": coding})
    assert answer.status_code == status and "gzip" in answer.json()["error"]["message"]
