"""Logits of models with states or latent attention beside those of transformers, which runs states a token at a time
and makes keys and values of every head.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Mamba2Config,
    MiniMaxConfig,
    Qwen3_5TextConfig,
)

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import multiplies
from engine.model.decoder import LeanDecoder
from engine.model.reader.decoder import describe
from engine.model.structure import OtherStructure
from engine.model.target import Target
from tests.engine.test_exact import read
from tests.engine.tiny_families import COMMON, LATENT, MLA, OF_LATENT, STATES, VOCABULARY, build

LENGTH, PROMPT, FAR = 100, 84, 900
TEXT = [random.Random(1).randrange(VOCABULARY) for _ in range(LENGTH)]
TREE = TokenTree.from_lists([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 1], [1.0] * 6)
NO_STEPS = {"granite 4 of Mamba-2 alone"}  # transformers cannot tell how long its cache is, and takes whole texts alone
pytestmark = pytest.mark.skipif(not multiplies(torch.float32), reason="no product of ours runs on this processor")
families = pytest.mark.parametrize("family", sorted((STATES | MLA) - NO_STEPS))


@cache
def loaded(family: str) -> tuple[Any, Target]:
    """The stock model, and the target of a copy."""
    model = build(family, "float32")
    target = Target.of_model(deepcopy(model), family, kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder), target.stock_reason
    return model, target


def stock_logits(family: str, text: list[int], start: int = 0) -> Tensor:
    places = torch.arange(start, start + len(text))[None]
    found: Tensor = loaded(family)[0](torch.tensor([text]), position_ids=places, use_cache=False).logits[0]
    return found


def one_by_one(family: str) -> Tensor:
    """[LENGTH, vocab]: transformers' logits, a token at a time."""
    model = loaded(family)[0]
    past = DynamicCache(config=model.config)
    rows = [
        model(torch.tensor([[token]]), position_ids=torch.tensor([[place]]), past_key_values=past).logits[0]
        for place, token in enumerate(TEXT)
    ]
    return torch.cat(rows)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-3 * expected.std())


@families
@torch.inference_mode()
def test_a_text_read_in_chunks_has_the_logits_of_the_recurrent_form_or_of_expanded_keys(family: str) -> None:
    expected = one_by_one(family) if family in STATES else stock_logits(family, TEXT)
    for chunk in (1, 7, 64):
        assert close(read(loaded(family)[1], TEXT, chunk), expected)


@families
@torch.inference_mode()
def test_trees_of_several_requests_have_the_logits_of_their_paths(family: str) -> None:
    """After a draft of which a part was accepted, which layers with a state replay."""
    target = loaded(family)[1]
    held, starts = [target.new_cache(LENGTH + 32) for _ in range(3)], (PROMPT, 40, 1)
    for request, past in zip(held, starts, strict=True):
        target.prefill(request, TEXT[:past])
        target.verify(request, TREE)
        request.commit([0, 1, 3])
    logits, _ = target.run([Segment.of_tree(TREE, request) for request in held])
    for number, past in enumerate(starts):
        for node in range(len(TREE)):
            text = [*TEXT[:past], *TREE.path_tokens(3), *TREE.path_tokens(node)]
            assert close(logits[number * len(TREE) + node], stock_logits(family, text)[-1])
    for request in held:
        target.release(request)


@pytest.mark.parametrize("family", sorted(MLA))
@torch.inference_mode()
def test_latent_attention_keeps_one_vector_and_a_rotated_part_which_hold_at_far_positions(family: str) -> None:
    target = loaded(family)[1]
    held = target.new_cache(LENGTH)
    found, _ = target.run([replace(Segment.of_text(TEXT, held, wanted="all"), offset=FAR)])
    target.release(held)
    assert close(found, stock_logits(family, TEXT, FAR))
    assert target.pool is not None
    shape = target.pool.shape
    assert (shape.kv_heads, shape.head_dim) == (1, LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            MiniMaxConfig(**COMMON | {"num_local_experts": 2}),
            r"minimax has layers with a state, .* does not run here \(MiniMaxLightning",
        ),
        (
            Mamba2Config(vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=2, state_size=16),
            "no layer of the mamba2 family attends, and its configuration names no",
        ),
    ],
)
def test_a_family_with_other_states_or_with_states_alone_is_refused_with_the_reason(config: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        Target.of_model(AutoModelForCausalLM.from_config(config).eval(), "other", kv_memory=1 << 22)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"linear_key_head_dim": 24}, "heads of 24 and 16, which 16 does not divide"),
        ({"linear_conv_kernel_dim": 17}, "a convolution over 17 rows, of which kernels read 16 at most"),
        *(({name: size}, "latent attention with heads of") for name, size in
          {"kv_lora_rank": 40, "qk_nope_head_dim": 24, "v_head_dim": 20, "q_lora_rank": 24}.items()),
    ],
)  # fmt: skip
def test_sizes_that_no_kernel_runs_are_refused(sizes: dict[str, int], reason: str) -> None:
    delta = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "head_dim": 16}
    delta |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}
    config: Any = DeepseekV3Config(**COMMON | OF_LATENT | sizes)
    if "latent" not in reason:
        config = Qwen3_5TextConfig(**small | delta | sizes)
    with pytest.raises(OtherStructure, match=reason):
        describe(AutoModelForCausalLM.from_config(config))
