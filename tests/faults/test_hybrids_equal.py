"""Every way in which a hybrid's text can come about gives the text of plain decoding. Preemptions are those of
`tests/engine/test_hybrids.py`.

`pytest -m slow -s tests/faults/test_hybrids_equal.py`; TALON_EQUAL=8 for a short run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
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
from engine.weights.resolve import target_folder
from tests.conftest import tiny_tokenizer
from tests.engine.weights.family_gguf import draft_head, random_model
from tests.faults.test_batching import Asked, alone, random_requests
from tests.faults.test_faults import THREADS

REQUESTS = int(os.environ.get("TALON_EQUAL", "24"))
SMALL = {"qwen": 370_000, "lfm2": 230_000, "gran": 400_000, "nemo": 560_000, "falc": 920_000, "kimi": 900_000}
"""Bytes: little more than one request needs."""
DEATHS = {20, 60}  # forwards of several requests that are interrupted
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "8 bits": {"dtype": "bfloat16", "weights": "q8_0", "verifier.kv_type": "q8_0", "activations": "int8"},
}
WITH_HEAD = ("qwen3.5", "qwen3.5 with experts", "qwen3-next")
LOOKUP = [("none", "sequential"), *((name, mode) for name in ("pld", "suffix") for mode in ("sequential", "async"))]
MODELS_OWN = [(name, mode) for name in ("mtp", "hybrid") for mode in ("sequential", "async")]


def save(family: str, folder: Path) -> str:
    """A random model, with a random draft head where its family has one."""
    model = random_model(family)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if family in WITH_HEAD:
        file = folder / "model.safetensors"
        save_file(load_file(file) | draft_head(model), file, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[Asked], list[list[int]]]]:
    """A model of a family, requests, and what plain decoding with such numbers answers to each alone."""

    @cache
    def asked(family: str, numbers: str) -> tuple[str, list[Asked], list[list[int]]]:
        folder, requests = save(family, tmp_path_factory.mktemp("model")), random_requests(random.Random(3), REQUESTS)
        config = load({"model": folder}, NUMBERS[numbers] | {"verifier.kv_memory": 1 << 24})
        target = Target.of_config(config.model_copy(update={"model": target_folder(config)}))
        return folder, requests, [alone(target, *request) for request in requests]

    return asked


def interrupt_forwards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Interrupt some forwards of several requests from now on, so that their verifier ends. Returns their counter."""
    run, calls = LeanDecoder._run, count()

    def interrupted(decoder: LeanDecoder, batch: Batch, out: Tensor) -> Tensor:
        logits = run(decoder, batch, out)
        if len(batch.segments) > 1 and next(calls) in DEATHS:
            raise MemoryError("no room")
        return logits

    monkeypatch.setattr(LeanDecoder, "_run", interrupted)
    return calls


FAMILIES = (
    *WITH_HEAD,
    "lfm2",
    "lfm2 with experts",
    "granite 4",
    "granite 4 with experts",
    "nemotron-h",
    "falcon-h1",
    "kimi linear",
)
FROM_GGUF = {"qwen3.5 with experts", "qwen3-next", "lfm2 with experts", "granite 4 with experts", "kimi linear"}
"""In 8 bits they are read from GGUF alone."""
WAYS = [
    (family, method, mode, numbers)
    for family in FAMILIES
    for method, mode in [*LOOKUP, *(MODELS_OWN if family in WITH_HEAD else [])]
    for numbers in NUMBERS
    if numbers == "float32" or family not in FROM_GGUF
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method", "mode", "numbers"), WAYS)
async def test_no_draft_neighbour_cache_or_death_changes_a_text(
    ask: Any, family: str, method: str, mode: str, numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if numbers == "8 bits" and not multiplies(torch.bfloat16):
        pytest.skip("no product of ours runs on this processor")
    folder, requests, expected = ask(family, numbers)
    tally = Counter[str]()
    usual: dict[str, Any] = {"method": method, "mode": mode, "drafter.path": None}
    usual |= {"transport": "inproc", "verifier.cut": False} | THREADS | NUMBERS[numbers]

    async def compare(what: str, together: bool, **options: Any) -> None:
        async with await Engine.start({"model": folder}, **usual | options) as engine:
            for part in (requests, requests[::3]) if together else (requests,):
                answers = [engine.generate(*request) for request in part]
                results = await asyncio.gather(*answers) if together else [await answer for answer in answers]
                tally["texts"] += len(results)
                tally["drafted"] += sum(result.metrics.mean_accepted_tokens > 1 for result in results)
                tally["cached"] += sum(result.metrics.cached_tokens > 0 for result in results)
                right = expected if part is requests else expected[::3]
                different = [i for i, result in enumerate(results) if result.token_ids != right[i]]
                assert not different, f"{what}: {different} differ"

    kept = {"verifier.cache": str(tmp_path), "verifier.kv_memory": 1 << 24}
    await compare("cold, then warm", True, **kept)
    await compare("from disk, one by one", False, **kept)
    calls = interrupt_forwards(monkeypatch)
    await compare("small pool, killed", True, **{"verifier.kv_memory": SMALL[family[:4]]})
    print(family, method, mode, numbers, dict(tally), "forwards", next(calls))
    assert tally["cached"] and next(calls) > min(DEATHS)
