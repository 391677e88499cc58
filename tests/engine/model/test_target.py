from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
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
    MambaConfig,
    Phi3Config,
    PhiConfig,
    T5Config,
)

from engine.core.errors import ConfigError, ModelError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import multiplies
from engine.model.masked import MaskedForward
from engine.model.runner import bfloat16_bits
from engine.model.target import Target
from engine.model.trial.forward_choice import ForwardChoice
from engine.sampling.sampler import Sampler, verify
from tests.conftest import save_tiny_llama

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with grouped queries": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral with a sliding window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 12}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2}),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "phi with norms of heads": ("PhiConfig", {"qk_layernorm": True}),
}


def build(family: str) -> Any:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**COMMON | options)
    return AutoModelForCausalLM.from_config(config).eval()


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


def decode(
    target: Target, prompt: list[int], truth: list[int], rng: random.Random, count: int
) -> tuple[list[int], int]:
    """Greedy decoding through random trees, the prompt read in chunks; also how many drafted tokens were accepted."""
    sampler = Sampler(SamplingParams(max_tokens=count), prompt, [], target.vocab_size)
    cache = target.new_cache(len(prompt) + count + 16)
    for at in range(0, len(prompt), 7):
        logits, _ = target.prefill(cache, prompt[at : at + 7])
    tokens, accepted = [sampler.draw(sampler.choices(logits[None])[0])], 0
    while sampler.finish_reason is None:
        tree = random_tree(tokens[-1], truth[len(tokens) :], rng)
        logits, _ = target.verify(cache, tree)
        path, new = verify(tree, logits, sampler)
        cache.commit(path)
        tokens += new
        accepted += len(path) - 1
    return tokens, accepted


@pytest.fixture(params=["exact attention", "masks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a model is run."""
    if request.param == "masks":
        monkeypatch.setattr(ForwardChoice, "_try_exact", lambda *_: "as the test wants it")
    way: str = request.param
    return way


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_through_trees_is_greedy_generate_token_for_token(family: str, way: str) -> None:
    model = build(family)
    prompt = [random.Random(1).randrange(128) for _ in range(20)]
    truth = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )[0, len(prompt) :].tolist()
    target = Target.of_model(model, family)
    for seed in range(3):
        tokens, accepted = decode(target, prompt, truth, random.Random(seed), 40)
        assert accepted > 10 or tokens != truth
        first = next((i for i, (a, b) in enumerate(zip(tokens, truth, strict=True)) if a != b), None)
        if first is not None:  # only a tie may differ
            logits, _ = target.prefill(target.new_cache(100), prompt + truth[:first])
            assert abs(logits[tokens[first]] - logits[truth[first]]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_a_tree_are_those_of_each_path_alone(family: str, way: str) -> None:
    target = Target.of_model(build(family), family)
    prompt = [random.Random(2).randrange(128) for _ in range(18)]
    tree = TokenTree.from_lists([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2], [1.0] * 6)
    cache = target.new_cache(40)
    target.prefill(cache, prompt)
    logits, _ = target.verify(cache, tree)
    for node in range(len(tree)):
        alone, _ = target.prefill(target.new_cache(40), prompt + tree.path_tokens(node))
        torch.testing.assert_close(logits[node], alone, atol=1e-4, rtol=1e-4)


def test_a_tree_grown_level_by_level_gives_the_logits_of_the_whole(tiny: str) -> None:
    target = Target.load(tiny)
    cache = target.new_cache(40)
    target.prefill(cache, [5, 6, 7, 8])
    tree = TokenTree.from_lists([9, 10, 11, 12, 13], [-1, 0, 0, 1, 2], [1.0] * 5)
    whole, _ = target.verify(cache, tree)
    parts = [target.verify(cache, tree.keep(range(end)), first=first)[0] for first, end in ((0, 1), (1, 3), (3, 5))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_features_are_the_hidden_states_of_the_layers_asked_for(tiny: str) -> None:
    target = Target.load(tiny)
    cache = target.new_cache(20)
    _, prompt_features = target.prefill(cache, [5, 6, 7], (0, 2))
    _, features = target.verify(cache, TokenTree.chain(8, [9], [1.0]), (0, 2))
    stock = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.inference_mode():
        states = stock(torch.tensor([[5, 6, 7, 8, 9]]), output_hidden_states=True).hidden_states
    expected = torch.stack([states[0][0], states[2][0]], dim=1)
    assert prompt_features is not None and features is not None
    torch.testing.assert_close(torch.cat([prompt_features, features]), expected, atol=1e-5, rtol=1e-5)


LLAMA = COMMON | {"num_key_value_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**LLAMA, sliding_window=32),
        transformers.MistralConfig(**LLAMA, sliding_window=32),
        transformers.Gemma2Config(**LLAMA, head_dim=8, sliding_window=32),
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


def test_a_window_that_is_no_sliding_one_is_refused_though_it_is_longer_than_what_is_tried(way: str) -> None:
    """Chunks: a token sees those of its own chunk only."""
    options = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    config = transformers.Llama4TextConfig(**COMMON | options, attention_chunk_size=64)
    with pytest.raises(ModelError, match="chunked_attention"):
        Target.of_model(AutoModelForCausalLM.from_config(config), "chunks")


def test_a_family_that_cannot_take_a_tree_mask_is_refused_by_name() -> None:
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ModelError, match="the bloom family names no max_position_embeddings"):
        Target.of_model(bloom, "some/bloom")


def test_a_family_whose_window_counts_cache_slots_is_refused_by_name() -> None:
    options = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 8}
    shared = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "max_position_embeddings")}
    model = AutoModelForCausalLM.from_config(GPTNeoConfig(**shared | options))
    with pytest.raises(ModelError, match=r"gpt_neo family cannot take a tree mask \(its windows count slots"):
        Target.of_model(model, "neo")


def test_positions_that_longrope_would_turn_otherwise_are_no_context() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=rope)
    assert Target.of_model(AutoModelForCausalLM.from_config(config), "phi").context == 64


def test_a_model_without_attention_is_refused_by_name() -> None:
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ModelError, match="mamba"):
        Target.of_model(mamba, "some/mamba")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    T5Config(vocab_size=128, d_model=32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder"):
        Target.load(str(tmp_path))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Target.load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("family", [LlamaConfig, partial(PhiConfig, qk_layernorm=True)], ids=["lean", "stock"])
def test_the_memory_of_weights_is_known(family: Any) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(family(vocab_size=256, **small)).to(torch.bfloat16)
    whole = sum(weight.nbytes for weight in model.parameters())
    assert 0.9 * whole < Target.of_model(model, "tiny").weight_bytes < 1.3 * whole  # laid out in tiles


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        Target.load(str(tmp_path))


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
        assert len(list(pool.map(lambda _: Target.load(path, "float32", "cpu"), range(24)))) == 24


def test_features_travel_with_the_accuracy_of_bfloat16() -> None:
    features = torch.tensor([[[0.0, -1.0, 3.14159, 1e30, -torch.inf]]])
    bits = bfloat16_bits(features)
    assert bits.dtype == np.uint16
    assert torch.equal(torch.tensor(bits).view(torch.bfloat16), features.to(torch.bfloat16))
