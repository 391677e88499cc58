"""The CUDA forward: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.core.batch import Batch, Segment
from engine.core.tree import TokenTree
from engine.model import cuda_products
from engine.model.cuda import cuda_forward, graphs, triton_attention
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.cuda.graphs import Work
from engine.model.kv_cache import KVCache
from engine.model.stock import Unsupported
from tests.engine.model.cuda.tiny_forward import (
    DEVICE,
    FAMILIES,
    FEATURES,
    build,
    forward_of,
    lean_of,
    read,
    run,
    text,
    use_short_chunks,
)  # fmt: skip
from tests.engine.test_exact import with_siblings

pytestmark = pytest.mark.usefixtures("small_sizes")
KINDS = [("llama", torch.bfloat16), *product(list(FAMILIES)[1:3], [torch.float32])]
LEAN = ["llama", "mistral with a window", "qwen2 with biases", "qwen3 with norms of heads"]
MAKE = {"stock": forward_of, "lean": lean_of}
MADE = [*((*kind, "stock") for kind in KINDS), ("llama", torch.bfloat16, "lean"), (LEAN[3], torch.float32, "lean")]
IN_CHUNKS = [pytest.param(*made, marks=[pytest.mark.slow] * (number not in (2, 3))) for number, made in enumerate(MADE)]
"""Windows, soft caps and lean layers; a row of any of `MADE` is compared with itself alone and in a tree."""


@pytest.mark.parametrize(
    ("family", "make"), [*((family, "stock") for family in FAMILIES), *((family, "lean") for family in LEAN)]
)
def test_logits_and_features_are_the_untouched_models(family: str, make: str) -> None:
    forward, model, prompt = MAKE[make](family), build(family), text(18, 1)
    tree, _ = with_siblings(5, text(3, 2), random.Random(3))
    cache, _ = read(forward, prompt)
    found = run(forward, Segment.of_tree(tree, cache))
    for node in range(len(tree)):
        out = model(torch.tensor([prompt + tree.path_tokens(node)], device=DEVICE), output_hidden_states=True)
        expected = torch.cat([out.logits[0, -1], *(out.hidden_states[layer][0, -1] for layer in FEATURES)])
        torch.testing.assert_close(found[node], expected, atol=2e-4, rtol=2e-4)


def test_lean_layers_hold_the_models_matrices_once_and_can_be_dropped() -> None:
    forward, tokens = lean_of("qwen2 with biases"), text(9, 3)
    lean, attention = forward.lean, forward.model.model.layers[1].self_attn
    assert lean is not None
    joined = next(linear for linear in lean.linears if linear.weight.data_ptr() == attention.q_proj.weight.data_ptr())
    assert torch.equal(joined.weight[32:48], attention.k_proj.weight)
    assert torch.equal(joined.bias[48:], attention.v_proj.bias)
    found = read(forward, tokens)[1]
    forward.drop_lean()
    torch.testing.assert_close(read(forward, tokens)[1], found, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["gemma2 with soft caps", "gpt_oss with sinks"])
def test_another_structure_runs_the_stock_forward(family: str) -> None:
    forward = forward_of(family)
    before = read(forward, [1, 2])[1]
    assert not forward.take_lean(256)
    assert torch.equal(read(forward, [1, 2])[1], before)


@pytest.mark.parametrize(("family", "dtype", "make"), IN_CHUNKS, ids=str)
def test_a_text_gives_the_same_bits_in_chunks_of_every_size(family: str, dtype: torch.dtype, make: str) -> None:
    forward, tokens = MAKE[make](family, dtype), text(17, 4)
    whole = read(forward, tokens, 17)[1]  # more rows than those of a forward
    for chunk in (3, 4):  # fewer, and as many
        assert torch.equal(read(forward, tokens, chunk)[1], whole)
    assert torch.equal(read(forward, tokens, 17, alone=4)[1], whole)


@pytest.mark.parametrize(("family", "dtype", "make"), MADE, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_bushy_tree_beside_other_requests(
    family: str, dtype: torch.dtype, make: str
) -> None:
    forward, tokens = MAKE[make](family, dtype), text(26, 5)
    _, alone = read(forward, tokens, alone=8)
    tree, spine = with_siblings(tokens[18], tokens[19:25], random.Random(6))
    assert len(tree) > 2 * cuda_products.SLICE and spine != list(range(7))
    cache, other, third = (read(forward, start)[0] for start in (tokens[:18], text(20, 7), text(5, 8)))
    beside = Segment.of_tree(TokenTree.chain(1, [2, 3], [1.0] * 2), other), Segment.of_text([4], third)
    found = run(forward, beside[0], Segment.of_tree(tree, cache), beside[1])
    assert torch.equal(found[3:-1][spine], alone[18:25])
    cache.commit(spine)  # the rejected siblings' keys are overwritten
    assert torch.equal(run(forward, Segment.of_text(tokens[25:], cache)), alone[25:])


def test_rows_that_fill_up_change_nothing_in_the_pool_and_read_nothing_unwritten() -> None:
    forward = forward_of("llama")
    neighbour, _ = read(forward, text(9, 9))
    before = forward.pool.keys.clone(), forward.pool.values.clone()
    cache = KVCache(forward.pool)
    cache.reserve(20)
    assert run(forward, Segment.of_text([1, 2, 3], cache, "all")).isfinite().all()
    block = int(cache.block_table[0])
    assert block not in neighbour.block_table
    for held, was, lanes in (
        (forward.pool.keys, before[0], (slice(None), block, slice(None), slice(None), slice(3))),
        (forward.pool.values, before[1], (slice(None), block, slice(None), slice(3))),
    ):
        assert held[lanes].isfinite().all()
        held[lanes] = was[lanes]
        torch.testing.assert_close(held, was, atol=0, rtol=0, equal_nan=True)


def test_logits_come_of_the_rows_wanted_alone_and_in_their_order() -> None:
    forward, caches = forward_of("llama"), []
    for _ in range(3):
        caches.append(KVCache(forward.pool))
        caches[-1].reserve(20)
    long, short = text(18, 8), text(5, 9)
    kinds = ((long, "last"), (short, "none"), (short, "all"))
    segments = [Segment.of_text(part, cache, kind) for cache, (part, kind) in zip(caches, kinds, strict=True)]
    logits, features = forward(Batch.of(segments), FEATURES)
    assert features is not None and features.shape == (28, 2, 32)
    assert torch.equal(logits[:1], read(forward, long)[1][-1:, :128])
    assert torch.equal(logits[1:], read(forward, short)[1][:, :128])
    none, features = forward(Batch.of([Segment.of_text(short, caches[0], "none")]))
    assert none.shape == (0, 128) and features is None


def test_one_recorded_forward_of_each_size_serves_texts_of_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    use_short_chunks(monkeypatch)
    forward, tokens = forward_of("llama"), text(40, 1)
    found = read(forward, tokens, 7)[1]  # forwards whose rows see different numbers of chunks are among them
    assert torch.equal(read(forward, tokens, 8)[1], found)
    assert [*forward.recorded] == [(cuda_products.SLICE, FEATURES)]


def test_trying_a_forward_leaves_no_block_taken() -> None:
    given = forward_of("llama")
    forward = CudaForward.tried(given.model, given.pool, 2)
    assert given.pool.free == 57
    assert read(forward, [1, 2])[1].isfinite().all()


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (NameError("no ptxas\nand much more"), Unsupported, r"^no ptxas$"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    ],
)
def test_what_triton_cannot_run_is_unsupported_with_its_reason_unless_it_is_memory(
    error: Exception, raised: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    given = forward_of("llama")
    monkeypatch.setattr(triton_attention.TritonAttention, "__call__", broken)
    with pytest.raises(raised, match=told):
        CudaForward.tried(given.model, given.pool, 2)


@pytest.mark.usefixtures("products_by_rows")
def test_forwards_of_all_sizes_give_a_text_the_same_bits() -> None:
    usual, sized, tokens = forward_of("llama"), forward_of("llama"), text(17, 4)
    sized.sizes = (2, 4, 8, 16)
    alone = read(usual, tokens, 1)[1]
    for chunk in (2, 3, 5, 17):
        assert torch.equal(read(sized, tokens, chunk)[1], alone)
    assert {size for size, *_ in sized.recorded} == {2, 4, 8, 16}


def test_rows_are_padded_to_the_least_size_that_holds_them_and_more_run_in_slices_of_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, ran = forward_of("llama"), []
    forward.sizes = (2, 4, 8)
    run_one = forward._run
    monkeypatch.setattr(forward, "_run", lambda *given: (ran.append(len(given[1])), run_one(*given))[1])
    for rows in (1, 3, 5, 8, 9, 19):
        read(forward, text(rows, 5), rows)
    assert ran == [2, 4, 8, 8, 8, 2, 8, 8, 4]


def test_all_forwards_of_a_model_are_recorded_over_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of prompts too; what a forward leaves there is copied before the next one runs."""
    memories = []

    def captured(work: Work, inputs: Sequence[Tensor], device: torch.device, memory: object) -> tuple[object, ...]:
        memories.append(memory)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cuda_forward, "shared_memory", lambda device: (7, 7))
    monkeypatch.setattr(graphs, "_GRAPHS", ("cpu",))
    monkeypatch.setattr(graphs, "_warm_up", lambda *_: None)
    monkeypatch.setattr(graphs, "_captured", captured)
    forward = forward_of("llama")
    forward.sizes = (2, 8)
    memories.clear()
    forward.recorded.clear()
    read(forward, text(9, 4), 9)
    assert memories == [(7, 7)] * 2 and {size for size, *_ in forward.recorded} == {2, 8}


