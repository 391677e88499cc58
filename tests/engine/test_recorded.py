from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import recorded
from engine.recorded import Recorded, bucket, own_stream, wait

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=gpu)]


@pytest.mark.parametrize(("rows", "filled"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (60, 64)])
def test_a_bucket_is_the_next_power_of_two(rows: int, filled: int) -> None:
    assert bucket(rows) == filled


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_recorded_work_gives_what_the_work_gives(device: torch.device) -> None:
    def work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x @ y, x.sum(0)

    same = Recorded(work, device)
    for seed in range(4):
        torch.manual_seed(seed)
        x, y = torch.randn(3, 5), torch.randn(5, 2)
        for found, expected in zip(same(x, y), work(x, y), strict=True):
            torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_recorded_work_keeps_what_it_writes(device: torch.device) -> None:
    """As keys and values are kept: in a buffer that is the same in every call."""
    held = torch.zeros(8, device=device)

    def work(slots: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return (held.index_copy_(0, slots, values).sum(),)

    kept = Recorded(work, device)
    for slot in range(8):
        (total,) = kept(torch.tensor([slot]), torch.tensor([float(slot)]))
    assert total.item() == sum(range(8))


def test_work_that_cannot_be_captured_is_called_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def refuse(work: object, inputs: list[Tensor], device: torch.device) -> None:
        tried.append(len(inputs))
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(recorded, "_GRAPHS", ("cpu",))
    monkeypatch.setattr(recorded, "_warm_up", lambda *_: None)
    monkeypatch.setattr(recorded, "_captured", refuse)
    monkeypatch.setattr(Recorded, "captures", True)
    for _ in range(2):
        work = Recorded(lambda x: (x * 2,), CPU)
        for value in (1.0, 2.0):
            assert work(torch.tensor([value]))[0].item() == 2 * value
    assert tried == [1]
    said = "talon: forwards are not captured as CUDA graphs: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_work_on_a_stream_of_its_own_is_waited_for(device: torch.device) -> None:
    with own_stream(device, urgent=True):
        product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        wait(device)
    assert product.sum().item() == 64**3
