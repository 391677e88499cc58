"""DFlash 2: its convolutions, windows and selector against the published arithmetic, written out row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.ranking import Ranking
from drafters.heads.one_pass.block import BlockHead
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.kernels.gemm.product import multiplies
from tests.drafters.conftest import HIDDEN, VOCAB, random_tensors, write_checkpoint
from tests.drafters.heads.layouts.head_gguf import write_head
from tests.drafters.heads.one_pass.test_block import (
    CONFIGS,
    DRAFT_LAYERS,
    FEATURES,
    FLASH,
    MASK,
    QWEN3,
    SIZE,
    TEXT,
    Mix,
    begun,
    check_blocks_alone_and_together,
    plain_states,
    shapes,
)

RANK, TOP_K, WINDOW = 6, 12, 4
SLIDING = {"layer_types": ["sliding_attention"] * DRAFT_LAYERS, "sliding_window": WINDOW, "use_sliding_window": True}
KINDS: dict[str, dict[str, Any]] = {
    "two taps": {"conv_kernel_size": 2, "conv_group_size": 16},
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 16},
    "small groups": {"conv_kernel_size": 2, "conv_group_size": 8},  # which no kernel computes
    "windows": {"conv_kernel_size": 2, "conv_group_size": 16},
}


def made(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head's configuration and tensors, as published."""
    flash = FLASH | KINDS[kind] | {"selector_rank": RANK, "selector_top_k": TOP_K, "block_size": SIZE}
    taps, groups = flash["conv_kernel_size"], HIDDEN // flash["conv_group_size"]
    config = {**QWEN3, "architectures": ["DFlash2DraftModel"], "dflash_config": flash}
    config |= SLIDING if kind == "windows" else {}
    names = shapes("dflash") | {"candidate_selector.hidden_projection.weight": (RANK, HIDDEN)}
    names |= {f"candidate_selector.{name}_codebook": (VOCAB, RANK) for name in ("predecessor", "successor")}
    for i in range(DRAFT_LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            names |= {f"layers.{i}.{part}.base_kernel": (2, taps, HIDDEN)}
            names |= {f"layers.{i}.{part}.kernel_projection.weight": (2 * taps * groups, HIDDEN)}
    tensors = random_tensors(names)
    for name in names:
        if "codebook" in name:
            tensors[name] *= 5  # so that the selector changes the order
    return config, tensors


def convolved(x: Tensor, of_row: Tensor, base: Tensor, group: int) -> Tensor:
    """x: [rows, hidden]; of_row: [rows, taps, groups]; base: [taps, hidden]."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for column in range(HIDDEN):
            for tap in range(min(len(base), row + 1)):
                factor = base[tap, column] + of_row[row, tap, column // group]
                out[row, column] += factor * x[row - tap, column]
    return out


def mixer(config: dict[str, Any], weights: dict[str, Tensor]) -> Callable[[str, Tensor], Mix]:
    """Return the convolutions of a layer's part, as `plain_states` applies them."""
    taps, group = (config["dflash_config"][key] for key in ("conv_kernel_size", "conv_group_size"))

    def of_part(part: str, normed: Tensor) -> Mix:
        made = (normed @ weights[f"{part}.kernel_projection.weight"].T).view(len(normed), 2, taps, HIDDEN // group)
        base = weights[f"{part}.base_kernel"]
        return lambda side, x: convolved(x, made[:, side], base[side], group)

    return of_part


def transitions(weights: dict[str, Tensor], lm_head: Tensor, state: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """The candidates of a row and their scores behind the token `before`, best first."""
    unary, candidates = (state @ lm_head.T).topk(TOP_K)
    gate = weights["candidate_selector.hidden_projection.weight"] @ state
    latent = weights["candidate_selector.predecessor_codebook"][before] * gate
    scores, order = (unary + weights["candidate_selector.successor_codebook"][candidates] @ latent).sort(
        descending=True
    )
    return candidates[order], scores


@torch.inference_mode()
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("known", [[], [11, 4]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_drafts_what_the_published_arithmetic_gives(
    kind: str, known: list[int], stacked: bool, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = made(kind)
    if not stacked:
        monkeypatch.setattr("drafters.heads.one_pass.block_weights.new_stack", lambda spec: None)
    head = BlockHead.load(write_checkpoint(tmp_path, "model.safetensors", config, weights), target)
    assert (head.stack is not None) is (stacked and kind != "small groups")
    assert isinstance(target.embedding, Tensor) and isinstance(target.lm_head, Tensor)
    block = [TEXT[-1], *known] + [MASK] * (SIZE - 1 - len(known))
    window = {"causal": True, "window": WINDOW} if kind == "windows" else {"causal": False}
    states = plain_states(weights, target.embedding, FEATURES, block, **window, mixer=mixer(config, weights))
    check_blocks_alone_and_together(head, [known, [4, 4], [30]])
    session, node = begun(head, known)
    ranking, path, reordered = Ranking(SamplingParams(), head.target_ids, TOP_K), [TEXT[-1], *known], False
    for row in range(1 + len(known), SIZE):
        candidates, scores = transitions(weights, target.lm_head, states[row], path[-1])
        seen = session.rank(ranking, [node], None, [])
        assert seen.tokens[0] == candidates.tolist()
        prob = torch.tensor(seen.prob[0])
        torch.testing.assert_close(prob / prob.sum(), scores.softmax(0), atol=1e-4, rtol=1e-2)
        reordered |= int((states[row] @ target.lm_head.T).argmax()) != seen.tokens[0][0]
        path.append(seen.tokens[0][row % 2])  # not always the likeliest
        [node], _ = session.extend([node], path[-1:])
    assert reordered


@torch.inference_mode()
@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="this processor does not multiply bfloat16")
def test_the_convolutions_of_bfloat16_rows_are_those_of_torch(
    tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = made("two taps")
    path = write_checkpoint(tmp_path, "model.safetensors", config, weights)
    monkeypatch.setattr("drafters.heads.layers.multiplies", multiplies)
    monkeypatch.setattr("drafters.heads.layers.instruction_sets", lambda: ())  # matrices are kept as they are
    found = begun(BlockHead.load(path, target), [])[0].blocks[0].forward.outputs.logits
    monkeypatch.setattr("drafters.heads.one_pass.block_weights.new_stack", lambda spec: None)
    expected = begun(BlockHead.load(path, target), [])[0].blocks[0].forward.outputs.logits
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found.float() - expected.float()).norm() < 0.1 * expected.float().norm()


@torch.inference_mode()
def test_where_states_were_lost_a_window_has_the_latest_that_are_there(
    tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, "model.safetensors", *made("windows"))

    def logits() -> Tensor:
        head = BlockHead.load(path, target)
        session = head.open([], 64, 0)
        session.commit(0, FEATURES[:4], TEXT[1:5])
        session.root()
        session.commit(4 + 2 * WINDOW, FEATURES[4:], TEXT[5:])
        head.begin([(session, [[]])])
        return session.blocks[0].forward.outputs.logits

    found = logits()
    monkeypatch.setattr("drafters.heads.one_pass.block_weights.new_stack", lambda spec: None)
    torch.testing.assert_close(found, logits(), atol=1e-4, rtol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["two taps", "windows"])
def test_a_gguf_file_holds_the_same_head(kind: str, tmp_path: Path, target: TargetWeights) -> None:
    config, weights = made(kind)
    public = BlockHead.load(write_checkpoint(tmp_path / "public", "model.safetensors", config, weights), target)
    stored = BlockHead.load(write_head(tmp_path / "x.gguf", "dflash", config, weights), target)
    assert stored.causal is public.causal is (kind == "windows")
    assert stored.windows == public.windows == ((WINDOW, WINDOW) if kind == "windows" else (0, 0))
    logits = [begun(head, [])[0].blocks[0].forward.outputs for head in (public, stored)]
    assert torch.equal(logits[0].logits, logits[1].logits) and torch.equal(logits[0].gates, logits[1].gates)
    assert stored.link is not None and public.link is not None
    assert torch.equal(stored.link.first, public.link.first) and torch.equal(stored.link.second, public.link.second)
    assert stored.candidates == TOP_K


@pytest.mark.parametrize(
    ("changes", "options", "problem"),
    [
        ({"selector_top_k": None}, {}, "config.json: selector_top_k=None is not a positive count"),
        ({"conv_group_size": 5}, {}, "config.json: conv_group_size=5 does not divide hidden_size"),
        ({"output_multiplier": 2.0}, {}, "config.json: output_multiplier=2.0 is not supported, none is"),
        ({}, {"final_logit_softcapping": 30.0}, "config.json: final_logit_softcapping=30.0 is not supported"),
        ({}, SLIDING | {"is_causal": False}, "layers with windows whose rows see later ones are not supported"),
        (
            {},
            SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types mixes layers with sliding",
        ),
        ({}, SLIDING | {"layer_types": ["sliding_attention"]}, "layer_types names 1 layers of 2"),
    ],
)
def test_what_a_head_computes_beyond_this_is_refused_by_its_key(
    changes: dict[str, Any], options: dict[str, Any], problem: str, tmp_path: Path, target: TargetWeights
) -> None:
    config, weights = made("two taps")
    config = config | {"dflash_config": config["dflash_config"] | changes} | options
    with pytest.raises(ModelError, match=problem) as error:
        BlockHead.load(write_checkpoint(tmp_path, "model.safetensors", config, weights), target)
    assert str(error.value).startswith(f"drafter.path={tmp_path}: ") and "\n" not in str(error.value)


def test_windows_without_convolutions_are_read_too(tmp_path: Path, target: TargetWeights) -> None:
    config, weights = CONFIGS["dflash"] | SLIDING, random_tensors(shapes("dflash"))
    head = BlockHead.load(write_checkpoint(tmp_path, "model.safetensors", config, weights), target)
    full = BlockHead.load(write_checkpoint(tmp_path / "full", "model.safetensors", CONFIGS["dflash"], weights), target)
    assert head.causal and head.windows == (WINDOW, WINDOW) and not full.causal and full.windows == (0, 0)
    logits = [begun(one, [])[0].blocks[0].forward.outputs.logits.numpy() for one in (head, full)]
    assert not np.allclose(logits[0], logits[1], atol=1e-3)
