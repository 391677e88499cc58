"""DSpine: its messages and its second scores against SpecForge's `dspine.py`, whose arithmetic is written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.ranking import Ranking
from drafters.heads.one_pass.block import BlockHead
from drafters.heads.one_pass.block_forward import RowQuery
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.kernels.gemm.product import multiplies
from tests.drafters.conftest import HIDDEN, VOCAB, random_tensors, write_checkpoint
from tests.drafters.heads.one_pass.test_block import (
    CONFIGS,
    DRAFT_LAYERS,
    FEATURES,
    MASK,
    SIZE,
    TEXT,
    begun,
    check_blocks_alone_and_together,
    plain_states,
    shapes,
)
from tests.drafters.reference import rms

RANK, MESSAGE, TOP_K = 12, 6, 10
CONFIG = {
    **CONFIGS["dflash"],
    "architectures": ["DSpineDraftModel"],
    "is_causal": True,
    "dspine_config": {"transfer_rank": RANK, "message_size": MESSAGE, "top_k": TOP_K, "ce_weight": 0.1},
}


def made() -> dict[str, Tensor]:
    """The tensors of a head that was trained."""
    names = shapes("dflash") | {"injection.bias": (MESSAGE,), "transfer_codes": (VOCAB, RANK)}
    names |= {f"injection.{name}.weight": (MESSAGE, RANK) for name in ("message", "receiver_gate", "predecessor_gate")}
    for i in range(DRAFT_LAYERS):
        names |= {f"injection.readouts.{i}.weight": (RANK, HIDDEN), f"injection.writes.{i}.weight": (HIDDEN, MESSAGE)}
    tensors = random_tensors(names)
    tensors["transfer_codes"] = F.normalize(tensors["transfer_codes"], dim=-1)
    tensors["injection.message.weight"] *= 3  # so that messages change the order
    return tensors | {"transfer_ready": torch.tensor(True)}


class Reference:
    """`AdjacentInjection` and `transition_scores` of SpecForge, for one block."""

    def __init__(self, weights: dict[str, Tensor], block: list[int]):
        self.weights, self.block, self.before_injection = weights, block, torch.empty(0)

    def feature(self, hidden: Tensor, layer: int) -> Tensor:
        projected = hidden @ self.weights[f"injection.readouts.{layer}.weight"].T
        return RANK**0.5 * F.normalize(projected, dim=-1)

    def code(self, token: int) -> Tensor:
        return RANK**0.5 * self.weights["transfer_codes"][token]

    def write(self, hidden: Tensor, receiver: Tensor, predecessor: Tensor, layer: int) -> Tensor:
        own = {name: tensor for name, tensor in self.weights.items() if name.startswith("injection.")}
        gate = torch.sigmoid(
            receiver @ own["injection.receiver_gate.weight"].T
            + predecessor @ own["injection.predecessor_gate.weight"].T
            + own["injection.bias"]
        )
        delta = (gate * (predecessor @ own["injection.message.weight"].T)) @ own[f"injection.writes.{layer}.weight"].T
        return hidden + hidden.norm() / HIDDEN**0.5 * delta

    def __call__(self, layer: int, hidden: Tensor) -> Tensor:
        """The states of a block after the layer's injection. A known token tells its code, as the first one does."""
        self.before_injection, features, rows = hidden, self.feature(hidden, layer), [hidden[0]]
        for row in range(1, len(hidden)):
            known = row == 1 or self.block[row - 1] != MASK
            predecessor = self.code(self.block[row - 1]) if known else features[row - 1]
            rows.append(self.write(hidden[row], features[row], predecessor, layer))
        return torch.stack(rows)

    def scores(self, row: int, candidates: Tensor, before: int, lm_head: Tensor) -> Tensor:
        """The second scores of a row's candidates behind a token."""
        hidden, last = self.before_injection[row], DRAFT_LAYERS - 1
        refined = self.write(hidden, self.feature(hidden, last), self.code(before), last)
        return lm_head[candidates] @ rms(refined, self.weights["norm.weight"])


def spine(path: Path, target: TargetWeights) -> BlockHead:
    """A head of random weights."""
    return load(path, target, made())


def load(path: Path, target: TargetWeights, weights: dict[str, Tensor], **changes: Any) -> BlockHead:
    return BlockHead.load(write_checkpoint(path, "model.safetensors", CONFIG | changes, weights), target)


