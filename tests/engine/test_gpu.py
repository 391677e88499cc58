"""What only a GPU can show: that its products and kernels give a row the same bits wherever it stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from engine import Engine, SamplingParams
from engine.model.target import Target
from tests.conftest import save_tiny_llama
from tests.engine.tiny_hybrids import save_tiny_hybrid

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
both_types = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
PROMPTS = [list(text) for text in (b"the cat sat on the mat, the cat", b"1 + 1 = 2, 1 + 2 =", b"zz" * 50)]
SAMPLINGS = [
    SamplingParams(max_tokens=64, ignore_eos=True),
    SamplingParams(max_tokens=64, ignore_eos=True, temperature=1.0, seed=5),
]


@pytest.fixture(params=["llama", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "llama":
        return save_tiny_llama(tmp_path, hidden_size=256, num_hidden_layers=4, intermediate_size=704)
    return save_tiny_hybrid(tmp_path, request.param)


@both_types
def test_a_target_on_a_gpu_is_exact(dtype: str, model: str) -> None:
    pytest.importorskip("triton")
    target = Target.load(model, dtype, "cuda")
    assert target.exact, target.inexact_reason
    assert target.pool is not None and target.pool.keys.device.type == "cuda"


@both_types
async def test_drafts_and_other_requests_do_not_change_a_text_on_a_gpu(dtype: str, model: str) -> None:
    pytest.importorskip("triton")
    settings = {"device": "cuda", "dtype": dtype, "transport": "inproc"}
    async with await Engine.start({"model": model}, method="none", **settings) as engine:
        plain = [(await engine.generate(prompt, way)).token_ids for prompt in PROMPTS for way in SAMPLINGS]
    for method in ("pld", "suffix"):
        async with await Engine.start({"model": model}, method=method, **settings) as engine:
            results = await asyncio.gather(*(engine.generate(prompt, way) for prompt in PROMPTS for way in SAMPLINGS))
            assert [result.token_ids for result in results] == plain
