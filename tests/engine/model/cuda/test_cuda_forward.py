"""The CUDA forward: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

import triton.language as tl

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.kv_shape import KVShape
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model import cuda_products
from engine.model.cuda import cuda_forward, graphs, noise_kernels, triton_attention
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.cuda.graphs import Recorded, Work
from engine.model.cuda.receipt import Receipt
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.stock import NAME, Unsupported
from engine.model.target import Target
from engine.model.trial import forward_choice, probe
from engine.verifier import step
from engine.wire.messages import Hello
from tests.engine.model.test_target import COMMON
from tests.engine.test_exact import decoded, with_siblings
from tests.engine.verifier.test_ahead import stage_over, steps
from tests.engine.verifier.test_loop import DRAFTER

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEATURES = (0, 2)
LLAMA = COMMON | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
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


KINDS = [("llama", torch.bfloat16), *product(list(FAMILIES)[1:3], [torch.float32])]
LEAN = ["llama", "mistral with a window", "qwen2 with biases", "qwen3 with norms of heads"]


def use_small_sizes(patch: pytest.MonkeyPatch) -> None:
    """Forwards of 4 rows, targets' of 2 to 8, chunks of 64 positions, trials of 16 tokens: the interpreter is slow."""
    patch.setattr(probe, "_TOKENS", 16)
    patch.setattr(cuda_products, "SLICE", 4)
    patch.setattr(cuda_products, "SIZES", (2, 4, 8))
    patch.setattr(triton_attention, "CHUNK", 64)


def use_short_chunks(patch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 positions, so that short texts have several."""
    patch.setattr(triton_attention, "CHUNK", 16)
    patch.setattr(triton_attention, "_TILE_BYTES", 0)  # the smallest tiles, which fit into such chunks


def multiply_by_rows(patch: pytest.MonkeyPatch) -> None:
    """Products whose sums are added in one order in any number of rows: a CPU's libraries choose by the rows too."""
    patch.setattr(nn.Linear, "forward", lambda self, x: (x[..., None, :] * self.weight).sum(-1))


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And no gradients."""
    use_small_sizes(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.fixture
def _products_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_by_rows(monkeypatch)


def build(family: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = deepcopy(FAMILIES[family])
    config.num_hidden_layers = layers
    return AutoModelForCausalLM.from_config(config).to(DEVICE, dtype).eval()


def forward_of(family: str, dtype: torch.dtype = torch.float32) -> CudaForward:
    """Over a pool in which what nobody has written is NaN."""
    model = build(family, dtype)
    model.set_attn_implementation(NAME)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pool = KVPool(KVShape(config.num_hidden_layers, 1, head_dim, dtype), 60, DEVICE)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    pool.allocate(3)  # so that blocks do not begin at 0
    return CudaForward(model, pool, 2)


def stock_only(model: Any) -> Any:
    """The model with a part that the lean layers do not know."""
    model.model.other = nn.Identity()
    return model


def lean_of(family: str, dtype: torch.dtype = torch.float32) -> CudaForward:
    """The forward, which has run once and goes on with lean layers."""
    forward = forward_of(family, dtype)
    cache = read(forward, [1, 2])[0]
    cache.release()
    assert forward.take_lean(256)
    return forward


MAKE = {"stock": forward_of, "lean": lean_of}
MADE = [*((*kind, "stock") for kind in KINDS), ("llama", torch.bfloat16, "lean"), (LEAN[3], torch.float32, "lean")]
IN_CHUNKS = [pytest.param(*made, marks=[pytest.mark.slow] * (number not in (2, 3))) for number, made in enumerate(MADE)]
"""Windows, soft caps and lean layers; a row of any of `MADE` is compared with itself alone and in a tree."""


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


def run(forward: CudaForward, *segments: Segment) -> Tensor:
    """[rows, vocab + features]"""
    logits, features = forward(Batch.of(segments), FEATURES)
    assert features is not None
    return torch.cat([logits, features.flatten(1)], dim=1)


def read(forward: CudaForward, tokens: Sequence[int], chunk: int = 8, alone: int = 0) -> tuple[KVCache, Tensor]:
    """A request that has read a text in chunks, the last `alone` tokens one by one, and what came of it."""
    cache, found = KVCache(forward.pool), []
    cache.reserve(len(tokens) + 40)
    whole = len(tokens) - alone
    for at in [*range(0, whole, chunk), *range(whole, len(tokens))]:
        part = tokens[at : min(at + chunk, whole)] if at < whole else [tokens[at]]
        found.append(run(forward, Segment.of_text(part, cache, "all")))
        cache.commit(range(len(part)))
    return cache, torch.cat(found)


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


@pytest.mark.usefixtures("_products_by_rows")
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


@pytest.mark.usefixtures("_products_by_rows")
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


def accelerated(model: Any, draft: bool = False) -> Target:
    """Does what a target does on CUDA with whatever is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_choice.ForwardChoice, "accelerated", True)
        return Target.of_model(model, "tiny", kv_memory=1 << 20, draft=draft)


