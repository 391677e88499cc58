from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import multiplies
from engine.kernels.threads import Program, Timed
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from tests.engine.tiny_families import build as build_family

TEXT = [(i * 37) % 128 for i in range(70)]


def build(dtype: torch.dtype, **changes: Any) -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2} | changes
    config = LlamaConfig(
        vocab_size=130, num_hidden_layers=3, max_position_embeddings=256, initializer_range=0.2, **sizes
    )
    return Target.of_model(LlamaForCausalLM(config).to(dtype).eval(), "tiny", kv_memory=1 << 22)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"hidden_size": 48, "intermediate_size": 80, "head_dim": 24}, {"attention_bias": True, "mlp_bias": True}],
    ids=["kernels alone", "sizes that 32 does not divide", "biases"],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_any_batch_gives_a_token_the_same_bits(dtype: torch.dtype, changes: dict[str, Any], threads: int) -> None:
    target = build(dtype, **changes)
    assert isinstance(target.forward, LeanDecoder)
    if not target.exact:
        pytest.skip(target.inexact_reason)
    torch.set_num_threads(1)
    cache = target.new_cache(len(TEXT))
    alone = [target.prefill(cache, [token])[0] for token in TEXT]
    torch.set_num_threads(threads)
    for size in (70, 33, 16, 7):
        cache = target.new_cache(len(TEXT))
        found = []
        for start in range(0, len(TEXT), size):
            chunk = TEXT[start : start + size]
            found.append(target.run([Segment.of_text(chunk, cache, wanted="all")])[0])
            cache.commit(range(len(chunk)))
        assert torch.equal(torch.cat(found).float(), torch.stack(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_every_layer_change_no_logits(dtype: torch.dtype) -> None:
    target = build(dtype)
    model = target.model
    tree = TokenTree.from_lists([9, 8, 7, 6], [-1, 0, 0, 2], [1.0] * 4)
    results = []
    for layers in ((), (0, 1, 2, 3), (2, 0), (3,), (2, 2, 1), (3, 3)):
        cache = target.new_cache(90)
        _, of_text = target.prefill(cache, TEXT, layers)
        results.append((layers, of_text, target.verify(cache, tree, layers)))
    _, _, (expected, nothing) = results[0]
    assert nothing is None
    with torch.no_grad():
        states = model(torch.tensor([[*TEXT, 9, 7, 6]]), output_hidden_states=True).hidden_states
    for layers, of_text, (logits, features) in results[1:]:
        assert torch.equal(logits, expected) and features is not None and of_text is not None
        stock = torch.stack([states[layer][0] for layer in layers], dim=1).float()
        ours = torch.cat([of_text, features[[0, 2, 3]]]).float()
        assert (ours - stock).pow(2).mean().sqrt() <= (1e-4 if dtype == torch.float32 else 0.03) * stock.std()


def test_features_that_were_given_are_left_alone_by_forwards_that_ask_for_none() -> None:
    target = build(torch.bfloat16)
    cache = target.new_cache(90)
    _, features = target.prefill(cache, TEXT, (0, 1, 2))
    assert features is not None
    given = features.clone()
    target.verify(cache, TokenTree.from_lists([9, 8, 7], [-1, 0, 0], [1.0] * 3))
    assert torch.equal(features, given)


@pytest.mark.parametrize("token", [-1, 130])
def test_a_token_that_the_embedding_lacks_is_refused(token: int) -> None:
    target = build(torch.bfloat16)
    with pytest.raises(IndexError, match="from 0 to 129"):
        target.prefill(target.new_cache(4), [5, token])


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no kernel of ours multiplies on this processor")
def test_a_forward_wakes_the_threads_once_and_they_wait_for_each_other_eight_times_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Besides after the embedding, the last norm and the head. With many threads, waiting is a large part of a row."""
    target, woken = build(torch.bfloat16), list[Timed]()
    cache = target.new_cache(4)
    monkeypatch.setattr(Program, "run", partialmethod(Program.run, timed=woken))
    target.run([Segment.of_text([1, 2], cache)])
    assert [len(stretch.seconds()) for stretch in woken] == [3 + 8 * 3]


@pytest.mark.parametrize("rows", [100, 127])
def test_inputs_of_layers_for_fewer_tokens_than_the_model_has_are_refused(rows: int) -> None:
    model = build_family("gemma4 with inputs of layers", "bfloat16", vocab_size_per_layer_input=rows)
    named = rf"^model: vocab_size_per_layer_input={rows} is less than vocab_size=128, .*;"
    with pytest.raises(ModelError, match=named):
        Target.of_model(model, "tiny", kv_memory=1 << 22)
