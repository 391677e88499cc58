"""The pieces that heads compute with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from drafters.heads.layers import Linear, PairLinear, Rotary
from engine.kernels.gemm.matmul import units

paired = pytest.mark.skipif(not units() or not units()[0].paired, reason="this processor does not multiply bfloat16")


@paired
@pytest.mark.parametrize("gated", [False, True])
def test_matrices_of_heads_are_kept_in_eight_bits(gated: bool) -> None:
    drawn = torch.Generator().manual_seed(4)
    weight, x = (torch.randn(n, 96, generator=drawn).bfloat16() for n in (64, 5))
    linear = Linear(weight, gated=gated)
    assert linear.matmul is not None and linear.matmul.bytes < 1.1 * weight.numel()
    out = F.linear(x.float(), weight.float())
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    missed = (linear(x).float() - out).norm() / out.norm()
    assert missed < 0.02


@paired
def test_a_matrix_that_does_not_split_into_blocks_is_kept_as_it_is() -> None:
    weight, x = torch.randn(40, 96).bfloat16(), torch.randn(3, 96).bfloat16()
    linear = Linear(weight)
    assert linear.matmul is not None and not linear.matmul.coded
    torch.testing.assert_close(linear(x), F.linear(x.float(), weight.float()).bfloat16())


def test_a_token_is_multiplied_when_it_is_first_read_and_to_the_same_bit_as_all_at_once() -> None:
    drawn = torch.Generator().manual_seed(4)
    embedding, weight, x = (torch.randn(n, m, generator=drawn).bfloat16() for n, m in ((50, 32), (64, 64), (3, 32)))
    asked: list[int] = []

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        asked.extend(tokens.tolist())
        return embedding[tokens]

    few, every = (PairLinear(embed, 50, weight) for _ in range(2))
    every.reserve(range(50))
    asked.clear()
    tokens = torch.tensor([2, 40, 40])
    assert torch.equal(few(tokens, x), every(tokens, x)) and asked == [2, 40]
    few.reserve([40, 7, 2])
    assert asked == [2, 40, 7] and torch.equal(few.of_token[[2, 7, 40]], every.of_token[[2, 7, 40]])


def test_a_longer_table_of_turns_changes_no_position_that_was_there() -> None:
    """Dynamic NTK would rescale all of them past the context."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=300, rope_parameters=rope)
    rotary = Rotary(config, torch.device("cpu"), torch.float32)
    table, halves = rotary.table.clone(), rotary.halves(100)
    rotary.reserve(1000)
    assert len(rotary.table) >= 1000 and torch.equal(rotary.table[: len(table)], table)
    assert torch.equal(rotary.halves(1000)[:100], halves)


def test_attention_of_a_growing_text_does_not_use_a_library_that_plans_each_length_anew() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()
