"""A target whose products take rows of 8 bits, or that keeps keys and values so: a token has the same bits however it
is forwarded, near to the own type of the model. What cannot be had is refused.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from engine.config import Config
from engine.core.batch import Segment
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.model.target import Target
from engine.model.trial import forward_choice
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.weights.tiny_gguf import described_gguf, write_gguf

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
TEXT = [5, 6, 7, 8, 9, 40, 41] * 8
OPTIONS: dict[str, Any] = {"rows": {"activations": "int8"}, "keys": {"kv_type": "q8_0"}}
of_8_bits = pytest.mark.parametrize(
    ("part", "dtype"), [("rows", "bfloat16"), ("keys", "bfloat16"), ("keys", "float32")]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in blocks."""
    file = tmp_path_factory.mktemp("eight") / "tiny.gguf"
    write_gguf(file, Kind.Q4_1)
    return described_gguf(file)


def loaded(model: str, dtype: str = "bfloat16", **options: Any) -> Target:
    return Target.load(model, dtype, "cpu", 1 << 20, **options)


def logits_of(target: Target, cuts: tuple[int, ...] = ()) -> Tensor:
    """Return the logits of all positions of the text, read in chunks that end at the cuts."""
    cache, parts = target.new_cache(len(TEXT)), []
    for start, end in zip((0, *cuts), (*cuts, len(TEXT)), strict=True):
        logits, _ = target.run([Segment.of_text(TEXT[start:end], cache, wanted="all")])
        cache.commit(range(end - start))
        parts.append(logits.clone())
    target.release(cache)
    return torch.cat(parts)


@of_8_bits
def test_a_tokens_logits_are_near_and_the_same_bits_however_it_is_forwarded(
    part: str, dtype: str, tiny: str, folder: str
) -> None:
    """In chunks, and in trees, of which accepted keys and values are moved to the places of rejected ones."""
    model = folder if part == "rows" else tiny
    usual, target = loaded(model, dtype), loaded(model, dtype, **OPTIONS[part])
    assert (usual.activations, usual.kv_type) == ("bfloat16", dtype)
    assert (target.activations, target.kv_type) == (("int8", dtype) if part == "rows" else ("bfloat16", "q8_0"))
    assert target.exact, target.inexact_reason
    whole, expected = logits_of(target), logits_of(usual).float()
    assert 0 < (whole.float() - expected).norm() < 0.1 * expected.norm()
    split, wrong = 21, TEXT[21] + 1
    nodes = [TEXT[split], wrong, TEXT[split + 1], wrong, TEXT[split + 2]]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cuts in ((1,), (16, 17, 40), (31, 33), tuple(range(1, len(TEXT)))):
            assert torch.equal(logits_of(target, cuts), whole)
        cache = target.new_cache(len(TEXT) + 16)
        target.prefill(cache, TEXT[:split])
        tree = TokenTree.from_lists(nodes, [-1, 0, 0, 2, 2], [1.0] * 5)
        logits, _ = target.run([Segment.of_tree(tree, cache)])
        assert torch.equal(logits[[0, 2, 4]], whole[split : split + 3])
        cache.commit([0, 2, 4])
        logits, _ = target.run([Segment.of_text(TEXT[split + 3 :], cache, wanted="all")])
        assert torch.equal(logits, whole[split + 3 :])
        target.release(cache)


def test_what_cannot_be_had_is_refused_in_one_line(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^activations=int8: .*take a GGUF file.*activations=bfloat16$"):
        Target.of_config(Config(model=tiny, device="cpu", activations="int8"))
    usual = forward_choice.ModelProbe.agrees_anywhere
    with monkeypatch.context() as patch:
        patch.setattr(
            forward_choice.ModelProbe,
            "agrees_anywhere",
            lambda trial, target: usual(trial, target) and target.kv_type != "q8_0",
        )
        with pytest.raises(ConfigError, match=r"^verifier\.kv_type=q8_0: .*change too much.*verifier\.kv_type=auto$"):
            loaded(tiny, kv_type="q8_0")
    monkeypatch.setattr(forward_choice.ForwardChoice, "_try_lean", lambda *_: "its structure")
    with pytest.raises(ConfigError, match=r"^verifier\.kv_type=q8_0: only the lean decoder .*verifier\.kv_type=auto$"):
        Target.of_config(Config(model=tiny, device="cpu", verifier={"kv_type": "q8_0"}))


def test_a_files_pass_is_remembered_for_each_type_of_keys(folder: str) -> None:
    for kv_type in ("auto", "q8_0"):
        loaded(folder, kv_type=kv_type)
    found = {file.name for file in Path(folder).glob("proof-*")}
    assert found >= {"proof-bfloat16.msgpack", "proof-bfloat16-q8_0.msgpack"}
    again = loaded(folder, kv_type="q8_0")
    assert again.exact and again.kv_type == "q8_0"
    assert torch.equal(logits_of(again, (20,)), logits_of(again))


@pytest.mark.parametrize(
    ("options", "method"), [({"activations": "int8"}, "suffix"), ({"verifier.kv_type": "q8_0"}, "sps")]
)
async def test_drafts_batches_and_preemption_change_no_text(folder: str, options: dict[str, str], method: str) -> None:
    asked = [(prompt, SamplingParams(max_tokens=32, temperature=t, seed=3)) for t in (0.0, 1.0) for prompt in PROMPTS]
    options |= {"dtype": "bfloat16"}
    async with tiny_engine(folder, folder, "none", **options) as engine:
        plain = [await engine.generate(*one) for one in asked]
    small = options | {"verifier.kv_memory": 1 << 16, "drafter.budget": 4}
    async with tiny_engine(folder, folder, method, **small) as engine:
        alone = [await engine.generate(*one) for one in asked]
        together = await asyncio.gather(*(engine.generate(*one) for one in asked))
    metrics = plain[0].metrics
    assert metrics.exact and options.get("activations", "bfloat16") == metrics.activations
    assert metrics.kv_type == options.get("verifier.kv_type", "bfloat16")
    texts = [result.token_ids for result in plain]
    assert [result.token_ids for result in alone] == texts
    assert [result.token_ids for result in together] == texts
