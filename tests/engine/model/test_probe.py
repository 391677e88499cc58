"""What depends on position is the stock forward's at every position that is served, and no other text changes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.core.batch import Segment
from engine.core.tree import TokenTree
from engine.model.decoder import LeanDecoder
from engine.model.decoder_layer import Layer
from engine.model.reader.decoder import describe
from engine.model.structure import OtherStructure
from engine.model.target import Target
from engine.model.trial.probe import far_positions
from tests.engine.tiny_families import COMMON

CONTEXT, ORIGINAL = 256, 64
SIZES = COMMON | {"head_dim": 16, "max_position_embeddings": CONTEXT}
COMMON_STRUCTURE = [
    "ApertusConfig",
    "ArceeConfig",
    "BitNetConfig",
    "CohereConfig",
    "Cohere2Config",
    "Ernie4_5Config",
    "Exaone4Config",
    "GemmaConfig",
    "Gemma2Config",
    "Gemma3TextConfig",
    "GlmConfig",
    "Glm4Config",
    "GraniteConfig",
    "HeliumConfig",
    "HunYuanDenseV1Config",
    "InternLM3Config",
    "IQuestCoderConfig",
    "Jais2Config",
    "Lfm2Config",
    "LlamaConfig",
    "MiniCPM3Config",
    "MinistralConfig",
    "Ministral3Config",
    "MistralConfig",
    "NemotronConfig",
    "OlmoConfig",
    "Olmo2Config",
    "Olmo3Config",
    "PhiConfig",
    "Phi3Config",
    "Qwen2Config",
    "Qwen3Config",
    "SeedOssConfig",
    "SmolLM3Config",
    "StableLmConfig",
    "Starcoder2Config",
]
"""Every family without experts that gets past the check of the lean decoder's structure."""
_OF_A_PART = dict.fromkeys(("NemotronConfig", "PhiConfig", "StableLmConfig"), ("longrope",))
_WITHOUT = {"Phi3Config": ("dynamic",), **_OF_A_PART}
"""Scalings that transformers does not run for a family: factors of all dimensions, where a part of them rotates."""
ROPES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
_OWN_ROTARY = {
    "CohereConfig",
    "Gemma3TextConfig",
    "GlmConfig",
    "LlamaConfig",
    "MiniCPM3Config",
    "Ministral3Config",
    "PhiConfig",
}
"""Families that rotate in ways of their own: in pairs, by kinds of layers, a part of the dimensions, with a scale."""
QUERY_SCALE = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": ORIGINAL}
TREE = TokenTree.from_lists([5, 1, 2, 3, 4], [-1, 0, 0, 1, 3], [1.0] * 5)


def build(family: str, rope: str = "as it is", **changes: Any) -> Any:
    torch.manual_seed(0)
    parameters = ROPES[rope] | {"rope_theta": 1e4}
    if family == "Ministral3Config":
        parameters = QUERY_SCALE | {"rope_type": "default"} | parameters
    if family in ("GlmConfig", "Glm4Config"):
        changes = {"partial_rotary_factor": 1.0} | changes
    if family == "MiniCPM3Config":
        changes = {"qk_rope_head_dim": 16, "num_key_value_heads": 4, "initializer_range": 0.1} | changes
    options = {"original_max_position_embeddings": ORIGINAL} if rope == "longrope" else {}
    config = getattr(transformers, family)(**SIZES | options | changes | {"rope_parameters": parameters})
    return AutoModelForCausalLM.from_config(config).eval()


def text_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(128) for _ in range(length)]


def read(target: Target, text: list[int]) -> Tensor:
    """The logits of every token of a text."""
    cache = target.new_cache(len(text))
    try:
        return target.run([Segment.of_text(text, cache, wanted="all")])[0]
    finally:
        target.release(cache)


@torch.no_grad()
def stock(model: Any, text: list[int]) -> Tensor:
    """The last logits of a text by the model itself."""
    logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return logits


def _grid() -> Iterator[Any]:
    """Yield families and scalings: each family with one, in turn, `_OWN_ROTARY` with all, and all with -m slow."""
    for number, family in enumerate(COMMON_STRUCTURE):
        ropes = [rope for rope in ROPES if rope not in _WITHOUT.get(family, ())]
        for at, rope in enumerate(ropes):
            slow = family not in _OWN_ROTARY and number % len(ropes) != at
            yield pytest.param(family, rope, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("family", "rope"), [*_grid()])
