"""The server's log on standard error, without prompts and answers unless they are asked for: lines to read on a
terminal, and JSON, one object a line, everywhere else.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from engine.files.lessons import LessonOutcome
from engine.wire.messages import Ready

_LOGGER = "talon.server"


class JsonLines(logging.Formatter):
    """A record as one line of JSON; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Readable(logging.Formatter):
    """A record as one line to read: time, event, then the fields that hold something."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        said = {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}
        fields = " ".join(f"{name}={_printable(value)}" for name, value in said.items())
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        line = f"{at} {level}{record.getMessage()} {fields}".rstrip()
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _printable(value: object) -> str:
    """Return the value as text that cannot move a terminal's cursor: clients choose paths and users."""
    text = str(value)
    return text if text.isprintable() else ascii(text)


class Log:
    """The server's log. prompts: whether prompts and answers may appear in it."""

    def __init__(self, prompts: bool = False):
        self.prompts = prompts
        self._logger = logging.getLogger(_LOGGER)

    def request(self, fields: dict[str, object]) -> None:
        """Log a request that has been answered."""
        self._logger.info("request", extra={"fields": fields})

    def started(self, url: str, model: str, target: Ready) -> None:
        """Log that requests are accepted from now on."""
        fields = {"url": url, "model": model, "activations": target.activations}
        fields |= {"weights": target.weights, "kv_type": target.kv_type}
        fields |= {"head": target.head} if target.head else {}
        megabytes = {"weights_mb": target.weight_bytes // 10**6, "kv_mb": target.kv_bytes // 10**6}
        megabytes |= {"state_mb": target.state_bytes // 10**6} if target.state_bytes else {}
        self._logger.info("serving", extra={"fields": fields | megabytes})

    def learned(self, outcome: LessonOutcome) -> None:
        """Log what a lesson came to."""
        fields = {
            "tokens_per_chain_before": round(outcome.before, 3),
            "tokens_per_chain_after": round(outcome.after, 3),
        }
        fields |= {name: getattr(outcome, name) for name in ("texts", "held_out", "steps", "installed")}
        self._logger.info("learned", extra={"fields": fields})

    def warn(self, text: str) -> None:
        """Log something that the operator should know."""
        self._logger.warning(text)

    def failed(self, number: str, error: BaseException) -> None:
        """Log an unexpected error."""
        self._logger.error("internal error", exc_info=error, extra={"fields": {"id": number}})


def to_standard_error() -> None:
    """Send the log, and lines of uvicorn and OpenTelemetry, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Readable() if sys.stderr.isatty() else JsonLines())
    for name in (_LOGGER, "uvicorn.error", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
