"""What keeps a server well: keys, limits, a full queue, workers that die, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.server.serving import Serving
from engine.server.settings import Settings
from tests.command import talon
from tests.engine.server.figures import metric, settle, tokens, until
from tests.engine.server.process import ServerProcess, serving
from tests.engine.server.test_openapi import ROUTES
from tests.engine.tiny_engine import tiny_engine

TINY = ("--served-model-name", "tiny", "--method", "pld")
SLOW = ("--set", "verifier.simulated_latency_ms=20")
"""Answers last for seconds, so that on a fast machine too they are under way when the gauges are looked at."""
BODY: dict[str, Any] = {"model": "tiny", "prompt": "1 2 3 1 2 3", "max_tokens": 5, "temperature": 0}
KEY = {"Authorization": "Bearer first-key"}


def complete(server: ServerProcess, **more: Any) -> httpx.Response:
    return server.post("/v1/completions", **BODY | more)


def test_the_state_of_the_server_is_told(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{server.url}/version").json()["version"].startswith("0.")
    for path in ("health", "ready", "v1/models", ""):
        answer = httpx.head(f"{server.url}/{path}")
        assert answer.status_code == 200 and not answer.content
    page = httpx.get(f"{server.url}/")
    assert page.headers["content-type"].startswith("text/html") and "Talon" in page.text


def test_unknown_paths_and_methods_are_error_objects(server: ServerProcess) -> None:
    for answer, status in (
        (httpx.get(f"{server.url}/v1/nothing"), 404),
        (httpx.get(f"{server.url}/v1/completions"), 405),
        (httpx.post(f"{server.url}/v1/embeddings", json={}), 404),
    ):
        error = answer.json()["error"]
        assert answer.status_code == status and error["message"], answer.text
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    assert {*error["message"].partition("there are ")[2].split(", ")} == {path for _, path in ROUTES}


@pytest.mark.parametrize("body", [b"{", b'{"model": "\xff"}', b"[" * 200_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_cannot_be_read_is_no_json(server: ServerProcess, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_the_log_has_figures_and_no_prompts_and_a_request_keeps_its_number(server: ServerProcess) -> None:
    secret, headers = "the password is swordfish", {"X-Request-Id": "mine-7"}
    asked = BODY | {"prompt": secret, "user": "ann"}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers, timeout=60)
    line = server.logged("mine-7")
    assert answer.headers["x-request-id"] == "mine-7"
    assert line["status"] == 200 and line["prompt_tokens"] == len(secret) and line["user"] == "ann"
    assert line["completion_tokens"] == answer.json()["usage"]["completion_tokens"] and line["seconds"] > 0
    assert "swordfish" not in "".join(server.raw) and answer.json()["choices"][0]["text"] not in line.values()
    assert len(httpx.get(f"{server.url}/health").headers["x-request-id"]) == 32


def test_metrics_count_under_vllms_names(server: ServerProcess) -> None:
    names = ("prompt_tokens", "generation_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens")
    before = {name: metric(server, f"vllm:{name}_total") for name in names}
    answer = complete(server, max_tokens=60, ignore_eos=True).json()
    figures = answer["metrics"]["speculative_decoding"]
    grown = {name: metric(server, f"vllm:{name}_total") - before[name] for name in names}
    assert grown["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert grown["generation_tokens"] == answer["usage"]["completion_tokens"] == 60
    assert grown["spec_decode_num_drafts"] == figures["drafts"] > 0
    assert grown["spec_decode_num_draft_tokens"] == figures["draft_tokens"] > 0
    accepted = "vllm:spec_decode_num_accepted_tokens"
    assert metric(server, f"{accepted}_total") == metric(server, f"{accepted}_per_pos_total")
    assert metric(server, "vllm:time_to_first_token_seconds_count") > 0
    assert metric(server, "vllm:inter_token_latency_seconds_count") >= 59
    assert metric(server, "talon:verifier_busy_seconds_total") > 0
    assert metric(server, "talon:verified_nodes_total") >= metric(server, "talon:rounds_total") > 0
    assert metric(server, "talon:weight_bytes") > 0
    assert metric(server, "talon:kv_bytes") >= metric(server, "talon:kv_blocks") > 0


def test_metrics_tell_of_the_prefix_cache_the_queue_and_the_time_a_token_takes(server: ServerProcess) -> None:
    names: tuple[str, ...] = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    names += ("request_queue_time_seconds_count", "request_time_per_output_token_seconds_count")

    def now() -> list[float]:
        return [metric(server, f"vllm:{name}") for name in names]

    prompt = "a prompt of more than two blocks, which is asked for twice"
    before = now()
    answers = [complete(server, prompt=prompt, ignore_eos=True).json() for _ in range(2)]
    queries, hits, queued, timed = (after - one for one, after in zip(before, now(), strict=True))
    assert queries == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert 32 <= hits < len(prompt) and queued == timed == 2
    assert metric(server, "vllm:request_time_per_output_token_seconds_sum") > 0
    text = httpx.get(f"{server.url}/metrics").text
    assert "talon:lessons" not in text, "nothing learns where that is not asked for"
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert [kinds[f"vllm:{name}"] for name in ("prefix_cache_queries", "prefix_cache_hits")] == ["counter"] * 2
    assert [kinds[f"vllm:{name.removesuffix('_count')}"] for name in names[2:]] == ["histogram"] * 2


def test_plain_calls_and_streams_whose_clients_leave_free_their_blocks(server: ServerProcess) -> None:
    long, before = BODY | {"max_tokens": 450, "ignore_eos": True, "n": 8}, tokens(server)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json=long, timeout=0.15)
    settle(server)
    until(lambda: any(line["status"] == 499 for line in server.requests()))
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long | {"stream": True}, timeout=60) as answer:
        next(answer.iter_lines())
    settle(server)
    until(lambda: any(line.get("client_left") for line in server.requests()))
    assert [line for line in server.requests() if line.get("client_left")][-1]["status"] == 200
    assert tokens(server) - before < 2 * 8 * 450


def test_many_streams_that_are_left_leave_nothing(server: ServerProcess) -> None:
    async def leave(client: httpx.AsyncClient) -> None:
        body = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                return

    async def all_leave() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(leave(client) for _ in range(100)))

    before = tokens(server)
    asyncio.run(all_leave())
    settle(server)
    assert tokens(server) - before < 100 * 400
    assert complete(server).status_code == 200


@pytest.fixture(scope="module")
def guarded_and_warmed(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, float]]:
    """The server, and how many tokens it had made when it said that it serves."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# of the team\nfirst-key\n\nsecond-key\n")
    limits = ("--max-body", "2000", "--max-prompt-tokens", "50", "--max-choices", "3", "--queue", "32")
    options = ("--api-keys", str(keys), "--cors-origin", "https://a.example", "--log-prompts")
    with serving("--set", f"model={tiny}", *TINY, *limits, *options, TALON_API_KEYS="third-key") as running:
        yield running, tokens(running, "first-key")


