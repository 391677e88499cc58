"""A tensor that passes from one thread's stream to another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.verifier.handed_over import HandedOver


def test_the_stream_that_takes_a_tensor_waits_for_what_made_it_and_the_host_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []
    event = SimpleNamespace(record=lambda: log.append("made"))
    stream = SimpleNamespace(wait_event=lambda one: log.append(("stream waits", one is event)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    tensor: Any = SimpleNamespace(device=torch.device("cuda"), record_stream=lambda one: log.append(one is stream))
    handed = HandedOver(tensor)
    assert log == ["made"]
    assert handed.take() is tensor
    assert log == ["made", ("stream waits", True), True], "its memory is not given away before the stream has read it"


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    tensor = torch.ones(2)
    assert HandedOver(tensor).take() is tensor
