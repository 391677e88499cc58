"""In turns, the drafter is run by the verifier's own worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import Engine, SamplingParams
from engine.config import load
from engine.core.errors import ConfigError
from engine.placement import settled, shares_loop

REPEATING = [5, 6, 7, 8] * 8
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
UNCUT: dict[str, Any] = {"verifier.cut": False, "verifier.threads": 1}


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"method": "pld", "mode": "sequential"}, True),
        ({"method": "suffix", "mode": "async"}, False),
        ({"method": "suffix", "mode": "auto"}, False),
        ({"method": "suffix", "mode": "sequential", "transport": "inproc"}, True),
        ({"method": "suffix", "transport": "tcp", "tcp.keys": "any"}, False),
        ({"method": "sps", "mode": "sequential", "drafter.path": "any"}, True),
        ({"method": "none"}, False),
    ],
)
def test_it_is_where_nothing_could_be_done_at_the_same_time(changes: dict[str, Any], shared: bool) -> None:
    assert shares_loop(load({"model": "any"}, changes)) is shared


AUTO: dict[str, Any] = {"method": "suffix", "mode": "auto", "device": "cpu"}


@pytest.mark.parametrize(
    ("there", "changes", "mode"),
    [
        (2, {"method": "eagle3"}, "sequential"),
        (4, {"method": "eagle3"}, "auto"),
        (4, {}, "sequential"),
        (2, {"mode": "async"}, "async"),
        (2, {"method": "none"}, "auto"),
        (2, {"transport": "tcp", "tcp.keys": "any"}, "auto"),
        (2, {"verifier.simulated_latency_ms": 20}, "auto"),
    ],
)
def test_auto_means_in_turns_where_retrieval_drafts_or_both_at_once_have_too_few_cores(
    monkeypatch: pytest.MonkeyPatch, there: int, changes: dict[str, Any], mode: str
) -> None:
    monkeypatch.setattr("engine.placement.cores", lambda: there)
    config, why = settled(load({"model": "any"}, {"drafter.path": "any"} | AUTO | changes))
    assert config.mode == mode and why is None


def test_where_a_machine_shows_no_gpu_torch_is_not_imported_to_ask_for_one() -> None:
    command = """
import sys
from engine import placement
placement._GPU_FILES = ("/there/is/none",)
config = placement.Config(model="any", method="eagle3", device="auto")
assert not placement.on_gpu(config) and "torch" not in sys.modules
placement._GPU_FILES = ("/",)
placement.on_gpu(config)
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize(
    ("device", "changes", "transport", "said"),
    [
        ("cuda", {"method": "eagle3", "mode": "async"}, "inproc", "in a stream each"),
        ("cuda", {"method": "sps", "mode": "auto"}, "inproc", "in a stream each"),
        ("cuda", {"method": "hybrid", "drafter.head": "medusa", "mode": "auto"}, "inproc", "in a stream each"),
        ("cuda", {"method": "hybrid", "drafter.head": "eagle3", "mode": "auto"}, "ipc", None),  # in turns
        ("cuda", {"method": "block", "mode": "auto"}, "ipc", None),
        ("cuda", {"method": "eagle3", "mode": "async", "transport": "ipc"}, "ipc", "unless MPS runs"),
        ("cuda", {"method": "eagle3", "mode": "sequential"}, "ipc", None),  # in turns, in one process
        ("cuda", {"method": "suffix", "mode": "async"}, "ipc", None),  # drafts on the CPU
        ("cpu", {"method": "eagle3", "mode": "async"}, "ipc", None),
        ("cpu", {"method": "eagle3", "mode": "async", "transport": "inproc"}, "inproc", None),
    ],
)
def test_two_workers_on_one_gpu_share_a_process(
    monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, Any], transport: str, said: str | None
) -> None:
    monkeypatch.setattr("engine.model.loading.find_device", lambda _: torch.device(device))
    config, why = settled(load({"model": "any"}, {"drafter.path": "any"} | changes))
    assert config.transport == transport
    assert why is None if said is None else said in (why or "")


async def test_an_engine_of_threads_ends_the_process_that_began_early(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[float] = []
    early: Any = SimpleNamespace(end=ended.append)
    monkeypatch.setattr("engine.api.begin_imports", lambda _: early)
    threads = load({"model": tiny, "method": "none", "transport": "inproc"}, UNCUT)
    monkeypatch.setattr("engine.api.settled", lambda _: (threads, None))
    async with await Engine.start({"model": tiny, "method": "none"}, **UNCUT) as engine:
        assert engine._workers.in_threads and ended == [0]


async def test_in_turns_one_worker_gives_the_text_of_plain_decoding_in_fewer_rounds(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time `suffix` knows the answer."""
    monkeypatch.setattr("engine.placement.cores", lambda: 2)
    async with await Engine.start({"model": tiny}, method="none", transport="inproc", **UNCUT) as engine:
        expected = (await engine.generate(REPEATING, PARAMS)).token_ids
    async with await Engine.start({"model": tiny}, **UNCUT | AUTO) as engine:
        assert engine.config.mode == "sequential" and list(engine._workers.running) == ["verifier"]
        results = [await engine.generate(REPEATING, PARAMS) for _ in range(2)]
    assert [result.token_ids for result in results] == [expected] * 2
    assert results[1].metrics.mean_accepted_tokens > 1.5


async def test_what_it_cannot_load_is_told_in_one_line(tiny: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with pytest.raises(ConfigError, match=r"drafter\.datastore"):
        await Engine.start({"model": tiny}, method="datastore", **{"drafter.datastore": str(store)})


async def test_its_spans_are_traced_as_the_drafters(tiny: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    async with await Engine.start({"model": tiny}, method="pld", trace=str(trace), **UNCUT) as engine:
        await engine.generate(REPEATING, PARAMS)
    assert {"drafter", "verifier"} <= engine._supervisor.timeline.lanes.keys()
