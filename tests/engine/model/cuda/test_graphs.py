from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine import device as device_module
from engine.device import (
    Download,
    PackedDownload,
    _parts,
    _split_up,
    downloaded,
    own_stream,
    pack_inputs,
    uploaded,
    wait,
)
from engine.model.cuda import graphs
from engine.model.cuda.graphs import CaptureOwner, Recorded, RecordedRows, bucket

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=gpu)]


def stub(monkeypatch: pytest.MonkeyPatch, capture: Callable[..., object]) -> None:
    """Capture by `capture` on the CPU."""
    monkeypatch.setattr(graphs, "_GRAPHS", ("cpu",))
    monkeypatch.setattr(graphs, "_warm_up", lambda *_: None)
    monkeypatch.setattr(graphs, "_captured", lambda *given: capture(*given[:3]))
    monkeypatch.setattr(Recorded, "captures", True)
    monkeypatch.setattr(Recorded, "stuck", False)
    monkeypatch.setattr(Recorded, "told", False)


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


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_of_an_input_of_any_length_what_is_given_is_sent_and_the_work_finds_it_in_the_same_place(
    device: torch.device,
) -> None:
    found: list[int] = []

    def work(x: Tensor, listed: Tensor) -> tuple[Tensor, ...]:
        found.append(listed.data_ptr())
        return (listed[: int(x)].sum(),) if device.type == "cpu" else (x + listed.sum(),)

    recorded = Recorded(work, device, room=9)
    for given in ([3, 4], [5, 6, 7], [8]):
        (total,) = recorded(torch.tensor([len(given)]), torch.tensor(given))
        assert device.type != "cpu" or total == sum(given)
    assert len(set(found)) == 1


def test_to_a_graph_only_what_is_given_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def noted(inputs: Sequence[Tensor], device: torch.device) -> Tensor:
        sent.append(len(pack_inputs(inputs, CPU)))
        return pack_inputs(inputs, CPU)

    monkeypatch.setattr(graphs, "pack_inputs", noted)
    recorded = Recorded(lambda *held: held, torch.device("meta"), room=100)
    for count in (3, 5):
        recorded(torch.tensor([1]), torch.arange(count))
    assert sent == [16 + 48], "the first time all that it has room for is"


def test_work_that_cannot_be_captured_is_called_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def refuse(work: object, inputs: list[Tensor], device: torch.device) -> None:
        tried.append(len(inputs))
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    stub(monkeypatch, refuse)
    owner = CaptureOwner()
    for _ in range(2):
        work = Recorded(lambda x: (x * 2,), CPU, owner=owner)
        for value in (1.0, 2.0):
            assert work(torch.tensor([value]))[0].item() == 2 * value
    assert tried == [1]
    said = "talon: forwards are not captured as CUDA graphs: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == said


