"""Rounds of a verifier whose head drafts behind the walk down the trees before, the kernels through Triton's
interpreter: what the host is told in the end, and how often it waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

import triton.language as tl

from benchmarks.gpu.rounds import head_of
from drafters.heads import cuda_stack, eagle
from drafters.heads.growth import ranking
from drafters.heads.growth.policies import Adaptive, Dynamic, Policy
from drafters.heads.head_drafter import HeadDrafter
from drafters.hybrid.hybrid import HybridDrafter
from drafters.hybrid.retrieval_advice import RetrievalAdvice
from drafters.lookup.suffix import SuffixDrafter
from engine.core.params import SamplingParams
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime
from engine.drafting.worker import DrafterWorker
from engine.model.cuda import noise_kernels, triton_attention
from engine.model.cuda.receipt import Receipt
from engine.model.target import Target
from engine.verifier import step
from engine.wire.loop_link import LoopRouter
from tests.engine.model.cuda.tiny_forward import LLAMA, accelerated, multiply_by_rows, text, use_small_sizes
from tests.engine.test_exact import decoded
from tests.engine.verifier.stage import Stage, Wire

pytestmark = pytest.mark.skipif(not triton_attention._INTERPRETED, reason="heads are on the CPU here")
CONFIG = LlamaConfig(**LLAMA)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.7, seed=5)
PENALISED = SamplingParams(max_tokens=5, temperature=0.0, presence_penalty=1.0)
PLAIN = dict[str, list[int]]()
"""Texts of the target, by what is asked."""


@pytest.fixture(scope="module")
def target() -> Target:
    """Its next token depends on the latest one above all, so that a head which knows no more is often right."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG).eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.15
        layer.mlp.down_proj.weight.data *= 0.03
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        use_small_sizes(patch)
        multiply_by_rows(patch)
        return accelerated(model)


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_small_sizes(monkeypatch)
    multiply_by_rows(monkeypatch)
    monkeypatch.setattr(step, "output_of", Receipt)
    monkeypatch.setattr(ranking, "_kernels", lambda device: noise_kernels)
    monkeypatch.setattr("drafters.heads.layers.can_multiply", lambda weight: False)
    monkeypatch.setattr("drafters.heads.layers.pack", lambda weight: None)
    monkeypatch.setattr(eagle, "new_stack", cuda_stack.CudaStack)
    monkeypatch.setattr(cuda_stack, "_BLOCKS", 64)
    monkeypatch.setattr(cuda_stack, "_POSITIONS", 1 << 10)
    monkeypatch.setattr(cuda_stack, "SIZES", (2, 4, 8, 16, 24))
    with torch.inference_mode():
        yield


