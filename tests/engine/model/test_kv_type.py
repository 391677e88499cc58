"""A target with keys and values in 8 bits: equal bits however a token is forwarded, near to its own type, refused where
it cannot be had.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from engine.answer import Result
from engine.config import Config
from engine.core.batch import Segment
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.model.target import Target
from engine.model.trial import forward_choice
from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.weights.tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
TEXT = [5, 6, 7, 8, 9, 40, 41] * 8
TYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def loaded(model: str, dtype: str = "bfloat16", kv_type: Any = "q8_0") -> Target:
    return Target.load(model, dtype, "cpu", 1 << 20, kv_type=kv_type)


def logits_of(target: Target, cuts: tuple[int, ...] = ()) -> Tensor:
    """Return the logits of all positions of the text, read in chunks that end at the cuts."""
    cache, parts = target.new_cache(len(TEXT)), []
    for start, end in zip((0, *cuts), (*cuts, len(TEXT)), strict=True):
        logits, _ = target.run([Segment.of_text(TEXT[start:end], cache, wanted="all")])
        cache.commit(range(end - start))
        parts.append(logits.clone())
    target.release(cache)
    return torch.cat(parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in blocks."""
    made = tmp_path_factory.mktemp("kv")
    write_gguf(made / "tiny.gguf", Kind.Q4_1)
    (made / "model").mkdir()
    describe(read_gguf(made / "tiny.gguf", "file"), made / "model", "tiny", "")
    GgufSource.of(made / "tiny.gguf", str(made / "tiny.gguf")).write(made / "model")
    return str(made / "model")


@TYPES
def test_logits_are_near_to_those_of_keys_in_the_models_own_type(tiny: str, dtype: str) -> None:
    usual, target = loaded(tiny, dtype, "auto"), loaded(tiny, dtype)
    assert (usual.kv_type, target.kv_type) == (dtype, "q8_0")
    assert target.exact, target.inexact_reason
    expected, found = logits_of(usual).float(), logits_of(target).float()
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.1 * expected.norm()


@TYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_tokens_logits_are_the_same_bits_however_the_text_is_cut(tiny: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    target = loaded(tiny, dtype)
    whole = logits_of(target)
    for cuts in ((1,), (16, 17, 40), (31, 33), tuple(range(1, len(TEXT)))):
        assert torch.equal(logits_of(target, cuts), whole)


@TYPES
def test_a_trees_nodes_have_the_bits_of_their_paths_and_so_has_what_follows_the_kept_ones(
    tiny: str, dtype: str
) -> None:
    target, split = loaded(tiny, dtype), 21
    whole, cache = logits_of(target), target.new_cache(len(TEXT) + 16)
    target.prefill(cache, TEXT[:split])
    wrong = TEXT[split] + 1
    nodes = [TEXT[split], wrong, TEXT[split + 1], wrong, TEXT[split + 2]]
    tree = TokenTree.from_lists(nodes, [-1, 0, 0, 2, 2], [1.0] * 5)
    logits, _ = target.run([Segment.of_tree(tree, cache)])
    assert torch.equal(logits[[0, 2, 4]], whole[split : split + 3])
    cache.commit([0, 2, 4])  # their keys and values are moved to the places of the wrong ones
    logits, _ = target.run([Segment.of_text(TEXT[split + 3 :], cache, wanted="all")])
    assert torch.equal(logits, whole[split + 3 :])
    target.release(cache)


def test_nearly_twice_as_many_positions_fit_into_the_same_memory(tiny: str) -> None:
    blocks = [loaded(tiny, kv_type=kv_type).pool.blocks for kv_type in ("auto", "q8_0")]
    assert 1.8 * blocks[0] < blocks[1] < 2 * blocks[0]


def test_a_forward_other_than_the_lean_decoder_is_refused_in_one_line(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_choice.ForwardChoice, "_try_lean", lambda *_: "its structure")
    with pytest.raises(ConfigError, match=r"^verifier\.kv_type=q8_0: only the lean decoder .*verifier\.kv_type=auto$"):
        Target.of_config(Config(model=tiny, device="cpu", verifier={"kv_type": "q8_0"}))


def test_a_model_whose_logits_change_too_much_is_refused_in_one_line(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = forward_choice.ModelProbe.agrees_anywhere

    def agrees(trial: Any, target: Any) -> bool:
        return usual(trial, target) and target.kv_type != "q8_0"

    monkeypatch.setattr(forward_choice.ModelProbe, "agrees_anywhere", agrees)
    with pytest.raises(ConfigError, match=r"^verifier\.kv_type=q8_0: .*change too much.*verifier\.kv_type=auto$"):
        loaded(tiny)


def test_a_files_pass_is_remembered_for_each_type_of_keys(folder: str) -> None:
    for kv_type in ("auto", "q8_0"):
        loaded(folder, kv_type=kv_type)
    assert {file.name for file in Path(folder).glob("proof-*")} == {
        "proof-bfloat16.msgpack",
        "proof-bfloat16-q8_0.msgpack",
    }
    again = loaded(folder)
    assert again.exact and again.kv_type == "q8_0"
    assert torch.equal(logits_of(again, (20,)), logits_of(again))


ASKED = [(prompt, SamplingParams(max_tokens=40, temperature=t, seed=3)) for t in (0.0, 1.0) for prompt in PROMPTS]
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "verifier.kv_type": "q8_0"}


@pytest.fixture(scope="module")
def plain(folder: str) -> list[Result]:
    async def answers() -> list[Result]:
        async with tiny_engine(folder, folder, "none", **OPTIONS) as engine:
            return [await engine.generate(*asked) for asked in ASKED]

    return asyncio.run(answers())


@pytest.mark.parametrize("method", ["suffix", "pld", "lookahead", "sps"])
async def test_drafts_batches_and_preemption_change_no_text(folder: str, plain: list[Result], method: str) -> None:
    small = OPTIONS | {"verifier.kv_memory": 1 << 16, "drafter.budget": 4}
    async with tiny_engine(folder, folder, method, **small) as engine:
        alone = [await engine.generate(*asked) for asked in ASKED]
        together = await asyncio.gather(*(engine.generate(*asked) for asked in ASKED))
    assert plain[0].metrics.kv_type == "q8_0" and plain[0].metrics.exact
    texts = [result.token_ids for result in plain]
    assert [result.token_ids for result in alone] == texts
    assert [result.token_ids for result in together] == texts