def test_work_of_a_drafter_that_cannot_be_captured_leaves_the_captures_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Replayed()

    def capture(work: Callable[..., object], inputs: list[Tensor], device: torch.device) -> object:
        if work is drafts:
            raise RuntimeError("operation not permitted when stream is capturing")
        return graph, (inputs[0],)

    def drafts(x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    stub(monkeypatch, capture)
    target = CaptureOwner()
    for size in (1, 2):
        Recorded(drafts, CPU)(torch.ones(2))
        verify = Recorded(lambda x: (x,), CPU, owner=target)
        verify(torch.ones(size))
        verify(torch.ones(size))
    assert graph.count == 4 and not Recorded.captures


class Replayed:
    """Stands for a graph: counts its replays."""

    count = 0

    def replay(self) -> None:
        self.count += 1


def test_work_whose_graph_has_no_memory_is_called_and_smaller_work_is_still_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = Replayed()

    def capture(work: object, inputs: list[Tensor], device: torch.device) -> tuple[Replayed, tuple[Tensor, ...]]:
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        return graph, (inputs[0],)

    stub(monkeypatch, capture)
    for _ in range(2):
        large = Recorded(lambda x: (x * 2,), CPU)
        for value in (1.0, 2.0):
            assert large(torch.full([8], value))[0].tolist() == [2 * value] * 8
    small = Recorded(lambda x: (x * 2,), CPU)
    small(torch.ones(4))
    small(torch.ones(4))
    assert graph.count == 2
    said = "talon: no memory for a forward's CUDA graph: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert capsys.readouterr().err == said


def test_memory_exhausted_before_a_capture_is_the_callers_and_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, full = Replayed(), [True]

    def warm_up(*_: object) -> None:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    stub(monkeypatch, lambda work, inputs, device: (graph, (inputs[0],)))
    monkeypatch.setattr(graphs, "_warm_up", warm_up)
    work = Recorded(lambda x: (x * 2,), CPU)
    with pytest.raises(torch.OutOfMemoryError):
        work(torch.ones(4))
    full.clear()
    work(torch.ones(4))
    assert graph.count == 1


def test_one_capture_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = [0], [0]

    def capture(work: object, inputs: list[Tensor], device: torch.device) -> tuple[Replayed, tuple[Tensor, ...]]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        running[0] -= 1
        return Replayed(), (inputs[0],)

    stub(monkeypatch, capture)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Recorded(lambda x: (x,), CPU)(torch.ones(2)), range(4)))
    assert most == [1]


class Stream:
    """Stands for a CUDA stream."""

    def __init__(self, device: torch.device, priority: int = 0):
        self.priority = priority
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """Stands for CUDA on a CPU. used: the streams that work was launched on. failing: what a capture ends with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: Stream, failing: RuntimeError | None = None):
        self.used: list[Stream] = []
        self.failing = failing
        self.ended: list[tuple[str, int, object]] = []
        for name, value in {
            "Stream": Stream, "stream": self.on, "graph": self.graph, "CUDAGraph": Replayed,
            "set_stream": lambda _: None, "current_stream": lambda _: here, "current_device": lambda: 3,
            "graph_pool_handle": lambda: (0, 7),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C, name, lambda device, pool, name=name: self.ended.append((name, device, pool)), raising=False
            )
        monkeypatch.setattr(graphs, "_GRAPHS", ("cpu",))
        for name, state in (("captures", True), ("stuck", False)):
            monkeypatch.setattr(Recorded, name, state)
        graphs._aside.cache_clear()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.used.append(stream)
        yield

    @contextmanager
    def graph(self, graph: object, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.used.append(stream)
        yield
        if self.failing is not None:
            raise self.failing


def test_an_invalidated_capture_is_ended_for_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself leaves it under way, and every later capture would find it so."""
    cuda = FakeCuda(monkeypatch, Stream(CPU), RuntimeError("operation failed due to a previous error during capture"))
    for memory, used in ((None, (0, 7)), ((1, 2), (1, 2))):
        Recorded(lambda x: (x,), CPU, memory)(torch.ones(2))
        assert cuda.ended == [("_cuda_endAllocateToPool", 3, used), ("_cuda_releasePool", 3, used)]
        cuda.ended.clear()
    assert not Recorded.stuck
    cuda.failing = None
    Recorded(lambda x: (x,), CPU)(torch.ones(2))
    assert not cuda.ended


def test_after_a_capture_that_could_not_be_ended_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, Stream(CPU), RuntimeError("operation failed due to a previous error during capture"))
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    Recorded(lambda x: (x,), CPU)(torch.ones(2))
    assert Recorded.stuck
    tried = len(cuda.used)
    assert Recorded(lambda x: (x * 2,), CPU)(torch.ones(2))[0].tolist() == [2, 2] and len(cuda.used) == tried


