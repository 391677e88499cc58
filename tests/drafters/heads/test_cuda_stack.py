"""Heads as they draft on CUDA, the kernels through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from drafters.heads import cuda_stack
from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.growth_kernel import Grounds, TreeLayer, select
from drafters.heads.growth.policies import Adaptive, Candidates, Dynamic, TreeBuilder
from engine.core.drafter_protocol import DeviceVerdicts, Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.device import PackedDownload
from engine.model.cuda import graphs, noise_kernels, triton_attention
from engine.model.runner import bfloat16_bits
from tests.drafters.conftest import HIDDEN
from tests.drafters.heads.one_pass.test_block import block
from tests.drafters.heads.test_eagle import eagle, eagle3, same
from tests.drafters.test_many_requests import TEXTS, Build, compare_places, drafter_of
from tests.interpreted_triton import replace_language_once

pytestmark = pytest.mark.skipif(not triton_attention._INTERPRETED, reason="heads are on the CPU here")
POLICY = Dynamic(depth=2, top_k=2, budget=8)  # steps that feed on each other amplify rounding
OUTCOMES = [(1, []), (2, [4]), (3, [21, 22]), (2, [])]
heads = pytest.mark.parametrize("build", [eagle, eagle3, block], ids=lambda build: build.__name__)


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are as they are, and graphs are of few rows, which Triton's interpreter takes one by one."""
    replace_language_once()
    monkeypatch.setattr("drafters.heads.layers.can_multiply", lambda weight: False)
    monkeypatch.setattr("drafters.heads.layers.pack", lambda weight: None)
    monkeypatch.setattr(cuda_stack, "_BLOCKS", 64)
    monkeypatch.setattr(cuda_stack, "_POSITIONS", 1 << 10)
    monkeypatch.setattr(cuda_stack, "SIZES", (2, 4, 8, 10, 14, 16, 24))


def on_cuda(build: Build, folder: Path, target: TargetWeights) -> Any:
    """A head with the stack that it would have on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("eagle", "eagle3", "one_pass.block_weights"):
            patch.setattr(f"drafters.heads.{module}.new_stack", cuda_stack.CudaStack)
        head: Any = build(folder, target)
        assert isinstance(head.stack, cuda_stack.CudaStack)
        return head


def in_turns(build: Build, folder: Path, target: TargetWeights) -> Any:
    """A head on CUDA whose layers are drafted as the policy asks for them."""
    head = on_cuda(build, folder, target)
    head.__class__ = type("InTurns", (type(head),), {"drafts_ahead": False})
    return head


def plain(build: Build, folder: Path, target: TargetWeights) -> Any:
    """Return the head without any stack."""
    head: Any = build(folder, target)
    head.stack = None
    return head


@heads
def test_trees_of_several_requests_are_those_of_plain_operations(
    build: Build, tmp_path: Path, target: TargetWeights
) -> None:
    of = [drafter_of(make(build, tmp_path / make.__name__, target), list(TEXTS), POLICY) for make in (on_cuda, plain)]
    for wanted in (OUTCOMES, OUTCOMES[:2]):
        trees = [drafter.propose_many(wanted) for drafter in of]
        assert all(same(one, other) for one, other in zip(*trees, strict=True))
        for request in TEXTS:  # the roots alone are accepted
            more = torch.randn(1, len(of[0].feature_layers), HIDDEN, generator=torch.manual_seed(request))
            for drafter in of:
                root = TokenTree.root_only(drafter.last_token(request))
                drafter.observe(request, Verdict(root, [0], [33], bfloat16_bits(more)))


@pytest.mark.parametrize("build", [eagle3, block], ids=lambda build: build.__name__)
def test_features_that_stay_on_the_device_are_read_as_those_from_the_host_are(
    build: Build, tmp_path: Path, target: TargetWeights
) -> None:
    there, here = (on_cuda(build, tmp_path / name, target) for name in ("there", "here"))
    compare_places(there, here, Dynamic(depth=1, top_k=2, budget=5), (0, 3), [(1, []), (3, [])])


@heads
def test_graphs_are_shared_by_all_requests_and_made_anew_only_for_positions_beyond_the_table_of_rotations(
    build: Build, tmp_path: Path, target: TargetWeights
) -> None:
    drafter = drafter_of(on_cuda(build, tmp_path, target), [1], POLICY)
    stack: Any = drafter.head.stack  # type: ignore[attr-defined]
    drafter.propose(1)
    graphs, table = dict(stack._recorded), stack.cos_sin
    assert graphs
    drafter.start(9, [3, 4, 5, 6], SamplingParams(max_tokens=40))
    features = torch.randn(4, len(drafter.feature_layers), HIDDEN, generator=torch.manual_seed(9))
    drafter.observe(9, Verdict(TokenTree.root_only(6), [0], [7], bfloat16_bits(features)))
    drafter.propose(9)
    stack.reserve_positions(1000)
    assert stack.cos_sin is table and stack._recorded == graphs
    stack.reserve_positions(1025)
    assert len(stack.cos_sin) == 2050 and not stack._recorded


@pytest.mark.parametrize("build", [eagle3, block], ids=lambda build: build.__name__)
def test_rows_that_pad_a_forward_leave_what_was_read_as_it_is(
    build: Build, tmp_path: Path, target: TargetWeights
) -> None:
    drafter = drafter_of(on_cuda(build, tmp_path, target), [1], POLICY)
    pool: Any = drafter.head.stack.pool  # type: ignore[attr-defined]
    drafter.propose(1)
    session: Any = drafter._requests[1].session
    read = torch.from_numpy(session.cache.slots(np.arange(session.synced))).long()
    kept = pool.features[read]
    features = torch.randn(1, len(drafter.feature_layers), HIDDEN, generator=torch.manual_seed(1))
    root = TokenTree.root_only(drafter.last_token(1))
    drafter.observe(1, Verdict(root, [0], [33], bfloat16_bits(features)))
    drafter.propose(1)
    assert session.synced > len(read) and 0 in read
    assert torch.equal(pool.features[read], kept)


def test_when_the_pool_or_attentions_room_grows_what_is_held_stays_and_graphs_are_captured_anew(
    tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads have the same pool."""
    usual = drafter_of(plain(eagle3, tmp_path / "a", target), list(TEXTS), POLICY)
    monkeypatch.setattr(cuda_stack, "_BLOCKS", 1)
    grown = drafter_of(on_cuda(eagle3, tmp_path / "b", target), list(TEXTS), POLICY)
    stack: Any = grown.head.stack  # type: ignore[attr-defined]
    stack._attention.reserve(1)
    trees = [drafter.propose_many(OUTCOMES) for drafter in (usual, grown)]
    assert stack.pool.blocks > 1 and stack._attention.capacity > 1
    assert all(same(one, other) for one, other in zip(*trees, strict=True))


