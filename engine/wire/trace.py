"""A timeline of the workers for a person to look at: spans, and the Chrome/Perfetto file they are written to."""

from __future__ import annotations

import json
import time
from pathlib import Path

from engine.core.errors import ConfigError
from engine.wire.messages import Span, Spans
from engine.wire.transport import Dealer


class Trace:
    """A worker's spans, sent to the front end from time to time; if tracing is off, a span costs one comparison."""

    def __init__(self, control: Dealer, wanted: bool):
        self._control, self._wanted = control, wanted
        self._spans: list[Span] = []

    def span(self, name: str, started_ns: int, request: int, detail: str = "") -> None:
        """Record work that began at `started_ns` (time.perf_counter_ns) and has just ended."""
        if self._wanted:
            duration_us = (time.perf_counter_ns() - started_ns) // 1000
            self._spans.append(Span(name, request, started_ns // 1000, duration_us, detail))

    def flush(self) -> None:
        if self._spans:
            self._control.send(Spans(spans=tuple(self._spans)))
            self._spans = []


class Timeline:
    """The spans of all workers. lanes: worker -> its spans. title: what was run."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.lanes: dict[str, list[Span]] = {}

    def add(self, worker: str, spans: Spans) -> None:
        self.lanes.setdefault(worker, []).extend(spans.spans)

    def write(self, path: Path) -> None:
        """Write them in Chrome's trace event format, which Perfetto reads."""
        events: list[dict[str, object]] = []
        for lane, (worker, spans) in enumerate(sorted(self.lanes.items(), reverse=True)):
            events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": worker}})
            for span in spans:
                arguments = {"request": span.request, "detail": span.detail}
                at = {"ts": span.start_us, "dur": span.duration_us}
                events.append({"ph": "X", "pid": 1, "tid": lane, "name": span.name, **at, "args": arguments})
        try:
            path.write_text(json.dumps({"traceEvents": events, "otherData": {"title": self.title}}))
        except OSError as error:
            raise ConfigError(f"trace={path}: cannot be written ({error.strerror}): give another file") from None