def test_texts_up_to_the_served_length_are_the_stock_forwards_plain_and_drafted(family: str, rope: str) -> None:
    model = build(family, rope)
    untouched, target = deepcopy(model), Target.of_model(model, family, kv_memory=1 << 22)
    assert target.context == (ORIGINAL if rope == "longrope" else CONTEXT)
    for length in (target.context // 2, ORIGINAL + 20, target.context - TREE.depths.max() - 1):
        text = text_of(min(int(length), target.context - 4))
        cache = target.new_cache(target.context + 16)
        plain, _ = target.prefill(cache, text)
        torch.testing.assert_close(plain, stock(untouched, text), atol=1e-3, rtol=1e-3)
        drafted, _ = target.verify(cache, TREE)
        for node in range(len(TREE)):
            if len(text) + int(TREE.depths[node]) < target.context:
                expected = stock(untouched, text + TREE.path_tokens(node))
                torch.testing.assert_close(drafted[node], expected, atol=1e-3, rtol=1e-3)
        target.release(cache)


class Zeros:
    """In the place of a meta model's parameters."""

    def __init__(self, model: Any):
        self.model = model

    def matrix(self, name: str) -> Tensor:
        return torch.zeros(self.model.get_parameter(name).shape)

    vector = matrix

    def experts(self, *_: Any) -> list[Tensor]:
        raise OtherStructure("tested apart")


def test_the_families_of_the_common_structure_are_the_ones_tested() -> None:
    found = set()
    for family in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            text = type(family(**SIZES).get_text_config())  # a family with images would not give it these sizes
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(text(**SIZES))
            rotary = model.model.rotary_emb
            model.model.rotary_emb = type(rotary)(rotary.config)
            for layer in describe(model).layers:
                Layer(layer, Zeros(model), "bfloat16", torch.float32)
        except OtherStructure:
            continue
        except Exception:  # the sizes mean nothing to that family, or a part is missing
            continue
        found.add(type(model.config).__name__)
    assert found == {*COMMON_STRUCTURE, "Lfm3Config", "Qwen3_5TextConfig"}, "the last two have layers with a state"


@pytest.mark.parametrize(
    ("family", "rope"),
    [("LlamaConfig", "dynamic"), ("Phi3Config", "longrope"), ("OlmoConfig", "longrope"), ("GPTNeoXConfig", "dynamic")],
)
def test_a_text_and_a_draft_past_the_limit_change_no_other_text(family: str, rope: str) -> None:
    target = Target.of_model(
        build(family, rope, **({} if "Neo" not in family else {"num_key_value_heads": None})), family
    )
    text = text_of(20)
    expected = read(target, text)
    near, far = target.new_cache(40), target.new_cache(40)
    beyond = replace(Segment.of_text(text, far, wanted="all"), offset=CONTEXT + 100)
    beside, _ = target.run([Segment.of_text(text, near, wanted="all"), beyond])
    assert torch.equal(beside[: len(text)], expected)
    assert torch.equal(read(target, text), expected)


def test_a_scale_by_position_is_seen_by_the_trial_though_no_module_shows_it() -> None:
    scaled, plain = Target.of_model(build("Ministral3Config"), "scaled"), Target.of_model(build("LlamaConfig"), "plain")
    assert not isinstance(scaled.forward, LeanDecoder) and scaled.exact
    assert isinstance(plain.forward, LeanDecoder) and plain.exact


def test_the_trial_leaves_no_table_of_all_positions() -> None:
    decoder = Target.of_model(build("LlamaConfig", max_position_embeddings=1 << 16), "long").forward
    assert isinstance(decoder, LeanDecoder)
    assert len(decoder._rotary.tables[0]) < 1 << 12


def test_far_texts_begin_past_every_limit_and_end_with_the_context() -> None:
    config = transformers.MistralConfig(
        max_position_embeddings=4096,
        sliding_window=512,
        rope_parameters=ROPES["longrope"] | {"rope_theta": 1e4, "factor": 64.0},
    )
    assert far_positions(config, 4096) == [64, 512, 2048, 4072]
    assert far_positions(config, 512) == [64, 256, 488]
    assert far_positions(config, 16) == []
