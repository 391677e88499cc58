"""What a step tells: records, one JSON line each. A check that fails is a record too, and the next one is tried."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Record = dict[str, Any]
Step = Callable[[str], Iterator[Record]]
"""A step, given "cuda" or "cpu". On a CPU shapes are small: it shows that the step runs, and no speed."""

_LINES = 12  # lines of a traceback


def tried(name: str, check: Callable[..., Mapping[str, Any]], *arguments: Any) -> Record:
    """Return the record of a check, or of how it failed."""
    started = time.perf_counter()
    try:
        found = dict(check(*arguments))
    except Exception as error:  # any error: the other checks are still to be tried
        found = {"failed": tail("".join(traceback.format_exception(error)))}
    return {"check": name, **found, "seconds": round(time.perf_counter() - started, 2)}


def tail(text: str) -> str:
    """Return the last lines of a traceback or a log, without the marks below the code."""
    lines = [line for line in text.strip().splitlines() if line.strip(" ~^")]
    return "\n".join(lines[-_LINES:])
