"""Logits of models with latent attention beside those of transformers, which makes keys and values of every head."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engine.core.batch import Segment
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import multiplies
from engine.model.decoder import LeanDecoder
from engine.model.reader.decoder import describe
from engine.model.structure import OtherStructure
from engine.model.target import Target
from tests.engine.test_exact import COMMON, LATENT, MLA, OF_LATENT, VOCABULARY, build, read

LENGTH, FAR = 90, 900
TEXT = [random.Random(1).randrange(VOCABULARY) for _ in range(LENGTH)]
TREE = TokenTree.from_lists([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 1], [1.0] * 6)
families = pytest.mark.parametrize("family", sorted(MLA))
pytestmark = pytest.mark.skipif(not multiplies(torch.float32), reason="no product of ours runs on this processor")


@cache
def loaded(family: str) -> tuple[Any, Target]:
    """The stock model, and the target of a copy."""
    model = build(family, "float32")
    target = Target.of_model(deepcopy(model), family, kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder), target.stock_reason
    return model, target


def stock_logits(family: str, text: list[int], start: int = 0) -> Tensor:
    places = torch.arange(start, start + len(text))[None]
    with torch.inference_mode():
        found: Tensor = loaded(family)[0](torch.tensor([text]), position_ids=places, use_cache=False).logits[0]
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-3 * expected.std())


@families
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_text_read_in_chunks_has_the_logits_of_expanded_keys(family: str, chunk: int) -> None:
    with torch.inference_mode():
        assert close(read(loaded(family)[1], TEXT, chunk), stock_logits(family, TEXT))


@families
def test_a_text_at_far_positions_has_the_logits_of_expanded_keys(family: str) -> None:
    target = loaded(family)[1]
    held = target.new_cache(LENGTH)
    found, _ = target.run([replace(Segment.of_text(TEXT, held, wanted="all"), offset=FAR)])
    target.release(held)
    assert close(found, stock_logits(family, TEXT, FAR))


@families
def test_trees_of_several_requests_have_the_logits_of_their_paths(family: str) -> None:
    target = loaded(family)[1]
    held, starts = [target.new_cache(LENGTH + 32) for _ in range(3)], (80, 40, 1)
    for request, past in zip(held, starts, strict=True):
        target.prefill(request, TEXT[:past])
    logits, _ = target.run([Segment.of_tree(TREE, request) for request in held])
    for number, past in enumerate(starts):
        for node in range(len(TREE)):
            expected = stock_logits(family, [*TEXT[:past], *TREE.path_tokens(node)])[-1]
            assert close(logits[number * len(TREE) + node], expected)
    for request in held:
        target.release(request)


@families
def test_the_pool_holds_one_vector_and_a_rotated_part_whatever_the_heads(family: str) -> None:
    pool = loaded(family)[1].pool
    assert pool is not None
    assert (pool.shape.kv_heads, pool.shape.head_dim) == (1, LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])


@pytest.mark.parametrize(
    "sizes", [{"kv_lora_rank": 40}, {"qk_nope_head_dim": 24}, {"v_head_dim": 20}, {"q_lora_rank": 24}]
)
def test_sizes_that_no_kernel_runs_are_refused(sizes: dict[str, int]) -> None:
    config = DeepseekV3Config(**COMMON | OF_LATENT | sizes)
    with pytest.raises(OtherStructure, match="latent attention with heads of"):
        describe(DeepseekV3ForCausalLM(config))