@torch.inference_mode()
@pytest.mark.parametrize("known", [[], [11], [11, 4]])
def test_a_tree_follows_the_second_scores_of_the_published_arithmetic(
    known: list[int], tmp_path: Path, target: TargetWeights
) -> None:
    weights = made()
    head = load(tmp_path, target, weights)
    assert isinstance(target.embedding, Tensor) and isinstance(target.lm_head, Tensor)
    block = [TEXT[-1], *known] + [MASK] * (SIZE - 1 - len(known))
    reference = Reference(weights, block)
    states = plain_states(weights, target.embedding, FEATURES, block, True, reference)
    check_blocks_alone_and_together(head, [known, [4, 4], [30]])
    session, node = begun(head, known)
    ranking, path, reordered = Ranking(SamplingParams(), head.target_ids, TOP_K), [TEXT[-1], *known], False
    for row in range(1 + len(known), SIZE):
        logits = states[row] @ target.lm_head.T
        candidates = logits.topk(TOP_K).indices
        scores, order = reference.scores(row, candidates, path[-1], target.lm_head).sort(descending=True)
        seen = session.rank(ranking, [node], None, [])
        assert seen.tokens[0] == candidates[order].tolist()
        mass = logits.softmax(-1)[candidates].sum()  # what the candidates have together is as the row alone says
        torch.testing.assert_close(torch.tensor(seen.prob[0]), mass * scores.softmax(0), atol=1e-5, rtol=1e-3)
        reordered |= order.tolist() != list(range(TOP_K))
        path.append(seen.tokens[0][row % 2])  # not always the likeliest
        [node], _ = session.extend([node], path[-1:])
    assert reordered


@torch.inference_mode()
def test_behind_its_own_predecessor_a_row_keeps_its_scores_and_another_has_second_ones_to_learn_from(
    tmp_path: Path, target: TargetWeights
) -> None:
    head = spine(tmp_path, target)
    session, node = begun(head, [])
    ranking = Ranking(SamplingParams(), head.target_ids, TOP_K)
    seen = session.rank(ranking, [node], None, [])
    expected = session.blocks[0].forward.outputs.logits[0].softmax(-1).topk(TOP_K)
    assert seen.tokens[0] == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(seen.prob[0]), expected.values, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(session.root_logits()[0].softmax(-1).topk(TOP_K).values, expected.values)
    [node], _ = session.extend([node], [17])
    seen, forward = session.rank(ranking, [node], None, []), session.blocks[0].forward
    linked = forward.linked(head, RowQuery(1, 17))[0]
    assert linked.topk(TOP_K).indices.tolist() != forward.outputs.logits[1].topk(TOP_K).indices.tolist()
    torch.testing.assert_close(linked.softmax(-1)[seen.tokens[0]], torch.tensor(seen.prob[0]), atol=1e-5, rtol=1e-3)


@torch.inference_mode()
@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="this processor does not multiply bfloat16")
def test_in_bfloat16_a_head_says_nearly_the_same(
    tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, found = made(), []
    for _ in range(2):
        head = load(tmp_path, target, weights)
        session, node = begun(head, [])
        ranking = Ranking(SamplingParams(), head.target_ids, VOCAB)
        session.rank(ranking, [node], None, [])
        [node], _ = session.extend([node], [17])
        seen = session.rank(ranking, [node], None, [])
        found.append(torch.zeros(VOCAB).index_put((torch.tensor(seen.tokens[0]),), torch.tensor(seen.prob[0])))
        monkeypatch.setattr("drafters.heads.layers.multiplies", multiplies)
    assert head.dtype == torch.bfloat16
    assert (found[0] - found[1]).abs().sum() < 0.1


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"top_k": 0}, "config.json: dspine_config.top_k=0 is not a positive count"),
        ({"message_size": 4}, r"tensor injection.writes.0.weight has shape \[32, 6\], not \[32, 4\]"),
        ({}, "tensor transfer_ready says that the head was never trained"),
    ],
)
def test_a_head_of_other_sizes_or_without_codes_is_refused_in_one_line(
    sizes: dict[str, int], problem: str, tmp_path: Path, target: TargetWeights
) -> None:
    weights = made()
    if not sizes:
        weights["transfer_ready"] = torch.tensor(False)
    with pytest.raises(ModelError, match=problem) as error:
        load(tmp_path, target, weights, dspine_config=CONFIG["dspine_config"] | sizes)
    assert str(error.value).startswith(f"drafter.path={tmp_path}: ") and "\n" not in str(error.value)


def test_a_head_is_causal_and_fills_in_masks_whatever_its_configuration_says(
    tmp_path: Path, target: TargetWeights
) -> None:
    head = load(tmp_path, target, made(), is_causal=False)
    assert head.causal and head.first == 1 and head.depth == SIZE - 1 and head.candidates == TOP_K
