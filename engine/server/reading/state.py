"""Collects what the page shows of all prompts."""

from __future__ import annotations

from engine.api import Engine
from engine.server.answers import ChangeSeen, Prompts, PromptState
from engine.server.reading.changes import ChangedText


def prompts_so_far(engine: Engine, changed: ChangedText) -> Prompts:
    """Return the prompts of an engine's server: the changes that cost most come first."""
    totals = engine.totals
    changes = [
        ChangeSeen(at=at, tokens=change.tokens, behind=change.behind, times=changed.times[at], text=text)
        for at, (change, text) in changed.latest.items()
    ]
    reading = [
        PromptState(read=one.read, total=one.total, cached=one.cached, left_s=one.left_us / 1e6)
        for one in engine.reading
    ]
    return Prompts(
        tokens=totals.prefix_queries,
        cached=totals.prefix_hits,
        behind_changes=changed.tokens,
        changes=sorted(changes, key=lambda one: -one.behind * one.times),
        reading=reading,
    )
