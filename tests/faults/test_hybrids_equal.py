"""Every way in which a hybrid's text can come about gives the text of plain decoding.

`pytest -m slow -s tests/faults/test_hybrids_equal.py`; TALON_EQUAL=8 for a short run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Engine
from engine.config import load
from engine.core.batch import Batch
from engine.kernels.gemm.product import multiplies
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from tests.conftest import tiny_tokenizer
from tests.engine.test_hybrids import note_preemptions
from tests.engine.weights.family_gguf import draft_head, random_model
from tests.faults.test_batching import THREADS, Asked, alone, random_requests

REQUESTS = int(os.environ.get("TALON_EQUAL", "24"))
SMALL = {"qwen3": 460_000, "lfm2": 260_000}  # bytes: little more than one request needs
DEATHS = {20, 60}  # forwards of several requests that are interrupted
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "8 bits": {"dtype": "bfloat16", "weights": "q8_0", "verifier.kv_type": "q8_0", "activations": "int8"},
}
WITH_HEAD = ("qwen3.5", "qwen3.5 with experts", "qwen3-next")
LOOKUP = [("none", "sequential"), *((name, mode) for name in ("pld", "suffix") for mode in ("sequential", "async"))]
MODELS_OWN = [(name, mode) for name in ("mtp", "hybrid") for mode in ("sequential", "async")]


@pytest.fixture(params=[*WITH_HEAD, "lfm2", "lfm2 with experts"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(family: str, tmp_path: Path) -> str:
    """A random model, with a random draft head where its family has one."""
    model, made = random_model(family), tmp_path / "model"
    model.save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    if family in WITH_HEAD:
        file = made / "model.safetensors"
        save_file(load_file(file) | draft_head(model), file, metadata={"format": "pt"})
    return str(made)


def interrupt_forwards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Interrupt some forwards of several requests from now on, so that their verifier ends. Returns how many were
    counted.
    """
    run, calls = LeanDecoder._run, count()

    def interrupted(decoder: LeanDecoder, batch: Batch, out: Tensor) -> Tensor:
        logits = run(decoder, batch, out)
        if len(batch.segments) > 1 and next(calls) in DEATHS:
            raise MemoryError("no room")
        return logits

    monkeypatch.setattr(LeanDecoder, "_run", interrupted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
async def test_no_draft_neighbour_cache_or_death_changes_a_text(
    family: str, folder: str, numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if numbers == "8 bits" and not multiplies(torch.bfloat16):
        pytest.skip("no product of ours runs on this processor")
    usual: dict[str, Any] = {"transport": "inproc", "verifier.cut": False, "drafter.path": None} | NUMBERS[numbers]
    usual |= THREADS
    requests = random_requests(random.Random(3), REQUESTS)
    target = Target.of_config(load({"model": folder}, NUMBERS[numbers] | {"verifier.kv_memory": 1 << 24}))
    expected = [alone(target, *request) for request in requests]
    del target
    tally, preempted = Counter[str](), note_preemptions(monkeypatch)

    async def compare(what: str, engine: Engine, together: bool, asked: list[Asked]) -> None:
        answers = [engine.generate(*request) for request in asked]
        results = await asyncio.gather(*answers) if together else [await answer for answer in answers]
        tally["texts"] += len(results)
        tally["accepted"] += sum(round(r.metrics.mean_accepted_tokens * 100) > 100 for r in results)
        tally["cached"] += sum(r.metrics.cached_tokens > 0 for r in results)
        different = [i for i, result in enumerate(results) if result.token_ids != expected[i]]
        assert not different, f"{what}: {different} differ"

    for method, mode in [*LOOKUP, *(MODELS_OWN if family in WITH_HEAD else [])]:
        options, name = usual | {"method": method, "mode": mode}, f"{family} {numbers} {method} {mode}"
        kept = {"verifier.cache": str(tmp_path / f"{method}-{mode}"), "verifier.kv_memory": 1 << 24}
        async with await Engine.start({"model": folder}, **options, **kept) as engine:
            await compare(f"{name} cold, together", engine, True, requests)
            await compare(f"{name} warm, one by one", engine, False, requests)
        async with await Engine.start({"model": folder}, **options, **kept) as engine:
            await compare(f"{name} from disk", engine, True, requests)
        with monkeypatch.context() as patched:
            calls = interrupt_forwards(patched)
            room = {"verifier.kv_memory": SMALL[family[:5] if family[0] == "q" else "lfm2"]}
            async with await Engine.start({"model": folder}, **options, **room) as engine:
                await compare(f"{name} small pool, killed", engine, True, requests)
            tally["deaths"] += sum(death < next(calls) for death in DEATHS)
    print(family, numbers, dict(tally), "preempted", len(preempted))
    assert tally["accepted"] and tally["cached"] and tally["deaths"] and (preempted or numbers == "8 bits")
