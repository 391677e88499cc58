"""Logits of models with states beside those of transformers, whose recurrent form takes one token at a time."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Mamba2Config,
    MiniMaxConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.tree import TokenTree
from engine.model.reader.decoder import describe
from engine.model.structure import OtherStructure
from engine.model.target import Target
from tests.engine.test_exact import COMMON, STATES, VOCABULARY, build, read

LENGTH, PROMPT = 100, 84
TEXT = [random.Random(1).randrange(VOCABULARY) for _ in range(LENGTH)]
TREE = TokenTree.from_lists([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 1], [1.0] * 6)
NO_STEPS = {"granite 4 of Mamba-2 alone"}  # transformers cannot tell how long its cache is, and takes whole texts alone
families = pytest.mark.parametrize("family", sorted(STATES - NO_STEPS))


@cache
def loaded(family: str) -> tuple[Any, Target]:
    """The stock model, and the target of a copy."""
    model = build(family, "float32")
    return model, Target.of_model(deepcopy(model), family, kv_memory=1 << 22)


@cache
def one_by_one(family: str) -> Tensor:
    """[LENGTH, vocab]: transformers' logits, a token at a time."""
    model, past = loaded(family)[0], DynamicCache(config=loaded(family)[0].config)
    with torch.inference_mode():
        rows = [
            model(torch.tensor([[token]]), position_ids=torch.tensor([[place]]), past_key_values=past).logits[0]
            for place, token in enumerate(TEXT)
        ]
        return torch.cat(rows)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-3 * expected.std())


@families
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_text_read_in_chunks_has_the_logits_of_the_recurrent_form(family: str, chunk: int) -> None:
    with torch.inference_mode():
        assert close(read(loaded(family)[1], TEXT, chunk), one_by_one(family))


def test_a_family_with_other_states_is_refused_with_the_reason() -> None:
    model = AutoModelForCausalLM.from_config(MiniMaxConfig(**COMMON | {"num_local_experts": 2})).eval()
    with pytest.raises(ModelError, match=r"minimax has layers with a state, .* does not run here \(MiniMaxLightning"):
        Target.of_model(model, "other", kv_memory=1 << 22)


def test_a_model_none_of_whose_layers_attends_is_refused_with_the_reason() -> None:
    config = Mamba2Config(vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=2, state_size=16)
    with pytest.raises(ModelError, match="no layer of the mamba2 family attends, and its configuration names no"):
        Target.of_model(AutoModelForCausalLM.from_config(config).eval(), "other", kv_memory=1 << 22)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"linear_key_head_dim": 24}, "heads of 24 and 16, which 16 does not divide"),
        ({"linear_conv_kernel_dim": 17}, "a convolution over 17 rows, of which kernels read 16 at most"),
    ],
)
def test_sizes_that_no_kernel_runs_are_refused(sizes: dict[str, int], reason: str) -> None:
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 16, "head_dim": 16}
    usual = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}
    types = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**{**usual, **heads, "linear_key_head_dim": 16, **sizes}, layer_types=types)
    with pytest.raises(OtherStructure, match=reason):
        describe(Qwen3_5ForCausalLM(config))


@families
def test_trees_of_several_requests_have_the_logits_of_their_paths(family: str) -> None:
    """After a draft of which a part was accepted, which is replayed."""
    model, target = loaded(family)
    with torch.inference_mode():
        held = [target.new_cache(LENGTH + 32) for _ in range(3)]
        for request, past in zip(held, (PROMPT, 40, 1), strict=True):
            target.prefill(request, TEXT[:past])
            target.verify(request, TREE)
            request.commit([0, 1, 3])
        logits, _ = target.run([Segment.of_tree(TREE, request) for request in held])
        for number, past in enumerate((PROMPT, 40, 1)):
            for node in range(len(TREE)):
                text = [*TEXT[:past], *TREE.path_tokens(3), *TREE.path_tokens(node)]
                expected = model(torch.tensor([text]), use_cache=False).logits[0, -1]
                assert close(logits[number * len(TREE) + node], expected)
        for request in held:
            target.release(request)
