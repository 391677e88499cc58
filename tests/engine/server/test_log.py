"""The server's log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from engine.server.log import Log, to_standard_error


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    kept = {name: logging.getLogger(name) for name in ("talon.server", "uvicorn.error")}
    handlers = {name: (logger.handlers, logger.propagate) for name, logger in kept.items()}
    yield
    for name, logger in kept.items():
        logger.handlers, logger.propagate = handlers[name]


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> list[str]:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    to_standard_error()
    log = Log()
    log.request({"id": "7", "status": 200, "tokens": 12, "prompt": None})
    try:
        raise KeyError("gone")
    except KeyError as error:
        log.failed("8", error)
    return capsys.readouterr().err.splitlines()


def test_a_program_gets_one_object_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    request, failed = map(json.loads, told(capsys, monkeypatch, is_terminal=False))
    assert (request["event"], request["status"], request["tokens"], request["level"]) == ("request", 200, 12, "info")
    assert failed["level"] == "error" and failed["id"] == "8" and "KeyError" in failed["error"]


def test_a_person_gets_lines_to_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    request, failed, *trace = told(capsys, monkeypatch, is_terminal=True)
    assert request.split(" ", 1)[1] == "request id=7 status=200 tokens=12"
    assert failed.split(" ", 1)[1] == "error: internal error id=8" and trace[-1] == "KeyError: 'gone'"


def test_what_a_client_sent_cannot_move_a_terminals_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    to_standard_error()
    Log().request({"id": "7", "path": "/\x1b[2J\n", "user": "\u00e9va"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.split(" ", 1)[1] == "request id=7 path='/\\x1b[2J\\n' user=\u00e9va"