def target_of(family: str) -> Target:
    return accelerated(build(family, layers=1))


def note_split_sums(patch: pytest.MonkeyPatch) -> list[str]:
    """Where it is noted that a target forbids products to split sums, allows it, or holds them as they are."""
    flags: list[str] = []

    def note(way: str, *_: object) -> bool:
        flags.append(way)
        return True

    for way in ("forbid", "allow", "hold"):
        patch.setattr(forward_choice, f"{way}_split_sums", partial(note, way))
    return flags


@pytest.fixture(scope="module")
def loaded() -> tuple[Target, list[str]]:
    """A mistral with a window and products by rows, and what it noted of split sums: loading tries many forwards.

    A CUDA graph keeps the windows that it was captured with; what stands for one here does too.
    """
    model = build("mistral with a window", layers=1)

    class Keeping(Recorded):
        window = 0

        def __call__(self, *inputs: Tensor, late: Tensor | None = None) -> tuple[Tensor, ...]:
            now, self.window = model.config.sliding_window, self.window or model.config.sliding_window
            model.config.sliding_window = self.window
            out = super().__call__(*inputs, late=late)
            model.config.sliding_window = now
            return out

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        use_small_sizes(patch)
        multiply_by_rows(patch)
        patch.setattr(cuda_forward, "Recorded", Keeping)
        flags = note_split_sums(patch)
        return accelerated(model), flags


@pytest.mark.usefixtures("_products_by_rows")
def test_a_target_takes_the_cuda_forward_and_drafts_do_not_change_its_text(loaded: tuple[Target, list[str]]) -> None:
    """What is recorded with the short windows of its trial is not replayed with the real ones."""
    target, flags = loaded
    assert isinstance(target.forward, CudaForward) and target.exact, target.inexact_reason
    assert target.forward_sizes == cuda_products.SIZES and flags == ["forbid", "hold"]
    prompt, sampling = text(17, 10), SamplingParams(max_tokens=14)
    plain = decoded(target, prompt, sampling)
    assert decoded(target, prompt, sampling, plain) == plain
    assert target.pool is not None and target.pool.free == target.pool.blocks
    stock = Target.of_model(build("mistral with a window", layers=1), "mistral", 1 << 20)
    assert decoded(stock, prompt, sampling) == plain


@pytest.mark.usefixtures("_products_by_rows")
def test_requests_share_blocks_of_a_target_with_the_cuda_forward(loaded: tuple[Target, list[str]]) -> None:
    target, _ = loaded
    tokens = text(BLOCK_SIZE + 3, 11)
    first, second = target.open_cache(60), target.open_cache(60)
    expected, _ = target.prefill(first, tokens)
    first.cache_blocks(tokens)
    second.match_prefix(tokens)
    assert second.length == BLOCK_SIZE and torch.equal(target.prefill(second, tokens[BLOCK_SIZE:])[0], expected)
    for cache in (first, second):
        target.release(cache)


def test_a_model_whose_logits_come_out_otherwise_is_run_with_masks() -> None:
    model = build("llama", layers=1)
    usual = model.config._attn_implementation
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, inputs, out: (out[0] * (1 + (module.config._attn_implementation == NAME)), *out[1:])
    )
    target = accelerated(model)
    assert target.inexact_reason == "its logits differ with exact attention"
    assert target.pool is None and model.config._attn_implementation == usual
    assert target.prefill(target.new_cache(20), [1, 2, 3])[0].isfinite().all()


def test_a_target_whose_bits_depend_on_a_rows_place_says_so() -> None:
    def uneven(module: object, inputs: object, out: Tensor) -> Tensor:
        return out * (1 + 1e-6 * torch.arange(out.shape[1], device=out.device))[:, None]

    model = stock_only(build("llama", layers=1))
    model.model.norm.register_forward_hook(uneven)
    target = accelerated(model)
    assert target.inexact_reason == "a token's logits depend on the rows beside it"


