"""The steps of a layer against plain operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, Lfm2MoeConfig
from transformers.integrations.bitnet import ActQuant
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Attention
from engine.kernels.gemm.matmul import Matmul, units
from engine.kernels.gemm.product import Product
from engine.kernels.layer.activation import GATE, Activation, gate_kernel
from engine.kernels.layer.decoder_steps import expert_mlp, gated_mlp
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.row_kernels import (
    CAP,
    LAYER_INPUTS,
    ROW_NORM,
    cap_kernel,
    layer_inputs_kernel,
    row_norm_kernel,
)
from engine.kernels.layer.weights import ExpertMlp, GatedMlp, Norm
from engine.kernels.threads import address_of
from engine.model.kv_pool import KVPool
from engine.model.reader.router import routing_of

ROWS, HIDDEN, INNER = 13, 64, 96
TYPES = [torch.float32, torch.bfloat16]
types = pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
multiplied = pytest.mark.skipif(not units(), reason="no kernel of ours multiplies on this processor")


def program_of(dtype: torch.dtype) -> LayerProgram:
    pool = KVPool(KVShape(1, 1, 16, dtype), 1)
    return LayerProgram([Attention(pool, 4)], 16, HIDDEN, dtype, 2)


def ran(program: LayerProgram, rows: int, residual: Tensor) -> Tensor:
    program.residual[:rows] = residual
    program.begin(rows, 0, 0, [torch.zeros(1)])
    program.run()
    return program.buffers["x"][:rows].float()


def rms(x: Tensor, norm: Norm) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.epsilon) * norm.weight


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    return bool((found.float() - expected.float()).abs().max() <= limit * expected.float().abs().max())


@types
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("added", ["whole", "norm", "share", "nothing"])
def test_a_norm_adds_what_a_product_left_and_normalises_the_sum(dtype: torch.dtype, normed: bool, added: str) -> None:
    torch.manual_seed(0)
    program, norm, of_delta = program_of(dtype), *(Norm(torch.randn(HIDDEN), 1e-5) for _ in range(2))
    delta = program.buffer("delta", HIDDEN)
    delta[:ROWS] = torch.randn(ROWS, HIDDEN)
    residual, expected = torch.randn(ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN)
    if added != "nothing":
        program.delta(of_delta if added == "norm" else None, 0.25 if added == "share" else 1.0)
        expected = delta[:ROWS].float() * (0.25 if added == "share" else 1.0)
        expected = rms(expected, of_delta) if added == "norm" else expected
    program.norm(norm if normed else None)
    found = ran(program, ROWS, residual)
    sums = residual + expected
    assert close(program.residual[:ROWS], sums, torch.float32)
    assert close(found, rms(sums, norm) if normed else sums, dtype)


@types
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU], ids=["silu", "gelu"])
def test_a_gate_is_silu_or_gelus_tanh_approximation(dtype: torch.dtype, activation: Activation) -> None:
    torch.manual_seed(0)
    program, x = program_of(dtype), torch.randn(ROWS, HIDDEN)
    gate_up, down = torch.randn(2 * INNER, HIDDEN) / 4, torch.randn(HIDDEN, INNER) / 4
    program.norm(None)
    products = Product(gate_up.to(dtype), gated=False), Product(down.to(dtype))
    gated_mlp(program, GatedMlp(products[0], products[1], INNER, gated=False, activation=activation), "inner", "delta")
    rows = ran(program, ROWS, x)
    gate, up = (rows @ gate_up.to(dtype).float().T).chunk(2, dim=1)
    gelu = activation is Activation.GELU
    act: Callable[[Tensor], Tensor] = (lambda g: F.gelu(g, approximate="tanh")) if gelu else F.silu
    assert close(program.buffers["inner"][:ROWS], act(gate) * up, dtype)


@types
def test_a_clamped_gate_cuts_both_sides_and_adds_one_to_the_ups(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, work = (6 * torch.randn(ROWS, 2 * INNER)).to(dtype), np.zeros(1, GATE)
    out = torch.zeros(ROWS, INNER, dtype=dtype)
    stride = x.stride(0) * x.itemsize
    fields = {"gate": x.data_ptr(), "gate_stride": stride, "up": x[:, INNER:].data_ptr(), "up_stride": stride}
    fields |= {"out": out.data_ptr(), "rows": ROWS, "inner": INNER, "width": x.itemsize}
    for name, value in (fields | {"activation": Activation.CLAMPED}).items():
        work[name] = value
    work["alpha"], work["limit"] = 1.702, 7.0
    gate_kernel()(address_of(work), ROWS)
    gate, up = x.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    assert close(out, gate * torch.sigmoid(1.702 * gate) * (up + 1), dtype)


@types
def test_what_layers_get_beside_the_residual_is_a_norm_of_each_layers_part_and_the_tokens_own(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x, of_tokens, norm = torch.randn(ROWS, 3, 32).to(dtype), torch.randn(ROWS, 3, 32), Norm(torch.randn(32), 1e-5)
    expected, work = 0.7 * (rms(x.float(), norm) + of_tokens), np.zeros(1, LAYER_INPUTS)
    fields = {"x": x.data_ptr(), "of_tokens": of_tokens.data_ptr(), "weight": norm.weight.data_ptr(), "rows": ROWS}
    for name, value in (fields | {"layers": 3, "columns": 32, "width": x.itemsize}).items():
        work[name] = value
    work["epsilon"], work["scale"] = norm.epsilon, 0.7
    layer_inputs_kernel()(address_of(work), ROWS)
    assert close(x, expected, dtype)


@types
@pytest.mark.parametrize("added", ["norm", "share"])
def test_the_sum_is_multiplied_where_a_layer_ends_with_a_factor(dtype: torch.dtype, added: str) -> None:
    torch.manual_seed(0)
    program, of_delta, residual = program_of(dtype), Norm(torch.randn(HIDDEN), 1e-5), torch.randn(ROWS, HIDDEN)
    delta = program.buffer("delta", HIDDEN)
    delta[:ROWS] = torch.randn(ROWS, HIDDEN)
    program.delta(of_delta if added == "norm" else None, 0.5, whole_scale=0.25)
    program.norm(None)
    ran(program, ROWS, residual)
    more = rms(delta[:ROWS].float(), of_delta) if added == "norm" else 0.5 * delta[:ROWS].float()
    assert close(program.residual[:ROWS], 0.25 * (residual + more), torch.float32)


@types
def test_a_norm_over_all_heads_changes_its_columns_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, norm, work = torch.randn(ROWS, 96).to(dtype), Norm(torch.randn(32), 1e-5), np.zeros(1, ROW_NORM)
    before = x.clone()
    fields = {"x": x[:, 16:].data_ptr(), "stride": x.stride(0) * x.itemsize, "weight": norm.weight.data_ptr()}
    fields |= {"rows": ROWS, "columns": 32, "width": x.itemsize}
    for name, value in fields.items():
        work[name] = value
    work["epsilon"] = norm.epsilon
    row_norm_kernel()(address_of(work), ROWS)
    assert close(x[:, 16:48], rms(before[:, 16:48].float(), norm), dtype)
    assert torch.equal(x[:, :16], before[:, :16]) and torch.equal(x[:, 48:], before[:, 48:])


@types
def test_a_norm_of_rows_adds_what_is_beside_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program, norm, beside = program_of(dtype), Norm(torch.randn(HIDDEN), 1e-5), torch.randn(ROWS, HIDDEN).to(dtype)
    rows = program.buffer("rows", HIDDEN)
    rows[:ROWS] = torch.randn(ROWS, HIDDEN)
    expected = rms(rows[:ROWS].float(), norm) + beside.float()
    program.row_norm(norm, rows, 0, beside)
    program.norm(None)
    ran(program, ROWS, torch.zeros(ROWS, HIDDEN))
    assert close(rows[:ROWS], expected, dtype)


@types
def test_clipped_rows_stay_within_the_limit_on_both_sides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program = program_of(dtype)
    rows = program.buffer("rows", 96)
    rows[:ROWS] = 3 * torch.randn(ROWS, 96)
    expected = rows[:ROWS].clamp(-1.5, 1.5)
    program.clip(rows, 1.5)
    program.norm(None)
    ran(program, ROWS, torch.zeros(ROWS, HIDDEN))
    assert torch.equal(rows[:ROWS], expected)


@types
def test_a_product_gets_rows_that_are_rounded_to_eight_bits_as_bitnets_layers_round_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program = program_of(dtype)
    rows = program.buffer("rows", 96)
    rows[:ROWS] = torch.randn(ROWS, 96) * torch.logspace(-7, 3, ROWS)[:, None]
    rows[1], rows[2, :3] = 0, torch.tensor([127.0, 2.5, -3.5])
    with torch.compiler.set_stance("force_eager"):
        expected = ActQuant.apply(rows[:ROWS].clone())
    product = Product(torch.eye(96, dtype=dtype))
    product.rounds = True
    program.product(product, "rows", "made", 96)
    program.norm(None)
    ran(program, ROWS, torch.zeros(ROWS, HIDDEN))
    assert torch.equal(rows[:ROWS], expected) and torch.equal(program.buffers["made"][:ROWS], expected)


@types
def test_rows_of_zeros_are_left_as_they_are_where_a_layer_has_no_norm(dtype: torch.dtype) -> None:
    """The embedding of a padding token is such a row, in a model that normalises only what attention adds."""
    torch.manual_seed(0)
    residual = torch.randn(ROWS, HIDDEN)
    residual[3] = 0
    program = program_of(dtype)
    program.norm(None)
    assert torch.equal(ran(program, ROWS, residual), residual.to(dtype).float())


@types
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_scaled_and_capped_to_the_last(dtype: torch.dtype, cap: float, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    x, work = (4 * torch.randn(3, 37)).to(dtype), np.zeros(1, CAP)
    expected = x.float() / 2
    work["x"], work["rows"], work["columns"], work["width"] = x.data_ptr(), 3, 37, x.itemsize
    work["scale"], work["cap"] = 0.5, cap
    cap_kernel()(address_of(work), 8)
    assert close(x, cap * torch.tanh(expected / cap) if cap else expected, dtype)


def experts_of(dtype: torch.dtype, top_k: int, normalised: bool) -> tuple[ExpertMlp, Callable[[Tensor], Tensor]]:
    """Six experts, and what they make of rows by plain operations."""
    torch.manual_seed(0)
    router = torch.randn(6, HIDDEN).to(dtype) / 4
    gate_up = torch.randn(6, 2 * INNER, HIDDEN).to(dtype) / 4
    down = torch.randn(6, HIDDEN, INNER).to(dtype) / 4
    matmuls = [Matmul(w, gated=True) for w in gate_up], [Matmul(w) for w in down]
    mlp = ExpertMlp(Product(router), matmuls[0], matmuls[1], INNER, top_k, normalised)

    def plain(x: Tensor) -> Tensor:
        shares, chosen = torch.softmax((x @ router.float().T).to(dtype).float(), dim=1).topk(top_k)
        shares = shares / shares.sum(1, keepdim=True) if normalised else shares
        out = torch.zeros_like(x)
        for row, (of_row, which) in enumerate(zip(shares, chosen, strict=True)):
            for share, expert in zip(of_row, which, strict=True):
                gate, up = (gate_up[expert].float() @ x[row]).chunk(2)
                out[row] += share * (down[expert].float() @ (F.silu(gate) * up))
        return out

    return mlp, plain


@multiplied
@types
@pytest.mark.parametrize(("top_k", "normalised"), [(1, True), (2, True), (3, False), (6, True)])
def test_a_row_gets_the_experts_that_its_router_chooses(dtype: torch.dtype, top_k: int, normalised: bool) -> None:
    mlp, plain = experts_of(dtype, top_k, normalised)
    program = program_of(dtype)
    program.norm(None)
    expert_mlp(program, mlp)
    x = ran(program, ROWS, torch.randn(ROWS, HIDDEN))
    assert close(program.buffers["delta"][:ROWS], plain(x), dtype)


@multiplied
@types
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_experts_other_rows_choose(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    mlp, _ = experts_of(dtype, 2, True)
    program, x = program_of(dtype), torch.randn(ROWS, HIDDEN)
    program.norm(None)
    expert_mlp(program, mlp)
    ran(program, ROWS, x)
    together = program.buffers["delta"][:ROWS].clone()
    for first, end in pairwise((0, 1, 2, 5, ROWS)):
        ran(program, end - first, x[first:end])
        assert torch.equal(program.buffers["delta"][: end - first], together[first:end])


@multiplied
@types
@pytest.mark.parametrize("counted", [1, 2])
def test_experts_are_chosen_of_the_groups_whose_best_ones_have_the_largest_sum(
    dtype: torch.dtype, counted: int
) -> None:
    mlp, _ = experts_of(dtype, 2, True)
    program = program_of(dtype)
    program.norm(None)
    expert_mlp(program, replace(mlp, groups=3, top_groups=1, counted=counted, sigmoid=True))
    ran(program, ROWS, torch.randn(ROWS, HIDDEN))
    scores = program.buffers["router"][:ROWS].float().sigmoid().unflatten(1, (3, 2))
    best = (scores.sum(2) if counted == 2 else scores.amax(2)).argmax(1)
    chosen = program._experts[0]._kept[0].view(-1, 2)[:ROWS]
    assert torch.equal(chosen.sort(1).values, torch.stack([2 * best, 2 * best + 1], 1).to(torch.int32))


@multiplied
@pytest.mark.parametrize("family", ["lfm2", "deepseek"])
def test_the_shares_of_tiny_scores_are_those_of_transformers(family: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 2}
    stock: Any = Lfm2MoeTopKRouter(Lfm2MoeConfig(**sizes, num_experts=6, use_expert_bias=False))
    if family == "deepseek":
        stock = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, n_routed_experts=6, n_group=1, topk_group=1))
    torch.manual_seed(3)
    stock.weight.data = torch.randn(6, HIDDEN) / 10 - 17 / HIDDEN  # logits near -17
    mlp, _ = experts_of(torch.float32, 2, True)
    scale, routing = float(stock.routed_scaling_factor), routing_of(stock)
    program, x = program_of(torch.float32), 1 + torch.randn(ROWS, HIDDEN) / 10
    program.norm(None)
    router = Product(stock.weight.detach())
    expert_mlp(program, replace(mlp, router=router, sigmoid=True, scale=scale, least=routing.least))
    ran(program, ROWS, x)
    _, shares, chosen = stock(x)
    expected = torch.zeros(ROWS, 6).scatter(1, chosen, shares.detach())
    kept, _, of_kept = (part.view(-1, 2)[:ROWS] for part in program._experts[0]._kept)
    torch.testing.assert_close(torch.zeros(ROWS, 6).scatter(1, kept.long(), of_kept), expected, rtol=1e-3, atol=1e-6)
    assert (expected.sum(1) < scale / 2).all() == (family == "lfm2")


@multiplied
@types
def test_shares_are_multiplied_by_their_experts_scales(dtype: torch.dtype) -> None:
    mlp, _ = experts_of(dtype, 3, True)
    made = []
    for scales in (None, torch.tensor([0.5, 1.0, 2.0, -1.0, 0.25, 3.0])):
        program = program_of(dtype)
        program.norm(None)
        expert_mlp(program, replace(mlp, scales=scales))
        torch.manual_seed(1)
        ran(program, ROWS, torch.randn(ROWS, HIDDEN))
        chosen, _, shares = (kept.view(-1, 3)[:ROWS] for kept in program._experts[0]._kept)
        made.append(shares if scales is None else shares / scales[chosen.long()])
    torch.testing.assert_close(*made)
