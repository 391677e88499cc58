"""A target whose products take rows of 8 bits: equal bits however a token is forwarded, and near to bfloat16."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from engine.config import Config
from engine.core.batch import Segment
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.model.target import Target
from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.weights.tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
TEXT = [5, 6, 7, 8, 9, 40, 41] * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in blocks."""
    made = tmp_path_factory.mktemp("int8")
    write_gguf(made / "tiny.gguf", Kind.Q4_1)
    (made / "model").mkdir()
    describe(read_gguf(made / "tiny.gguf", "file"), made / "model", "tiny", "")
    GgufSource.of(made / "tiny.gguf", str(made / "tiny.gguf")).write(made / "model")
    return made / "model"


def logits_of(target: Target) -> Tensor:
    cache = target.new_cache(64)
    logits, _ = target.run([Segment.of_text(TEXT, cache, wanted="all")])
    target.release(cache)
    return logits


def test_rows_of_8_bits_are_exact_and_near_to_bfloat16(folder: Path) -> None:
    usual = Target.load(str(folder), "bfloat16", "cpu", 1 << 20)
    target = Target.load(str(folder), "bfloat16", "cpu", 1 << 20, "int8")
    assert (usual.activations, target.activations) == ("bfloat16", "int8")
    assert target.exact, target.inexact_reason
    expected, found = logits_of(usual).float(), logits_of(target).float()
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_tokens_logits_are_the_same_alone_and_among_others(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    target = Target.load(str(folder), "bfloat16", "cpu", 1 << 20, "int8")
    expected, cache = logits_of(target), target.new_cache(64)
    for at, token in enumerate(TEXT):
        logits, _ = target.run([Segment.of_text([token], cache)])
        cache.commit([0])
        assert torch.equal(logits[0], expected[at])


def test_what_has_no_blocks_is_refused_in_one_line(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"^activations=int8: .*take a GGUF file.*activations=bfloat16$"):
        Target.of_config(Config(model=tiny, device="cpu", activations="int8"))


@pytest.mark.parametrize("method", ["suffix", "pld", "lookahead", "sps"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_drafts_change_no_text_in_rows_of_8_bits(folder: Path, method: str, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    options = {"activations": "int8", "dtype": "bfloat16", "verifier.kv_memory": 1 << 22}
    async with tiny_engine(str(folder), str(folder), "none", **options) as engine:
        plain = [await engine.generate(prompt, sampling) for prompt in PROMPTS]
    async with tiny_engine(str(folder), str(folder), method, **options) as engine:
        alone = [await engine.generate(prompt, sampling) for prompt in PROMPTS]
        together = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))
    assert plain[0].metrics.activations == "int8" and plain[0].metrics.exact
    texts = [result.token_ids for result in plain]
    assert [result.token_ids for result in alone] == texts
    assert [result.token_ids for result in together] == texts