@pytest.fixture
def guarded(guarded_and_warmed: tuple[ServerProcess, float]) -> ServerProcess:
    return guarded_and_warmed[0]


def test_a_server_that_says_that_it_serves_has_done_what_a_first_request_would_wait_for(
    guarded_and_warmed: tuple[ServerProcess, float],
) -> None:
    server, made = guarded_and_warmed
    assert made >= 8
    settle(server, "first-key")


def test_a_server_makes_what_a_grammar_needs_before_a_request_has_one(
    guarded_and_warmed: tuple[ServerProcess, float],
) -> None:
    server, _ = guarded_and_warmed
    until(lambda: tokens(server, "first-key") > 8)


def keyed(server: ServerProcess, key: str = "first-key", **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=BODY | more, headers=headers, timeout=60)


def test_only_keys_let_in(guarded: ServerProcess) -> None:
    for key in ("first-key", "second-key", "third-key"):
        assert keyed(guarded, key).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}):
        for path in ("/v1/models", "/metrics", "/docs"):
            answer = httpx.get(f"{guarded.url}{path}", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{guarded.url}/health").status_code == httpx.get(f"{guarded.url}/").status_code == 200


def test_limits_name_themselves(guarded: ServerProcess) -> None:
    assert keyed(guarded, prompt="x" * 51).json()["error"]["param"] == "prompt"
    assert keyed(guarded, n=4).json()["error"]["param"] == "n"
    assert keyed(guarded, prompt=["a", "b"], n=2).status_code == 400
    assert keyed(guarded, prompt="x" * 3000).status_code == 413

    def endless() -> Any:
        yield from [b" " * 500] * 10

    headers = KEY | {"Content-Type": "application/json"}
    answer = httpx.post(f"{guarded.url}/v1/completions", content=endless(), headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["message"]


def test_prompts_stand_in_the_log_where_they_are_asked_for(guarded: ServerProcess) -> None:
    line = guarded.logged(keyed(guarded, prompt="open sesame").headers["x-request-id"])
    assert line["request"]["prompt"] == "open sesame" and len(line["answers"]) == 1


def test_pages_of_other_origins_are_let_in_by_name_only(guarded: ServerProcess, server: ServerProcess) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}

    def allowed(running: ServerProcess, origin: str) -> httpx.Headers:
        return httpx.options(f"{running.url}/v1/models", headers=asked | {"Origin": origin}).headers

    ours, name = allowed(guarded, "https://a.example"), "access-control-allow-origin"
    assert ours[name] == "https://a.example" and ours["access-control-allow-private-network"] == "true"
    assert name not in allowed(guarded, "https://b.example") and name not in allowed(server, "https://a.example")


def test_a_full_queue_refuses_and_says_when_to_come_back(guarded: ServerProcess) -> None:
    """64 clients, and places for 32."""

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", json=BODY | {"max_tokens": 60, "ignore_eos": True})

    async def all_ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=guarded.url, headers=KEY, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client) for _ in range(64)))

    answers = asyncio.run(all_ask())
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 32
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["code"] == "queue_full"
    settle(guarded, "first-key")
    assert keyed(guarded).status_code == 200


LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "n": 8, "temperature": 1, "seed": 1}


@contextmanager
def under_way(server: ServerProcess, answers: list[Any]) -> Iterator[None]:
    """Let eight long answers be under way inside the block, and wait for them."""
    thread = threading.Thread(target=lambda: answers.append(complete(server, **LONG).json()))
    thread.start()
    until(lambda: metric(server, "vllm:num_requests_running") > 0)
    yield
    thread.join(60)


def test_answers_survive_a_killed_verifier_and_then_sigterm_which_leaves_nothing(tiny: str) -> None:
    with serving("--set", f"model={tiny}", *TINY, *SLOW, whole=True) as server:
        whole, answers = complete(server, **LONG).json()["choices"], []
        with under_way(server, answers):
            verifier(server).kill()
            until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            refused = complete(server)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert httpx.get(f"{server.url}/health").status_code == 200
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
        workers = psutil.Process(server.process.pid).children(recursive=True)
        with under_way(server, answers):
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
        assert [answer["choices"] for answer in answers] == [whole] * 2
        assert workers and not [worker for worker in workers if worker.is_running() and worker.status() != "zombie"]


def test_sigterm_does_not_wait_for_ever(tiny: str) -> None:
    slow = ("--set", "verifier.simulated_latency_ms=100")
    with serving("--set", f"model={tiny}", *TINY, "--drain", "1", *slow) as server:
        body = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True, "speculation": {"off": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0, "the answer would take 40 s"


def test_over_tls_traces_are_sent_below_the_clients_own(tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made.split(), *files], check=True, capture_output=True)
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    trusted = ssl.create_default_context(cafile=str(certificate))
    received = ExportTraceServiceRequest()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.MergeFromString(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with serving("--set", f"model={tiny}", *TINY, "--traces", url, *tls) as server:
            assert server.url.startswith("https://")
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/ready")
            parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=parent, verify=trusted).json()
            assert server.end() == 0
        collector.shutdown()
    (span,) = (span for part in received.resource_spans for scope in part.scope_spans for span in scope.spans)
    assert span.trace_id.hex() == "ab" * 16 and span.parent_span_id.hex() == "cd" * 8
    figures = {attribute.key: attribute.value.int_value for attribute in span.attributes}
    assert figures["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert span.end_time_unix_nano > span.start_time_unix_nano


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tls-cert", "cert.pem"), "--tls-cert, --tls-key: give both"),
        (("--tls-cert", "a.pem", "--tls-key", "b.pem", "--set", "model=nowhere"), "--tls-key b.pem: no such pair"),
        (("--api-keys", os.devnull), "holds no key"),
        (("--api-keys", "nowhere.txt"), "cannot be read"),
        (("--host", "203.0.113.1"), "cannot listen there"),
        (("--port", "{taken}"), "name another --port"),
        (("--traces", "nonsense", "--set", "model=nowhere"), "is no URL"),
    ],
)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], said: str, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.run.to_standard_error", lambda: None)  # the log of this process stays its own
    with socket.create_server(("127.0.0.1", 0)) as other:
        wrong = [option.replace("{taken}", str(other.getsockname()[1])) for option in options]
        done = talon("serve", "--port", "0", "--set", f"model={tiny}", *wrong)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def verifier(server: ServerProcess) -> psutil.Process:
    """The busiest of its workers: the drafter of these tests does next to nothing."""
    workers = psutil.Process(server.process.pid).children(recursive=True)
    return max(workers, key=lambda worker: worker.memory_info().rss)


async def test_a_server_that_warms_up_refuses_no_client(tiny: str, tiny_draft: str) -> None:
    async with tiny_engine(tiny, tiny_draft, **{"queue.size": 1, "queue.full": "refuse"}) as engine:
        warming = asyncio.create_task(Serving(engine, Settings(model="tiny")).warm_up_grammars())
        await asyncio.sleep(0)  # it begins
        with engine.reserve(1):
            assert engine.requests == 2
        await warming
        assert engine.requests == 0
