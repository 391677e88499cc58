"""`talon bench --server URL`: many clients at once, or requests that arrive at random, against a server that speaks
OpenAI's API, Talon or another.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.frontend.tasks import keep_under_way

from ..inputs.questions import Question, mixed_questions
from ..report.load_figures import LoadRow, at_once, throughput, tokens_per_second
from ..report.out_folder import RowFile
from ..report.tables import Table, p50_p95
from .arrivals import arrival_times, ask_at

KEY_VARIABLE = "OPENAI_API_KEY"
_ROUNDS = 4  # requests at a level, for each client
_ARRIVING = 40  # requests at a rate
_TIMEOUT_S = 600.0

Asked = tuple[str, Question]
"""A question, and the name of the file that it is from."""


@dataclass
class LevelOfClients:
    """The results of one level: of so many clients at once, or of requests that arrive at random, at an average rate
    per second. refused: statuses of requests that were not answered, and how often each; failed: the same for reasons
    why answers broke off.
    """

    clients: int | None = None
    per_second: float | None = None
    rows: list[LoadRow] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return at_once(self.clients) if self.clients is not None else f"{self.per_second:g} a second"

    @property
    def figures(self) -> list[str]:
        """Tokens a second, goodput of requests that arrive, p50/p95 of the time to the first token and of the pauses
        between chunks.
        """
        if not self.rows:
            return ["-"] * 4
        first_s, pauses_s = [r.first_token_s for r in self.rows], [p for r in self.rows for p in r.pauses_s]
        latencies = [p50_p95(first_s, 1000), p50_p95(pauses_s, 1000)]
        if self.clients is not None:
            return [f"{tokens_per_second(self.rows):.0f}", "-", *latencies]
        return [f"{throughput(self.rows):.1f}", f"{throughput(self.rows, good=True):.1f}", *latencies]


async def run_clients(
    url: str,
    files: Sequence[Path],
    limit: int | None,
    levels: Sequence[int],
    rates: Sequence[float],
    sampling: SamplingParams,
    out: Path,
) -> list[LevelOfClients]:
    """Ask at each level, without repeating questions as long as there are enough; writes `out`/clients.jsonl as levels
    end. url: of the server, or of its API, which ends with /v1. levels: clients at once. rates: of requests that arrive
    at random, per second; the same rate gives every server the same times.
    """
    httpx, url = _httpx(), url.rstrip("/").removesuffix("/v1")
    endless = itertools.cycle(mixed_questions(files, limit))
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max([*levels, _ARRIVING]))
    done = []
    _check_address(url)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, limits=limits) as client:
        try:
            model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ConfigError(f"--server {url}: does not speak OpenAI's API: {error}") from None
        with RowFile(out / "clients.jsonl") as results:
            for level in [*map(LevelOfClients, levels), *(LevelOfClients(per_second=rate) for rate in rates)]:
                count = _ARRIVING if level.clients is None else max(_ROUNDS * level.clients, len(files))
                asked = [*itertools.islice(endless, count)]
                await _measure(_Clients(client, model, sampling), asked, level)
                done.append(level)
                for row in level.rows:
                    results.write(row)
    return done


def _check_address(url: str) -> None:
    try:
        address = urlsplit(url)
        whole = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # an invalid port, for example
        whole = False
    if not whole:
        raise ConfigError(f"--server {url}: is no address: give one like http://127.0.0.1:8000")


def table(url: str, levels: Sequence[LevelOfClients]) -> Table:
    """Make a line for each level."""
    lines = []
    for level in levels:
        refused = ", ".join(f"{count} x {status}" for status, count in sorted(level.refused.items()))
        counts = (level, len(level.rows), refused or 0, level.failed.total())
        lines.append([*map(str, counts), *level.figures])
    columns = ("requests", "answers", "refused", "failed", "tokens/s", "goodput", "first ms", "pause ms")
    return Table(f"Clients of {url}", columns, lines, words=1)


def failures(levels: Sequence[LevelOfClients]) -> list[str]:
    """Return a line for each reason why answers broke off at a level."""
    return [f"{level}: {count} failed: {reason}" for level in levels for reason, count in level.failed.most_common()]


@dataclass(frozen=True)
class _Clients:
    client: Any
    model: str
    sampling: SamplingParams

    async def ask(self, one: Asked, level: LevelOfClients, started_s: float) -> None:
        """Ask for one answer, streamed. Tokens per chunk are not reported: the answer's tokens are spread over its
        chunks.
        """
        suite, question = one
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": self.sampling.max_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked_s, times, tokens = time.perf_counter() - started_s, [], 0
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    level.refused[answer.status_code] += 1
                    return
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[len("data: ") :])
                    if "choices" not in chunk:
                        level.failed[_reason(chunk)] += 1
                        return
                    if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                        times.append(time.perf_counter() - started_s)
                    if chunk.get("usage"):
                        tokens = chunk["usage"]["completion_tokens"]
        except (_httpx().HTTPError, ValueError) as error:  # the connection was dropped, or nothing came for too long
            level.failed[str(error) or type(error).__name__] += 1
            return
        if times and not tokens:
            level.failed["its stream counts no tokens: it must honour stream_options.include_usage"] += 1
            return
        emitted = list(zip(times, _spread(tokens, len(times)), strict=True))
        setting = (level.clients, level.per_second)
        row = LoadRow(suite, question.question_id, self.model, *setting, 0, asked_s, emitted, True, False)
        level.rows.extend([row] if emitted else [])


async def _measure(clients: _Clients, asked: Sequence[Asked], level: LevelOfClients) -> None:
    started_s = time.perf_counter()

    async def ask(one: Asked) -> None:
        await clients.ask(one, level, started_s)

    if level.clients is not None:
        await keep_under_way(level.clients, asked, ask)
    elif level.per_second is not None:
        times = arrival_times(level.per_second, len(asked), f"{level.per_second:g}")
        await ask_at(times, asked, ask, started_s)


def _reason(error: dict[str, Any]) -> str:
    """Return what went wrong, of an event that is no chunk of an answer. OpenAI's form is {"error":
    {"message": ...}}.
    """
    inner = error.get("error", error)
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)


def _spread(tokens: int, chunks: int) -> list[int]:
    """Spread the tokens over the chunks: the first has one token, the prefill's; the others share the rest."""
    if chunks < 2:
        return [tokens] * chunks
    marks = [1 + round((tokens - 1) * chunk / (chunks - 1)) for chunk in range(chunks)]
    return [1, *(now - before for before, now in itertools.pairwise(marks))]


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise ConfigError("--server: httpx is missing: pip install 'talon-decoding[bench]'") from None
    return httpx