def test_so_many_rows_run_together_as_attention_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = forward_of("llama")
    forward.sizes = (2, 4, 8)
    cache, _ = read(forward, text(4, 1), 4)
    cache.reserve(200)
    cache.length = 100  # each row behind it sees two chunks of 64
    batch = Batch.of([Segment.of_text(text(8, 2), cache)])
    assert forward._slice_of(batch, 0) == (8, 8)
    monkeypatch.setattr(forward.attention, "capacity", 11)
    assert [forward._slice_of(batch, first) for first in (0, 5)] == [(5, 8), (8, 4)]
    monkeypatch.setattr(forward.attention, "capacity", 1)
    assert forward._slice_of(batch, 0) == (1, 2), "there is always one"


def test_so_many_rows_run_together_as_the_blocks_and_ancestors_that_they_list_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, (tokens, tree) = (
        forward_of("llama"),
        (text(20, 1), TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], [1.0] * 4)),
    )
    forward.sizes = (8,)
    caches = [read(forward, tokens)[0] for _ in range(2)]
    segments = [Segment.of_tree(tree, cache) for cache in caches]
    whole = run(forward, *segments)
    listed = len(caches[0].block_table) + 3  # of its nodes one has an ancestor behind the text beside itself
    for room, end in ((2 * listed + 1, 8), (2 * listed, 7), (listed + 1, 4), (1, 1)):
        monkeypatch.setattr(cuda_forward, "_LISTED", room)
        assert forward._slice_of(Batch.of(segments), 0) == (end, 8)
    monkeypatch.setattr(cuda_forward, "_LISTED", listed + 1)
    assert torch.equal(run(forward, *segments), whole)


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize("place", ["all", "last"])
def test_a_size_in_which_any_operation_gives_a_row_other_bits_is_found(place: str) -> None:
    """Not products alone: a norm chooses its kernel by the rows too."""
    forward = forward_of("llama")
    free = forward.pool.free
    assert forward.agreeing((2, 4, 8)) == (2, 4, 8)
    forward.recorded.clear()

    def uneven(module: object, inputs: object, out: Tensor) -> Tensor:
        rows = out.shape[1]
        at = torch.arange(rows, device=out.device) >= (rows - 1 if place == "last" else 0)
        return out * (1 + 1e-5 * at * (rows == 8))[:, None]

    forward.model.model.layers[1].input_layernorm.register_forward_hook(uneven)
    assert forward.agreeing((2, 4, 8)) == (2, 4)
    assert forward.pool.free == free and forward.sizes == (4,)


def test_sizes_for_which_there_is_no_memory_leave_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = forward_of("llama")
    free, run_one = forward.pool.free, forward._run

    def full(*given: Any) -> tuple[Tensor, ...]:
        if len(given[1]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_one(*given)

    monkeypatch.setattr(forward, "_run", full)
    assert forward.agreeing((2, 4, 8)) == (4,)
    assert forward.pool.free == free and forward.sizes == (4,)


def test_texts_of_no_length_wait_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are captured at the start, and leave the pool as free as before."""
    use_short_chunks(monkeypatch)
    forward = lean_of("llama")
    free = forward.pool.free
    forward.recorded.clear()
    forward.capture(FEATURES, 64)
    graphs = set(forward.recorded)
    assert graphs == {(size, FEATURES) for size in forward.sizes} and forward.pool.free == free
    cache, _ = read(forward, text(4, 1))
    cache.reserve(200)
    for cache.length in (30, 100):
        run(forward, Segment.of_text(text(4, 2), cache, "all"))
    assert set(forward.recorded) == graphs