@pytest.mark.usefixtures("_products_by_rows")
def test_a_target_whose_products_agree_in_one_size_alone_is_exact_in_it_and_lets_sums_be_split_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = note_split_sums(monkeypatch)

    def uneven(module: object, inputs: object, out: Tensor) -> Tensor:
        return out * (1 + 1e-5 * (out.shape[1] - cuda_products.SLICE))

    model = stock_only(build("llama", layers=1))
    model.model.layers[0].mlp.up_proj.register_forward_hook(uneven)
    target = accelerated(model)
    assert target.exact and target.forward_sizes == (cuda_products.SLICE,)
    assert flags == ["forbid", "allow", "hold"]
    flags.clear()
    draft = accelerated(model, draft=True)
    assert draft.forward_sizes == (cuda_products.SLICE,) and flags == ["forbid"]


def test_a_target_of_experts_says_that_their_products_are_not_its_own() -> None:
    target = target_of("gpt_oss with sinks")
    assert "is multiplied in a way of its own" in target.inexact_reason


def test_without_triton_a_target_on_cuda_is_run_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.model.cuda.cuda_forward", None)
    target = target_of("llama")
    assert target.inexact_reason == "exact attention on CUDA needs Triton: pip install triton"
    assert target.forward_sizes == (1,)
    assert target.prefill(target.new_cache(20), [1, 2, 3])[0].isfinite().all()


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


@pytest.mark.usefixtures("_products_by_rows")
@pytest.mark.parametrize("tolerance", [2e-9, 1e3], ids=["drawn on the device", "left to the host"])
def test_rounds_that_are_launched_before_the_last_is_read_give_the_texts_of_one_request_alone(
    tolerance: float, loaded: tuple[Target, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = loaded
    monkeypatch.setattr(step, "output_of", Receipt)
    monkeypatch.setattr(noise_kernels, "_TOLERANCE", tl.constexpr(tolerance))
    launched = []
    run_roots = target.run_roots

    def noted(roots: Sequence[Segment], *rest: Any) -> tuple[Tensor, Tensor | None]:
        launched.append(len(roots))
        return run_roots(roots, *rest)

    monkeypatch.setattr(target, "run_roots", noted)
    stage = stage_over(target)
    asked = [
        (text(14, 1), SamplingParams(max_tokens=5)),
        (text(5, 2), SamplingParams(max_tokens=7, temperature=1.2, seed=4)),
        (text(9, 3), SamplingParams(max_tokens=6, temperature=0.8, seed=9)),
    ]
    for number, (prompt, sampling) in enumerate(asked):
        stage.submit(number, prompt, **msgspec.structs.asdict(sampling))
    steps(stage, 20)
    assert launched == [3, 3, 3, 2, 1]
    for number, (prompt, sampling) in enumerate(asked):
        assert stage.tokens(number) == decoded(target, prompt, sampling)
    assert target.pool is not None and target.pool.free == target.pool.blocks


@pytest.mark.usefixtures("_products_by_rows")
def test_hidden_states_that_stay_for_the_drafter_are_those_that_are_sent(
    loaded: tuple[Target, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are those of prompts, of blocks that another request has read, and of accepted paths."""
    target, _ = loaded
    monkeypatch.setattr(step, "output_of", Receipt)
    prompt = text(20, 1)
    told = []
    for stays in (True, False):
        stage = stage_over(target, Hello(feature_layers=(0, 1)))
        stage.drafts.in_process = stays
        for number, asked in ((1, prompt), (2, [*prompt[:17], 5, 6])):
            request = stage.submit(number, asked, max_tokens=6)
            steps(stage, 1)
            expected = decoded(target, asked, SamplingParams(max_tokens=6))
            stage.draft(request, TokenTree.chain(expected[0], expected[1:4], [0.9] * 3))
            steps(stage, 4)
            assert stage.tokens(number) == expected
        told.append([arrays[-1] for _, arrays in stage.verdicts()])
        stage.drafts.inbox.append((DRAFTER, Hello(), []))
        stage.verifier._receive()  # nobody wants what is kept any more
    assert [len(one) for one in told[1]] == [20, 4, 19, 4]
    for there, here in zip(*told, strict=True):
        assert isinstance(there, Tensor) and there.shape == here.shape
        assert (there.view(torch.uint16).cpu().numpy() == here).all()
