"""An engine on the tiny target, and prompts for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine import Engine

PROMPTS = [list(text) for text in (b"the cat sat on the mat, the cat", b"1 + 1 = 2, 1 + 2 =", b"zzzz")]
DRAFTS = {
    "none": {},
    "pld": {},
    "lookahead": {},
    "suffix": {},
    "recycling": {},
    "datastore": {},
    "sps": {"drafter.length": 4},
    "sps tree": {"drafter.branches": [3, 2, 1]},
}


SLOW: dict[str, Any] = {"verifier.simulated_latency_ms": 10}
"""With this latency an answer takes seconds, and is not over when the event loop has been held up."""


@asynccontextmanager
async def tiny_engine(model: str, draft: str, name: str = "none", **overrides: Any) -> AsyncIterator[Engine]:
    """Start an engine on the tiny target, as threads unless told otherwise. name: a key of DRAFTS."""
    settings = {"transport": "inproc", "method": name.split()[0], "drafter.path": draft, "verifier.threads": 1}
    settings |= DRAFTS.get(name, {})
    if name == "datastore":
        settings["drafter.datastore"] = str(Path(draft) / "datastore")
    async with await Engine.start({"model": model}, **settings | overrides) as engine:
        yield engine