@pytest.mark.parametrize("urgent", [False, True])
def test_a_stream_of_its_own_waits_for_the_one_that_loaded_the_model(
    urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = Stream(CPU)
    cuda = FakeCuda(monkeypatch, loading)
    with own_stream(torch.device("cuda"), urgent):
        [own] = cuda.used
        assert own is not loading and own.waited_for == [loading] and own.priority == -urgent


@pytest.mark.parametrize("priority", [-1, 0])
def test_work_is_warmed_up_and_captured_on_one_stream_of_the_priority_that_it_is_replayed_with(
    priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Stream(CPU, priority)
    used = FakeCuda(monkeypatch, here).used
    for _ in range(2):
        Recorded(lambda x: (x,), CPU)(torch.ones(2))
    graphs._aside.cache_clear()
    assert len(used) == 4 and len(set(map(id, used))) == 1
    assert used[0] is not here and used[0].priority == priority


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_work_on_a_stream_of_its_own_is_waited_for(device: torch.device) -> None:
    with own_stream(device, urgent=True):
        product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        wait(device)
    assert product.sum().item() == 64**3


def test_what_travels_together_comes_out_as_it_was_at_addresses_that_kernels_are_compiled_for() -> None:
    parts = [torch.arange(3), torch.arange(5, dtype=torch.int32), torch.randn(2, 3).bfloat16(), torch.ones(1).bool()]
    packed = pack_inputs(parts, CPU)
    for part, found in zip(parts, _parts(packed, parts), strict=True):
        assert torch.equal(part, found) and part.dtype == found.dtype
        assert (found.data_ptr() - packed.data_ptr()) % 16 == 0


def test_results_of_several_types_are_split_up_as_they_were() -> None:
    parts = [torch.randn(2, 3), torch.arange(4).view(2, 2), torch.ones(3).bfloat16()]
    packed = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    assert all(map(torch.equal, parts, _split_up(packed, parts)))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_goes_up_comes_down_as_it_was(device: torch.device) -> None:
    parts = [torch.arange(3, dtype=torch.int32), torch.randn(2, 3), torch.arange(4).view(2, 2)]
    there = uploaded(parts, device)
    assert {part.device.type for part in there} == {device.type}
    assert all(map(torch.equal, parts, downloaded(there)))
    assert all(map(torch.equal, parts, PackedDownload(there).read()))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_recorded_rows_are_those_of_the_work(rows: int, device: torch.device) -> None:
    work = RecordedRows(lambda x, y: (x + y, x[:, :1] * 2), device, (1, 4))
    for _ in range(2):
        x, y = torch.randn(rows, 3), torch.randn(rows, 3)
        assert all(map(torch.equal, (x + y, x[:, :1] * 2), (part.cpu() for part in work(x, y))))


def test_recorded_rows_take_inputs_that_come_from_the_host_or_are_on_the_device() -> None:
    """Memory that was made for one kind does not fit the other."""
    device = torch.device("meta")
    work = RecordedRows(lambda x, y: (x + y,), device, (4,))
    there, here = torch.ones(3, 2, device=device), torch.ones(3, 2)
    for _ in range(2):
        for given in ((there, there), (there, here), (here, here)):
            (out,) = work(*given)
            assert out.shape == (3, 2) and out.device == device


def test_what_is_on_the_device_already_is_not_copied() -> None:
    device = torch.device("meta")
    there = torch.ones(3, device=device)
    first, second, third = uploaded([torch.ones(2), there, torch.ones(4)], device)
    assert second is there and (len(first), len(third)) == (2, 4) and first.device == third.device == device


def test_results_are_waited_for_when_they_are_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            told.append("recorded")

        def elapsed_time(self, later: object) -> float:
            return 3.0

        def synchronize(self) -> None:
            told.append("waited")

        def query(self) -> bool:
            return len(told) > 5

    class Away:
        device, shape, dtype = torch.device("cuda"), (2,), torch.int64

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(device_module, "_on_its_way", lambda result: torch.arange(2))
    sent = Download([Away()])
    assert told == ["recorded"] and not sent.arrived
    for _ in range(2):
        assert [part.tolist() for part in sent.read()] == [[0, 1]]
    assert told == ["recorded", "waited"] and sent.arrived
    assert Download([Away()]).seconds_after(sent) == 0.003
    assert Download([torch.ones(1)]).seconds_after(sent) == 0, "nothing is waited for on a CPU"
