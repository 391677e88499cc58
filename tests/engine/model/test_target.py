from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    T5Config,
)

from engine.core.errors import ConfigError, ModelError
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import multiplies
from engine.model.masked import MaskedForward
from engine.model.runner import bfloat16_bits
from engine.model.target import Target
from engine.model.trial.forward_choice import ForwardChoice
from tests.conftest import save_tiny_llama
from tests.engine.tiny_families import COMMON, build

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral with a window", "phi3", "gemma2", "gpt_neox", "phi with norms of heads",
)  # fmt: skip


def random_tree(root: int, truth: list[int], rng: random.Random) -> TokenTree:
    """A tree of right and wrong candidates: parts of the true continuation, and noise beside and below it."""
    tokens, parents = [root], [-1]
    for token in truth[: rng.randrange(5)]:
        tokens.append(token)
        parents.append(len(tokens) - 2)
    for _ in range(rng.randrange(8)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(128)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return TokenTree.from_lists(tokens, parents, [1.0] * len(tokens))


@pytest.fixture(params=["exact attention", "masks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a model is run."""
    if request.param == "masks":
        monkeypatch.setattr(ForwardChoice, "_try_exact", lambda *_: "as the test wants it")
    way: str = request.param
    return way


@pytest.mark.parametrize("family", FAMILIES)
def test_with_masks_logits_and_features_in_a_tree_are_the_stock_forwards_of_each_path(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree grows level by level, and another one follows what was kept of it."""
    monkeypatch.setattr(ForwardChoice, "_try_exact", lambda *_: "as the test wants it")
    model, layers = build(family, "float32"), (0, 2)
    target = Target.of_model(deepcopy(model), family)
    assert isinstance(target.forward, MaskedForward)
    tree, text = TokenTree.from_lists([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 2, 3], [1.0] * 6), [*range(7, 25)]
    cache = target.new_cache(60)
    for at in range(0, len(text), 7):
        target.prefill(cache, text[at : at + 7])
    for _ in range(2):
        levels = pairwise((0, 1, 3, 5, 6))
        parts = [target.verify(cache, tree.keep(range(end)), layers, first=first) for first, end in levels]
        logits, features = (torch.cat([one for one in of if one is not None]) for of in zip(*parts, strict=True))
        for node in range(len(tree)):
            with torch.inference_mode():
                out = model(torch.tensor([text + tree.path_tokens(node)]), output_hidden_states=True)
            states = torch.stack([out.hidden_states[layer][0, -1] for layer in layers])
            torch.testing.assert_close(logits[node], out.logits[0, -1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(features[node], states, atol=1e-4, rtol=1e-4)
        cache.commit([0, 1, 3, 5])
        text += tree.path_tokens(5)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**COMMON, sliding_window=32),
        transformers.MistralConfig(**COMMON, sliding_window=32),
        transformers.Gemma2Config(**COMMON, head_dim=8, sliding_window=32),
    ],
    ids=["a key that the family ignores", "a window in all layers", "a window in every other layer"],
)
def test_a_window_longer_than_what_is_tried_at_load_is_the_models_own(config: Any, way: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    rng = random.Random(3)
    prompt, tree = [rng.randrange(128) for _ in range(60)], TokenTree.from_lists([5, 1, 2, 3], [-1, 0, 0, 1], [1.0] * 4)
    with torch.inference_mode():
        rows = [prompt + tree.path_tokens(node) for node in range(len(tree))]
        expected = torch.stack([model(torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows])
    target = Target.of_model(model, "windowed")
    assert isinstance(target.forward, MaskedForward) != (way == "exact attention")
    cache = target.new_cache(80)
    target.prefill(cache, prompt)
    torch.testing.assert_close(target.verify(cache, tree)[0], expected, atol=1e-4, rtol=1e-4)
    assert model.config.sliding_window == 32


OTHERS = {
    "bloom": BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4),
    "chunks": transformers.Llama4TextConfig(  # a token sees those of its own chunk only
        **COMMON, head_dim=8, num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=64,
    ),
    "neo": GPTNeoConfig(
        vocab_size=128, hidden_size=32, max_position_embeddings=256, attention_types=[[["global", "local"], 1]],
        num_layers=2, num_heads=4, window_size=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bloom", "the bloom family names no max_position_embeddings"),
        ("chunks", "chunked_attention"),
        ("neo", r"gpt_neo family cannot take a tree mask \(its windows count slots"),
    ],
)
def test_a_family_that_cannot_take_a_tree_mask_is_refused_by_name(name: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        Target.of_model(AutoModelForCausalLM.from_config(OTHERS[name]), name)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "nowhere"),
        (T5Config(vocab_size=128, d_model=32), "encoder-decoder"),
        (LlamaConfig(**COMMON), "cannot be loaded"),
    ],
    ids=["nothing", "an encoder and a decoder", "no weights"],
)
def test_a_directory_that_holds_no_model_is_named(tmp_path: Path, config: Any, told: str) -> None:
    if config is not None:
        config.save_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=told):
        Target.load(str(tmp_path / "nowhere"))


def test_positions_that_longrope_would_turn_otherwise_are_no_context() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=rope)
    assert Target.of_model(AutoModelForCausalLM.from_config(config), "phi").context == 64


@pytest.mark.parametrize("family", [LlamaConfig, partial(PhiConfig, qk_layernorm=True)], ids=["lean", "stock"])
def test_the_memory_of_weights_is_known(family: Any) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(family(vocab_size=256, **small)).to(torch.bfloat16)
    whole = sum(weight.nbytes for weight in model.parameters())
    assert 0.9 * whole < Target.of_model(model, "tiny").weight_bytes < 1.3 * whole  # laid out in tiles


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, r"1 weights are missing, model\.layers\.1\.mlp\.up_proj\.weight"),
        (float("nan"), r"weight model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"),
        (float("inf"), r"weight model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"),
    ],
)
def test_a_weight_that_is_missing_or_no_number_is_named(tmp_path: Path, value: float | None, told: str) -> None:
    path = save_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if value is None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=told):
        Target.load(path)


def test_a_model_that_overflows_on_a_short_text_is_told_apart_from_one_that_takes_no_tree(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][:] = 1e38
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"logits of a short text are not numbers \(NaN\) in float32: the model over"):
        Target.load(path, "float32")


def test_dtype_auto_is_the_checkpoints_where_the_cpu_multiplies_it(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path, dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    expected = torch.bfloat16 if multiplies(torch.bfloat16) else torch.float32
    assert Target.load(path, "auto", "cpu").dtype == expected
    assert Target.load(path, "bfloat16", "cpu").dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match="device='cuda'"):
        Target.load(tiny, device="cuda")


def test_models_loaded_at_once_by_several_threads_are_whole(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path, tie_word_embeddings=True)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda _: Target.load(path, "float32", "cpu"), range(12)))) == 12


def test_features_travel_with_the_accuracy_of_bfloat16() -> None:
    features = torch.tensor([[[0.0, -1.0, 3.14159, 1e30, -torch.inf]]])
    bits = bfloat16_bits(features)
    assert bits.dtype == np.uint16
    assert torch.equal(torch.tensor(bits).view(torch.bfloat16), features.to(torch.bfloat16))
