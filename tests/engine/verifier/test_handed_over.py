"""A tensor that passes from one thread's stream to another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor

from engine.drafting.worker import FROM_VERIFIER
from engine.verifier import drafter_link, step
from engine.verifier.drafter_link import FROM_DRAFTER, HandedOver
from engine.verifier.forward_output import RowsOnHost
from engine.wire.messages import Hello, RoundVerdict
from engine.wire.transport import Dealer, Router
from tests.engine.verifier.stage import DRAFTER, Stage


class RowsOnDevice(RowsOnHost):
    """Leaves hidden states on what stands for a device."""

    def states_of(self, index: int, path: Sequence[int]) -> Any:
        return _there(super().states_of(index, path))

    def read_states(self, first: int, count: int) -> Any:
        return _there(super().read_states(first, count))


def _there(states: Any) -> Tensor:
    return torch.from_numpy(states).view(torch.bfloat16)


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


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_hidden_states_reach_a_drafters_thread_where_they_are_and_another_process_as_bytes(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    class Noted(HandedOver):
        def take(self) -> Tensor:
            taken.append(super().take())
            return taken[-1]

    monkeypatch.setattr(drafter_link, "HandedOver", Noted)
    monkeypatch.setattr(
        step,
        "output_of",
        lambda trees, logits, states, pool, rows, successors, stay: (RowsOnDevice if stay else RowsOnHost)(
            trees, logits, states, rows, successors
        ),
    )
    endpoint = {"inproc": "inproc://drafts", "ipc": f"ipc://{tmp_path}/drafts"}[transport]
    with zmq.Context() as context:
        router = Router(context, endpoint, FROM_DRAFTER, unread=64)
        line = Dealer(context, endpoint, DRAFTER, FROM_VERIFIER)
        stage = Stage(router=router)
        line.send(Hello(feature_layers=(1,)))
        while stage.verifier.drafter_link.peer is None:
            stage.verifier._receive()
        stage.submit(1, [10, 11, 12], max_tokens=4)
        for _ in range(3):
            stage.step()
        told: list[Any] = []
        while len(told) < 3:
            told += [arrays[-1] for message, arrays in line.received() if isinstance(message, RoundVerdict)]
        router.close()
        line.close()
    if transport == "inproc":
        assert all(one is given for one, given in zip(told, taken, strict=True))
    else:
        assert not taken
        told = [_there(one.copy()) for one in told]
    assert [one.flatten().tolist() for one in told] == [[10, 11, 12], [13], [14]]
