"""`talon index speed`: what the indexes cost, on your corpus and machine.

Times of the session index and of the datastore are those of single calls, as a drafter makes them, on one core. The
shared cache is filled with the corpus, so its tokens repeat as real text does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.places import BENCHMARKS
from retrieval_index.build import write_shard
from retrieval_index.corpus import tokenised
from retrieval_index.datastore import HEADER, MAGIC, VERSION, Header, fingerprint
from retrieval_index.suffix import BYTES_PER_TOKEN, SessionIndex

from .datastore_speed import SAMPLE, Times, resident_bytes, seconds, times

ANSWER = 500  # tokens of a finished answer


class SessionFigures(msgspec.Struct):
    """append_us: per token, learning included, for verdicts of three tokens. bytes_per_token: resident memory of the
    cache divided by its tokens."""

    context_tokens: int
    cached_tokens: int
    budget: int
    query: Times
    append_us: Times
    bytes_per_token: float


class DatastoreFigures(msgspec.Struct):
    """build_tokens_per_s: sorting and writing. resident_mb: of a process that opened and queried it; of_it_data_mb:
    pages of the datastore, shared by all processes that query it."""

    tokens: int
    build_tokens_per_s: float
    open_ms: float
    query: Times
    resident_mb: float
    of_it_data_mb: float


def corpus_tokens(tokenizer: Any, inputs: Sequence[Path], wanted: int) -> NDArray[np.uint32]:
    """The first `wanted` tokens of the files, documents one after the other."""
    parts, held = [], 0
    for document in tokenised(tokenizer, inputs, 0, _separator(tokenizer)):
        parts.append(document)
        held += len(document)
        if held >= wanted:
            return np.concatenate(parts)[:wanted]
    raise ConfigError(f"input: holds {held:,} tokens of {wanted:,}: give more text or ask for fewer --tokens")


def session_figures(tokens: NDArray[np.uint32], context: int, cached: int, budget: int) -> SessionFigures:
    """A request of `context` tokens with a shared cache of `cached`; it continues with text of the corpus."""
    text = _words(tokens)
    if len(text) < context + cached + 3 * SAMPLE:
        raise ConfigError(f"tokens={len(text)}: the session index needs {context + cached + 3 * SAMPLE}")
    _fill(SessionIndex(), text[: 3 * ANSWER])  # compiles the kernels, which is not measured
    index = SessionIndex(capacity=cached)
    before = resident_bytes()
    _fill(index, text[:cached])
    grown = resident_bytes() - before
    index.start(1, text[cached : cached + context].tolist())
    rest = text[cached + context :]
    query, append = [], []
    for i in range(0, 3 * SAMPLE, 3):
        query.append(seconds(lambda: index.draft(1, budget=budget + 1)))
        verdict = rest[i : i + 3].tolist()
        append.append(seconds(lambda verdict=verdict: index.append(1, verdict)) / 3)  # type: ignore[misc]
    return SessionFigures(
        context, index.cached_tokens, budget, times(query), times(append), grown / index.cached_tokens
    )


def bounded_figures(tokens: NDArray[np.uint32], capacity: int) -> tuple[int, int]:
    """(tokens cached, resident bytes) after remembering all of `tokens` with room for `capacity`."""
    before = resident_bytes()
    index = SessionIndex(capacity)
    _fill(index, _words(tokens))
    return index.cached_tokens, resident_bytes() - before


def datastore_figures(tokenizer: Any, tokens: NDArray[np.uint32], folder: Path) -> DatastoreFigures:
    """Build one shard, then open and query it in a process of its own."""
    width = 2 if len(tokenizer) < 0xFFFF else 4
    started = time.perf_counter()
    shard = write_shard(folder, 0, tokens, width)
    built_s = time.perf_counter() - started
    header = Header(MAGIC, VERSION, fingerprint(tokenizer), width, [shard])
    (folder / HEADER).write_bytes(msgspec.json.encode(header))
    command = [sys.executable, "-m", f"{BENCHMARKS}.datastore_speed", str(folder)]
    asked = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return DatastoreFigures(
        len(tokens),
        len(tokens) / built_s,
        asked["open_ms"],
        Times(**asked["query"]),
        asked["resident_mb"],
        asked["of_it_data_mb"],
    )


def rows(session: SessionFigures, bounded: tuple[int, int], store: DatastoreFigures) -> Iterator[tuple[str, str, str]]:
    """(what, measured, goal)."""
    yield (
        f"session query of {session.budget}, {session.context_tokens:,} + {session.cached_tokens:,} tokens, p50",
        _us(session.query.p50),
        "25 us",
    )
    yield "session query, p99", _us(session.query.p99), "100 us"
    yield "session append, a token, p50", _us(session.append_us.p50), "3 us"
    yield "session cache, bytes a token", _grown(session.bytes_per_token), str(BYTES_PER_TOKEN)
    bound = f"{store.tokens:,}, {BYTES_PER_TOKEN * store.tokens / 1e6:.0f} MB"
    yield (
        f"session cache fed {store.tokens:,} tokens",
        f"{bounded[0]:,} kept, {_grown(bounded[1] / 1e6)} MB",
        bound,
    )
    yield f"datastore query, {store.tokens:,} tokens, p50", _us(store.query.p50), "100 us"
    yield "datastore query, p99", _us(store.query.p99), "-"
    yield "datastore, to open", f"{store.open_ms:.1f} ms", "50 ms"
    yield (
        "datastore, resident while asked",
        f"{store.resident_mb:.0f} MB ({store.of_it_data_mb:.0f} of it data)",
        "200 MB",
    )
    yield "datastore build, tokens/s", f"{store.build_tokens_per_s:,.0f}", "1,000,000"


def _grown(value: float) -> str:
    """Resident memory that was added; "-" if all of it fitted into pages that the process had already."""
    return f"{value:.0f}" if value > 0 else "-"


def _us(value: float) -> str:
    return f"{value:.1f} us"


def _separator(tokenizer: Any) -> int:
    return 0xFFFF if len(tokenizer) < 0xFFFF else 0xFFFFFFFF


def _words(tokens: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The tokens without document separators."""
    words: NDArray[np.int32] = tokens[~np.isin(tokens, (0xFFFF, 0xFFFFFFFF))].astype(np.int32)
    return words


def _fill(index: SessionIndex, text: NDArray[np.int32]) -> None:
    for at in range(0, len(text), ANSWER):
        index.start(0, [])
        index.append(0, text[at : at + ANSWER].tolist())
        index.finish(0)
