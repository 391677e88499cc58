"""What verification and drafting cost at a large model's shapes, with random weights: times only, no text and no
acceptance. Not run on a GPU yet.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.checkpoint import TargetWeights
from drafters.eagle3 import Eagle3Head
from engine.target import Target
from engine.tree import TokenTree


def llama(hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=ffn, **more
    )


@dataclass(frozen=True)
class Shapes:
    """draft_vocab: of the model's EAGLE-3 head. sizes: nodes verified. context: tokens before them."""

    model: LlamaConfig
    draft_vocab: int
    sizes: tuple[int, ...]
    context: int


LLAMA_8B = Shapes(
    llama(
        4096, 32, 32, 14336, num_key_value_heads=8, max_position_embeddings=8192, vocab_size=128256, rms_norm_eps=1e-5
    ),
    draft_vocab=32000,
    sizes=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128),
    context=512,
)
TOY = Shapes(
    llama(64, 5, 4, 128, max_position_embeddings=512, vocab_size=512), draft_vocab=256, sizes=(1, 8), context=32
)


def time_verification(shapes: Shapes, device: str) -> dict[int, float]:
    """Milliseconds of the target's forward over a tree of n nodes, by n."""
    with torch.device(device):
        model = LlamaForCausalLM._from_config(shapes.model, dtype=torch.bfloat16)
    target, times = Target(model, "random weights"), {}
    for nodes in shapes.sizes:
        cache = target.new_cache(shapes.context + nodes)
        target.prefill(cache, [token % target.vocab_size for token in range(shapes.context)])
        tree = TokenTree.chain(0, [0] * (nodes - 1), [1.0] * (nodes - 1))
        times[nodes] = _median_ms(partial(target.verify, cache, tree), device)
    return times


def time_drafting(shapes: Shapes, device: str) -> dict[int, float]:
    """Milliseconds of an EAGLE-3 head's draft step over n nodes, by n."""
    model = shapes.model
    embedding = torch.randn(model.vocab_size, model.hidden_size, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        write_random_head(shapes, Path(folder))
        head = Eagle3Head.load(folder, TargetWeights(embedding, embedding, model.num_hidden_layers), device)
    times = {}
    for nodes in [n for n in shapes.sizes if n <= 16]:
        session = head.open([], shapes.context, 64 * nodes)
        features = torch.randn(shapes.context, 3, model.hidden_size, device=device)
        session.commit(0, features, [token % model.vocab_size for token in range(shapes.context)])
        session.root()

        def step(session: Any = session, nodes: int = nodes) -> None:
            session.clear()
            session.extend([0] * nodes, list(range(nodes)))

        times[nodes] = _median_ms(step, device)
    return times


def write_random_head(shapes: Shapes, folder: Path) -> None:
    """An EAGLE-3 checkpoint of these shapes, in the public layout."""
    c, vocab = shapes.model, shapes.draft_vocab
    hidden, kv = c.hidden_size, c.num_key_value_heads * c.head_dim
    sizes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (c.intermediate_size, hidden),
        "midlayer.mlp.up_proj.weight": (c.intermediate_size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, c.intermediate_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    tensors = {name: 0.02 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in sizes.items()}
    drafted = torch.arange(c.vocab_size) < vocab
    save_file({**tensors, "d2t": torch.zeros(vocab, dtype=torch.long), "t2d": drafted}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(c.to_dict() | {"draft_vocab_size": vocab}), encoding="utf8")


def _median_ms(work: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """The median time of some calls, after two warm-up calls."""
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return median(times[2:])


def cost_table(verification: dict[int, float], drafting: dict[int, float], shapes: Shapes, device: str) -> Table:
    table = Table(
        title=f"Costs only: random weights at hidden size {shapes.model.hidden_size}, {shapes.model.num_hidden_layers} "
        f"layers, {device}, behind {shapes.context} tokens"
    )
    for column in ("nodes", "verification ms", "times t(1)", "draft step ms"):
        table.add_column(column, justify="right")
    for nodes, ms in verification.items():
        draft = f"{drafting[nodes]:.2f}" if nodes in drafting else "-"
        table.add_row(str(nodes), f"{ms:.2f}", f"{ms / verification[1]:.2f}", draft)
    return table
