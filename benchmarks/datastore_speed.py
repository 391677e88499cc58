"""A datastore's costs in a process that does nothing else: `python -m benchmarks.datastore_speed DIR` prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from retrieval_index.datastore import Datastore

SAMPLE = 4000  # calls timed


class Times(msgspec.Struct):
    """Microseconds."""

    p50: float
    p99: float


def ask(folder: Path) -> dict[str, Any]:
    """Open a datastore and query contexts from all over its corpus, changed a little so that few match in full."""
    opening = [seconds(lambda: Datastore(folder)) for _ in range(5)]
    store = Datastore(folder)
    tokens, _ = store.shards[0]
    rng = np.random.default_rng(0)
    contexts = [tokens[at : at + 16].tolist() for at in rng.integers(0, len(tokens) - 16, SAMPLE)]
    for context in contexts:
        context[rng.integers(0, 14)] = int(rng.integers(0, 1000))
    store.prepare()
    query = [seconds(lambda context=context: store.continuations(context)) for context in contexts]  # type: ignore[misc]
    return {
        "open_ms": 1e3 * float(np.median(opening)),
        "query": msgspec.to_builtins(times(query)),
        "resident_mb": resident_bytes() / 1e6,
        "of_it_data_mb": _resident_of(folder) / 1e6,
    }


def _resident_of(folder: Path) -> int:
    """Bytes of this process that are pages of the folder's files; processes that read the same ones share them."""
    held, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *rest = line.split()
            if not name.endswith(":"):
                ours = rest[-1].startswith(str(folder.resolve()))
            elif ours and name == "Rss:":
                held += 1024 * int(rest[0])
    return held


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes, in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def times(seconds: list[float]) -> Times:
    """Percentiles of these durations."""
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return Times(float(p50), float(p99))


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(ask(Path(sys.argv[1]))))