def plain(target: Target, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Return the text of one request alone; several tests ask for the same."""
    asked = f"{prompt} {sampling}"
    if asked not in PLAIN:
        PLAIN[asked] = decoded(target, prompt, sampling)
    return PLAIN[asked]


def drafter_of(target: Target, policy: Policy) -> HeadDrafter:
    """A head that knows what follows a token by itself."""
    model, hidden = target.model, CONFIG.hidden_size

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "embed_tokens.weight":
            return cast(Tensor, model.model.embed_tokens.weight.data)
        if name == "fc.weight":
            return torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
        return torch.ones(shape) if "norm" in name else torch.zeros(shape)

    head: Any = head_of("eagle", CONFIG, made)
    head.lm_head.weight = model.lm_head.weight.data
    return HeadDrafter(head, policy)


class Rounds:
    """Runs requests with a drafter in the verifier's loop. served: with the one that serves a head by default. drafted:
    how many trees were drafted after their verdicts; behind: for how many requests each round was drafted behind its
    walk; more: forwards for nodes that a policy asked for and the device had not selected; reach: the most layers that
    the head drafted of a tree.
    """

    def __init__(
        self,
        target: Target,
        asked: Sequence[tuple[list[int], SamplingParams]],
        patch: pytest.MonkeyPatch,
        served: bool = False,
    ):
        router: Any = LoopRouter()
        method = {"method": "hybrid"} if served else {"method": "eagle", "verifier.cut": False}
        self.stage = Stage(router=router, **{"drafter.path": "any", **method})
        self.drafted, self.behind, self.more, self.reach = 0, list[int](), 0, 0
        verifier = self.stage.verifier
        verifier.timer.costs = CostModel(ForwardTime({1: 1e6, 256: 1e6}))  # any draft is worth its time
        patch.setattr("engine.costs.cost_model._LONGEST_S", 1e9)  # and prompts are read at once
        for part in (verifier, verifier.front_end, verifier.drafter_link, verifier.ahead, verifier.timer):
            part.target = target
        drafter = drafter_of(target, Adaptive(6, 2, depth=2) if served else Dynamic(depth=2, top_k=2, budget=6))
        self.drafter = HybridDrafter(drafter, [SuffixDrafter(6)], 6) if served else drafter
        worker = verifier.inline_drafter = DrafterWorker(self.drafter, cast(Any, Wire()), router.dealer)
        draft_ahead, draft_behind = drafter.head.draft_ahead, drafter.head.draft_behind
        extend = drafter.head.extend

        def ahead(tries: Sequence[Any], policy: Policy) -> None:
            self.drafted += len(tries)
            draft_ahead(tries, policy)

        def behind(tries: Sequence[Any], *given: Any) -> Any:
            self.behind.append(len(tries))
            self.reach = max(self.reach, *(trie.reach for trie in tries))
            return draft_behind(tries, *given)

        def extended(given: Any) -> Any:
            self.more += 1
            return extend(given)

        patch.setattr(drafter.head, "extend", extended)
        patch.setattr(drafter.head, "draft_ahead", ahead)
        patch.setattr(drafter.head, "draft_behind", behind)
        worker.turn()
        verifier._receive()
        for number, (prompt, sampling) in enumerate(asked):
            self.stage.submit(number, prompt, **msgspec.structs.asdict(sampling))
        while [*verifier.scheduler]:
            verifier._step(verifier.scheduler.plan(10**18, verifier.timer.costs, verifier.drafter_link.present))
            worker.turn()
            verifier._receive()
        for number, (prompt, sampling) in enumerate(asked):
            assert self.stage.tokens(number) == plain(target, prompt, sampling)


def test_texts_are_those_of_one_request_alone_and_trees_are_drafted_before_the_host_knows_what_was_accepted(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(text(9, 1), GREEDY), (text(14, 2), SAMPLED), (text(5, 3), GREEDY)]
    rounds = Rounds(target, asked, monkeypatch)
    assert rounds.drafted == 3 and rounds.more == 0, "the first tree of each"
    accepted = {len(tokens.tokens) for tokens in rounds.stage.emitted()}
    assert {1, 2} < accepted, "of several lengths"
    assert rounds.behind[0] == 3 and len(rounds.behind) > 2


@pytest.mark.parametrize("together", [1, 3])
def test_what_serves_a_head_by_default_drafts_behind_the_walk_too_and_the_host_merges_retrieval(
    together: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trees are merged with retrieval's, cut to the nodes that pay, and as deep as the head is sure. Where requests
    are alone, the head drafts on wherever it is asked; together, they get what the device selects.
    """
    asked = [(text(14, 2) * 2, SAMPLED), (text(5, 3), GREEDY), (text(9, 1) * 2, GREEDY)]
    if together > 1:
        monkeypatch.setattr(RetrievalAdvice, "worth_drafting", lambda *_: False)
    for some in (asked,) if together > 1 else (asked[:1], asked[1:2]):
        with pytest.MonkeyPatch.context() as patch:
            rounds = Rounds(target, some, patch, served=True)
        assert rounds.drafted == max(rounds.behind) == len(some), "the first tree of each is drafted after its verdict"
        assert (rounds.more > 0) is (together == 1) and rounds.reach > 0


def test_where_the_host_draws_trees_are_drafted_after_the_verdict_and_texts_are_the_same(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has penalties. What another draws is settled by the host alone."""
    monkeypatch.setattr(noise_kernels, "_TOLERANCE", tl.constexpr(1e3))
    asked = [(text(9, 1), GREEDY), (text(14, 2), SAMPLED), (text(5, 3), PENALISED)]
    rounds = Rounds(target, asked, monkeypatch)
    assert rounds.behind[0] == 2 and rounds.drafted > 6


def test_a_request_that_ends_in_the_middle_of_what_was_accepted_leaves_the_others_drafts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(9, 1)
    ends_at = plain(target, prompt, GREEDY)[4]
    stopped = msgspec.structs.replace(GREEDY, stop_token_ids=(ends_at,))
    rounds = Rounds(target, [(prompt, stopped), (text(5, 3), GREEDY)], monkeypatch)
    assert rounds.drafted == 2
