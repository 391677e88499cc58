"""Tiny models with the CUDA forward, and texts that they read: on a GPU where there is one, else through Triton's
interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.core.batch import Batch, Segment
from engine.core.kv_shape import KVShape
from engine.model import cuda_products
from engine.model.cuda import triton_attention
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.stock import NAME
from engine.model.target import Target
from engine.model.trial import forward_choice, probe
from tests.conftest import TINY

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEATURES = (0, 2)
LLAMA = TINY | {"vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA |= {"max_position_embeddings": 256, "eos_token_id": None}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "mistral with a window": transformers.MistralConfig(**LLAMA, sliding_window=12),
    "gemma2 with soft caps": transformers.Gemma2Config(**LLAMA, head_dim=8, sliding_window=12),
    "qwen2 with biases": transformers.Qwen2Config(**LLAMA),
    "qwen3 with norms of heads": transformers.Qwen3Config(**LLAMA, head_dim=8),
    "gpt_oss with sinks": transformers.GptOssConfig(
        **LLAMA, head_dim=8, sliding_window=12, num_local_experts=2, num_experts_per_tok=1
    ),
}


def use_small_sizes(patch: pytest.MonkeyPatch) -> None:
    """Take 4 rows a forward, 2 to 8 a target's, 64 positions a chunk, 16 tokens a trial: the interpreter is slow."""
    patch.setattr(probe, "_TOKENS", 16)
    patch.setattr(cuda_products, "SLICE", 4)
    patch.setattr(cuda_products, "SIZES", (2, 4, 8))
    patch.setattr(triton_attention, "CHUNK", 64)


def use_short_chunks(patch: pytest.MonkeyPatch) -> None:
    """Take chunks of 16 positions, so that short texts have several."""
    patch.setattr(triton_attention, "CHUNK", 16)
    patch.setattr(triton_attention, "_TILE_BYTES", 0)  # the smallest tiles, which fit into such chunks


def multiply_by_rows(patch: pytest.MonkeyPatch) -> None:
    """Add the sums of products in one order in any number of rows: a CPU's libraries choose by the rows too."""
    patch.setattr(nn.Linear, "forward", lambda self, x: (x[..., None, :] * self.weight).sum(-1))


def build(family: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = deepcopy(FAMILIES[family])
    config.num_hidden_layers = layers
    return AutoModelForCausalLM.from_config(config).to(DEVICE, dtype).eval()


def forward_of(family: str, dtype: torch.dtype = torch.float32) -> CudaForward:
    """Make a forward over a pool in which what nobody has written is NaN."""
    model = build(family, dtype)
    model.set_attn_implementation(NAME)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pool = KVPool(KVShape(config.num_hidden_layers, 1, head_dim, dtype), 60, DEVICE)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    pool.allocate(3)  # so that blocks do not begin at 0
    return CudaForward(model, pool, 2)


def lean_of(family: str, dtype: torch.dtype = torch.float32) -> CudaForward:
    """Return the forward, which has run once and goes on with lean layers."""
    forward = forward_of(family, dtype)
    cache = read(forward, [1, 2])[0]
    cache.release()
    assert forward.take_lean(256)
    return forward


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


def run(forward: CudaForward, *segments: Segment) -> Tensor:
    """Return [rows, vocab + features]."""
    logits, features = forward(Batch.of(segments), FEATURES)
    assert features is not None
    return torch.cat([logits, features.flatten(1)], dim=1)


def read(forward: CudaForward, tokens: Sequence[int], chunk: int = 8, alone: int = 0) -> tuple[KVCache, Tensor]:
    """Return a request that has read a text in chunks, the last `alone` tokens one by one, and what came of it."""
    cache, found = KVCache(forward.pool), []
    cache.reserve(len(tokens) + 40)
    whole = len(tokens) - alone
    for at in [*range(0, whole, chunk), *range(whole, len(tokens))]:
        part = tokens[at : min(at + chunk, whole)] if at < whole else [tokens[at]]
        found.append(run(forward, Segment.of_text(part, cache, "all")))
        cache.commit(range(len(part)))
    return cache, torch.cat(found)


def accelerated(model: Any, draft: bool = False) -> Target:
    """Do what a target does on CUDA, with whatever is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_choice.ForwardChoice, "accelerated", True)
        return Target.of_model(model, "tiny", kv_memory=1 << 20, draft=draft)
