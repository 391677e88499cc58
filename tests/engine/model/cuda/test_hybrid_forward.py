"""Models of whose layers some are gated delta nets, with the CUDA forward: on a GPU where there is one, else through
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.kernels.state.walk import StateRows
from engine.model import cuda_products
from engine.model.cuda import cuda_forward, device_walk
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.cuda.device_walk import fitting_end
from engine.model.cuda.graphs import Recorded
from engine.model.target import Target
from engine.model.trial import probe
from tests.conftest import TINY
from tests.engine.model.cuda.tiny_forward import DEVICE, accelerated, multiply_by_rows, text, use_small_sizes
from tests.engine.test_exact import decoded
from tests.engine.tiny_hybrids import KINDS

pytestmark = pytest.mark.usefixtures("no_gradients")

PROMPT, SAMPLING = text(4, 10), SamplingParams(max_tokens=5)
TREE = TokenTree.from_lists([1, 2, 3, 4, 5], [-1, 0, 0, 2, 3], [1.0] * 5)


def build(kind: str, **options: Any) -> Any:
    """A model of two layers, the second of which attends."""
    name, others = KINDS[kind]
    others = others | {"num_hidden_layers": 2, "layer_types": [others["layer_types"][0], "full_attention"]}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**TINY | others | options)).to(DEVICE).eval()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A target with forwards of few rows, whose trial at load reads a short text."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        use_small_sizes(patch)
        multiply_by_rows(patch)
        patch.setattr(cuda_products, "SIZES", (4, 8))
        patch.setattr(probe, "_TOKENS", 8)
        patch.setattr(device_walk, "MOST_KEPT", 32)
        yield accelerated(build("qwen3.5"))


def test_drafts_do_not_change_the_text_of_a_hybrid_with_the_cuda_forward(target: Target) -> None:
    assert isinstance(target.forward, CudaForward) and target.exact, target.inexact_reason
    plain = decoded(target, PROMPT, SAMPLING)
    assert decoded(target, PROMPT, SAMPLING, plain) == plain
    assert target.pool is not None and target.pool.layer_states is not None
    assert target.pool.layer_states.has_free(target.pool.layer_states.slots)


def test_requests_of_a_hybrid_do_not_see_each_other(target: Target) -> None:
    caches, texts, alone = [target.open_cache(60) for _ in range(2)], (PROMPT, PROMPT[:2]), []
    for cache, tokens in zip(caches, texts, strict=True):
        target.prefill(cache, tokens)
        alone.append(target.verify(cache, TREE)[0])
    both, _ = target.run([Segment.of_tree(TREE, cache) for cache in caches])
    assert torch.equal(both, torch.cat(alone))
    for cache in caches:
        target.release(cache)


def test_a_forward_that_is_captured_replays_what_is_committed_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a capture the work runs several times."""

    class Warmed(Recorded):
        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if self._inputs is None:
                super().__call__(*inputs)
            return super().__call__(*inputs)

    found, forward = [], target.forward
    assert isinstance(forward, CudaForward)
    for captures in (False, True):
        cache = target.open_cache(60)
        target.prefill(cache, PROMPT)
        target.verify(cache, TREE)
        cache.commit([0, 2, 3])
        if captures:
            monkeypatch.setattr(cuda_forward, "Recorded", Warmed)
            forward.recorded.clear()
        target.verify(cache, TREE)  # which replays the committed rows in place
        cache.commit([0])
        found.append(target.verify(cache, TREE)[0])
        target.release(cache)
    assert torch.equal(*found)


def test_forwards_are_captured_anew_once_the_kept_rows_lie_elsewhere(target: Target) -> None:
    forward, cache = target.forward, target.open_cache(60)
    assert isinstance(forward, CudaForward) and target.pool is not None and target.pool.layer_states is not None
    target.verify(cache, TREE)
    before = dict(forward.recorded)
    target.verify(cache, TREE)
    assert forward.recorded == before
    states = target.pool.layer_states
    states.give_rows(states.take_rows(len(states.store) + 1))
    target.verify(cache, TREE)
    assert not {*forward.recorded.values()} & {*before.values()}
    target.release(cache)


def test_a_forward_ends_before_a_request_whose_kept_rows_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_walk, "MOST_KEPT", 8)
    walked = [StateRows(range(kept), range(-1, kept + 3), [1] * 4, kept, [1, 1], [kept]) for kept in (5, 3, 1)]
    spans = [(0, 4), (4, 8), (8, 12)]
    assert fitting_end(walked, spans, 0, 12) == 8
    assert fitting_end(walked, spans, 4, 12) == 12
    assert fitting_end(walked, spans, 2, 6) == 4, "the first two nodes of a tree are replayed for the others"


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("lfm2", {}, "of such layers a GPU runs gated delta nets alone"),
        ("qwen3.5", {"linear_key_head_dim": 48}, "a gated delta net with heads of 48 and 16"),
    ],
)
def test_other_layers_with_a_state_are_refused_on_cuda_in_one_line(
    kind: str, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_sizes(monkeypatch)
    with pytest.raises(ModelError, match=f"does not run here \\({reason}\\); use device=cpu") as refused:
        accelerated(build(kind, **options))
    assert "\n" not in str(refused.value)