@pytest.mark.parametrize("build", [eagle3, block], ids=lambda build: build.__name__)
def test_long_texts_are_read_in_parts(
    build: Build, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a graph has are not recorded, or are read in parts."""
    monkeypatch.setitem(TEXTS, 3, [token % 60 for token in range(40)])
    trees = [
        drafter_of(make(build, tmp_path / make.__name__, target), [3, 1], POLICY).propose_many([(3, []), (1, [7])])
        for make in (on_cuda, plain)
    ]
    assert all(same(one, other) for one, other in zip(*trees, strict=True))


def test_a_pool_on_a_gpu_takes_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    assert cuda_stack.first_blocks(1 << 10, torch.device("cuda")) == 1 << 16
    assert cuda_stack.first_blocks(1 << 30, torch.device("cuda")) == cuda_stack._BLOCKS
    assert cuda_stack.first_blocks(1, torch.device("cpu")) == cuda_stack._BLOCKS


@pytest.mark.parametrize(("build", "temperature"), [(eagle, 0.8), (eagle3, 0.0)], ids=["eagle", "eagle3"])
def test_a_tree_that_grows_on_the_device_is_the_policys_and_the_host_waits_once(
    build: Build, temperature: float, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, waits = Dynamic(depth=3, top_k=3, budget=12), [0]
    drafters = [drafter_of(make(build, tmp_path / make.__name__, target), [], policy) for make in (on_cuda, in_turns)]
    for drafter in drafters:
        for request, prompt in TEXTS.items():
            drafter.start(request, prompt, SamplingParams(max_tokens=40, temperature=temperature, seed=request))
            features = torch.randn(
                len(prompt), len(drafter.feature_layers), HIDDEN, generator=torch.manual_seed(request)
            )
            drafter.observe(request, Verdict(TokenTree.root_only(prompt[-1]), [0], [7], bfloat16_bits(features)))
    count_waits(monkeypatch, waits)
    ahead, usual = drafters
    wanted: list[Any] = [(request, []) for request in TEXTS]
    monkeypatch.setattr(type(ahead.head), "extend", lambda *_: pytest.fail("the policy asks for more"))
    trees = ahead.propose_many(wanted)
    assert waits == [1]
    monkeypatch.undo()
    expected = usual.propose_many(wanted)
    assert all(same(one, other) for one, other in zip(trees, expected, strict=True))
    assert max(len(tree) for tree in trees) == 12 and max(int(tree.depths.max()) for tree in trees) > 1
    follow = [(1, [int(trees[0].tokens[1])])]  # an outcome that was drafted, from which a tree goes on
    assert same(*(drafter.propose_many(follow)[0] for drafter in drafters))


def test_one_layer_more_is_drafted_than_the_latest_tree_asked_for(
    tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter: Any = drafter_of(on_cuda(eagle, tmp_path, target), [2], Adaptive(budget=8, top_k=2, mu=2.0, depth=3))
    steps, step = list[Any](), cuda_stack.CudaStack.step
    monkeypatch.setattr(cuda_stack.CudaStack, "step", lambda *of: steps.append(of) or step(*of))
    drafter.propose(2)
    assert len(steps) == 1 + 3, "one reads the text, and the first tree may be as deep as any"
    features = bfloat16_bits(torch.zeros(1, len(drafter.feature_layers), HIDDEN))
    drafter.observe(2, Verdict(TokenTree.root_only(drafter.last_token(2)), [0], [9], features))
    drafter.propose(2)
    assert len(steps) == 4 + 1 + 1, "its policy expands the root alone"


@pytest.mark.parametrize("build", [eagle, eagle3], ids=lambda build: build.__name__)
def test_capturing_a_graph_changes_nothing_that_it_reads(
    build: Build, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured has run several times before."""
    usual = drafter_of(on_cuda(build, tmp_path / "a", target), list(TEXTS), POLICY).propose_many(OUTCOMES)

    def captured(work: Any, inputs: Sequence[Tensor], *_: Any) -> tuple[Any, tuple[Tensor, ...]]:
        outputs = tuple(out.clone() for out in work(*inputs))

        def replay() -> None:
            for out, found in zip(outputs, work(*inputs), strict=True):
                out.copy_(found)

        return SimpleNamespace(replay=replay), outputs

    monkeypatch.setattr(graphs, "_GRAPHS", ("cpu",))
    monkeypatch.setattr(graphs, "_warm_up", lambda work, inputs, _: work(*inputs))
    monkeypatch.setattr(graphs, "_captured", captured)
    trees = drafter_of(on_cuda(build, tmp_path / "b", target), list(TEXTS), POLICY).propose_many(OUTCOMES)
    assert all(same(one, other) for one, other in zip(trees, usual, strict=True))


def count_waits(monkeypatch: pytest.MonkeyPatch, waits: list[int]) -> None:
    """Whatever a drafter reads on the host comes by these."""
    from drafters.heads.growth import ahead, ranking

    downloaded = ranking.downloaded

    def counted(results: Any) -> Any:
        waits[0] += 1
        return downloaded(results)

    class Counted(PackedDownload):
        def read(self) -> list[Tensor]:
            waits[0] += 1
            return super().read()

    monkeypatch.setattr(ranking, "downloaded", counted)
    monkeypatch.setattr(ahead, "PackedDownload", Counted)


def verdicts_of(drafter: Any, requests: Sequence[int], counts: Sequence[int], seed: int) -> dict[int, Verdict]:
    """A verdict for each request, which accepts so many rows."""
    found = {}
    for request, count in zip(requests, counts, strict=True):
        generator = torch.manual_seed(100 * seed + request)
        features = torch.randn(count, len(drafter.feature_layers), HIDDEN, generator=generator).bfloat16()
        tokens = torch.randint(1, 40, (count,), generator=generator).tolist()
        tree = TokenTree.chain(drafter.last_token(request), tokens[:-1], [0.9] * (count - 1))
        found[request] = Verdict(tree, [*range(count)], tokens, features)
    return found


def as_on_device(verdicts: dict[int, Verdict], most: int) -> DeviceVerdicts:
    """What a GPU knows of these verdicts before the host does: `most` rows of each, those past its end zeros."""
    places, tokens, features = {}, torch.zeros(len(verdicts), most, dtype=torch.int64), []
    for place, (request, verdict) in enumerate(verdicts.items()):
        places[request], given = place, cast(Tensor, verdict.features)
        tokens[place, : len(given)] = torch.tensor(verdict.tokens)
        features.append(torch.nn.functional.pad(given, (0, 0, 0, 0, 0, most - len(given))))
    lengths = torch.tensor([len(verdict.tokens) for verdict in verdicts.values()], dtype=torch.int32)
    return DeviceVerdicts(places, lengths, tokens, torch.stack(features))


@pytest.mark.parametrize(
    ("build", "temperature"),
    [
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(eagle, 0.0), (eagle3, 0.0), (block, 0.8)]),
        (eagle3, 0.8),
        (block, 0.0),
    ],
)
def test_trees_drafted_before_the_host_knows_what_was_accepted_are_those_drafted_afterwards(
    build: Build, temperature: float, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At T > 0 apart from what the head learns of its error from the verdict itself. `test_behind.py` drafts with an
    EAGLE head, at both temperatures.
    """
    monkeypatch.setattr("drafters.heads.growth.ranking._kernels", lambda device: noise_kernels)
    monkeypatch.setattr("drafters.heads.growth.ranking.ErrorScale.learn", lambda *_: None)
    monkeypatch.setattr(triton_attention, "CHUNK", 16)  # so that more chunks may have been accepted than were
    monkeypatch.setattr(triton_attention, "_TILE_BYTES", 0)
    policy, most = Dynamic(depth=2, top_k=2, budget=8), 3
    behind, usual = (drafter_of(on_cuda(build, tmp_path / name, target), [], policy) for name in ("a", "b"))
    for drafter in (behind, usual):
        for request, prompt in TEXTS.items():
            drafter.start(request, prompt, SamplingParams(max_tokens=40, temperature=temperature, seed=request))
            drafter.observe(request, verdicts_of(drafter, [request], [len(prompt)], 0)[request])
        drafter.propose_many([(request, []) for request in TEXTS])
    requests = [*TEXTS]
    for turn, counts in enumerate([(1, 2, 3), (3, 1, 2), (2, 2, 2)], 1):
        given = verdicts_of(usual, requests, counts, turn)
        known = as_on_device(given, most)
        if turn == 2:  # the host draws another token than the device for the first request
            known.tokens[0, 2] += 1
        trees = {request: request for request in requests[: 2 if turn == 3 else 3]}
        assert behind.draft_behind(trees, known) is not None
        for drafter in (behind, usual):
            for request, verdict in given.items():
                drafter.observe(request, verdict)
        with pytest.MonkeyPatch.context() as patch:
            if turn == 1:
                patch.setattr(type(behind.head.stack), "step", lambda *_: pytest.fail("something is left to draft"))
            grown = behind.propose_many([(request, []) for request in requests])
        expected = usual.propose_many([(request, []) for request in requests])
        assert all(same(one, other) for one, other in zip(grown, expected, strict=True))
        assert max(len(tree) for tree in grown) == 8
        follow = [(2, [int(grown[1].tokens[1]), 9])]  # an outcome that was drafted in part
        assert same(*(drafter.propose_many(follow)[0] for drafter in (behind, usual)))


@pytest.mark.parametrize("numbers", [1, 3])
def test_of_equal_candidates_the_earlier_one_is_selected_as_the_policy_does(numbers: int) -> None:
    """And the confidences are those of the policy to the last bit."""
    rng = np.random.default_rng(numbers)
    trees, nodes, width = 2, 4, 4
    prob = torch.from_numpy(rng.integers(1, 4, (trees * nodes, 5)) / np.float32(7)).sort(1, descending=True).values
    tokens = torch.arange(trees * nodes * 5).view(-1, 5)
    confidence = torch.from_numpy(rng.random(trees * nodes) if numbers == 3 else np.full(trees * nodes, 0.5))
    above = TreeLayer(confidence, torch.arange(100, 108), torch.arange(24, dtype=torch.int32).view(8, 3))
    grounds = Grounds(torch.tensor([30, 50]), torch.tensor([35, 57]), torch.tensor([0, 0]))
    found = select(tokens, prob.float(), above, grounds, torch.tensor([40, 60], dtype=torch.int32), 2, width, 16)
    for tree in range(trees):
        own = slice(tree * nodes, (tree + 1) * nodes)
        seen = Candidates(tokens[own, :width].tolist(), prob.float()[own, :width].tolist())
        builder = TreeBuilder([0] * nodes, [-1] * nodes, confidence[own].tolist())
        best = builder.children(range(nodes), seen)[:width]
        rows = slice(tree * width, (tree + 1) * width)
        assert found.rows[0, rows].tolist() == [token for _, _, token in best]
        assert found.rows[2, rows].tolist() == [[35, 57][tree] + 3] * width, "positions, of the third layer below"
        assert found.rows[3, rows].tolist() == [[30, 50][tree]] * width, "slots of the text"
        assert found.confidence[rows].tolist() == [chance for chance, _, _ in best]
        parents = [parent for _, parent, _ in best]
        assert found.parents[rows].tolist() == parents and found.rows[1, rows].tolist() == [
            100 + 4 * tree + p for p in parents
        ]
        slots = [40 + 20 * tree + i for i in range(width)]
        assert found.ancestors[rows].tolist() == [
            [*above.ancestors[4 * tree + p, :2].tolist(), slot] for p, slot in zip(parents, slots, strict=True)
        ]
    assert not found.rows[:, trees * width :].any()
