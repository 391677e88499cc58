"""Targets with the CUDA forward, from their trial at load to a verifier's rounds: on a GPU where there is one, else
through Triton's interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

import triton.language as tl

from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model import cuda_products
from engine.model.cuda import cuda_forward, noise_kernels
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.cuda.graphs import Recorded
from engine.model.cuda.receipt import Receipt
from engine.model.stock import NAME
from engine.model.target import Target
from engine.model.trial import forward_choice
from engine.verifier import step
from engine.wire.messages import Hello
from tests.engine.model.cuda.tiny_forward import accelerated, build, multiply_by_rows, text, use_small_sizes
from tests.engine.test_exact import decoded
from tests.engine.verifier.test_ahead import stage_over, steps
from tests.engine.verifier.test_loop import DRAFTER

pytestmark = pytest.mark.usefixtures("small_sizes")


def stock_only(model: Any) -> Any:
    """The model with a part that the lean layers do not know."""
    model.model.other = nn.Identity()
    return model


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


@pytest.mark.usefixtures("products_by_rows")
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


@pytest.mark.usefixtures("products_by_rows")
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


@pytest.mark.usefixtures("products_by_rows")
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


@pytest.mark.usefixtures("products_by_rows")
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


@pytest.mark.usefixtures("products_by_rows")
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
