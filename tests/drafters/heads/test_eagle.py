"""EAGLE-1/2 and EAGLE-3: the public layouts, the logits, the draft cache and its re-sync."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.feature_head import FeatureHead
from drafters.heads.growth.policies import Adaptive
from drafters.heads.head_drafter import HeadDrafter
from engine.core.drafter_protocol import Verdict
from engine.core.errors import DrafterMismatch, ModelError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from tests.drafters import reference
from tests.drafters.conftest import HIDDEN, LLAMA, VOCAB, layer_shapes, random_tensors, write_checkpoint

DRAFT_VOCAB = 40
EAGLE = random_tensors(
    {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.bias": (HIDDEN,),
        **layer_shapes("layers.0", HIDDEN),
    }
)
EAGLE3 = random_tensors(
    {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        **layer_shapes("midlayer", 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
)
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB].sort().values
EAGLE3 |= {"d2t": IDS - torch.arange(DRAFT_VOCAB), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)}


def eagle(path: Path, target: TargetWeights) -> FeatureHead:
    return EagleHead.load(write_checkpoint(path, "pytorch_model.bin", LLAMA, EAGLE), target)


def eagle3(path: Path, target: TargetWeights) -> FeatureHead:
    config = LLAMA | {"draft_vocab_size": DRAFT_VOCAB}
    return Eagle3Head.load(write_checkpoint(path, "model.safetensors", config, EAGLE3), target)


def expected(name: str, target: TargetWeights, true: Tensor, tokens: list[int]) -> Tensor:
    """Logits behind the last token; pairs beyond the true features use the guesses of the step before."""
    features = true[:, 0] if name == "eagle" else true.flatten(1) @ EAGLE3["fc.weight"].T
    while True:
        pairs = tokens[: len(features)]
        if name == "eagle":
            guessed = reference.eagle_features(EAGLE, features, pairs)
        else:
            guessed = reference.eagle3_features(EAGLE3, target.embedding, features, pairs)
        if len(features) == len(tokens):
            break
        features = torch.cat([features, guessed[-1:]])
    if name == "eagle":
        return guessed[-1] @ target.lm_head.T
    return reference.rms(guessed[-1], EAGLE3["norm.weight"]) @ EAGLE3["lm_head.weight"].T


BUILD = {"eagle": eagle, "eagle3": eagle3}
both = pytest.mark.parametrize("name", ["eagle", "eagle3"])


def true_features(n: int, name: str, seed: int = 3) -> Tensor:
    """What a float32 head is to be given exactly, as messages carry it."""
    shape = n, 1 if name == "eagle" else 3, HIDDEN
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@both
def test_a_public_checkpoint_gives_the_reference_logits_over_a_tree_and_after_a_sync(
    name: str, tmp_path: Path, target: TargetWeights
) -> None:
    session = BUILD[name](tmp_path, target).open([], 64, 32)
    features, tokens = true_features(9, name), [4, 9, 2, 33, 7, 61, 5]
    session.commit(0, features[:6], tokens[:6])
    torch.testing.assert_close(
        session.root()[0], expected(name, target, features[:6], tokens[:6]), atol=1e-4, rtol=1e-4
    )
    first, logits = session.extend([0, 0, 0], [7, 8, 9])
    second, deeper = session.extend([first[0], first[2], first[2]], [11, 12, 13])
    _, deepest = session.extend([second[2]], [14])
    for row, path in zip(
        [*logits, *deeper, *deepest], [[7], [8], [9], [7, 11], [9, 12], [9, 13], [9, 13, 14]], strict=True
    ):
        torch.testing.assert_close(row, expected(name, target, features[:6], tokens[:6] + path), atol=1e-4, rtol=1e-4)
    text = [*tokens[:6], 9, 13, 50]
    session.commit(6, features[6:9], text[6:])
    torch.testing.assert_close(session.root()[0], expected(name, target, features, text), atol=1e-4, rtol=1e-4)


@both
def test_a_long_prompt_is_synced_in_chunks_with_the_same_result(
    name: str, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, features, tokens = BUILD[name](tmp_path, target), true_features(20, name), list(range(20))
    monkeypatch.setattr("drafters.heads.feature_head._SYNC_CHUNK", 7)
    monkeypatch.setattr("drafters.heads.pooled_session._READ", 7)
    session = head.open([], 32, 8)
    session.commit(0, features, tokens)
    torch.testing.assert_close(session.root()[0], expected(name, target, features, tokens), atol=1e-4, rtol=1e-4)


def drafter_with_text(name: str, path: Path, target: TargetWeights, **options: object) -> HeadDrafter:
    drafter = HeadDrafter(BUILD[name](path, target), Adaptive(budget=20), **options)  # type: ignore[arg-type]
    drafter.start(1, [5, 6, 7, 8], SamplingParams(max_tokens=40))
    drafter.observe(1, prefill(name, [9]))
    return drafter


def prefill(name: str, tokens: list[int]) -> Verdict:
    return Verdict(TokenTree.root_only(8), [0], tokens, bfloat16_bits(true_features(4, name)))


def same(one: TokenTree, two: TokenTree) -> bool:
    """Up to float32 rounding, which steps that feed on each other amplify."""
    alike = np.allclose(one.confidence, two.confidence, atol=1e-5, rtol=1e-4)
    return alike and one.tokens.tolist() == two.tokens.tolist() and one.parents.tolist() == two.parents.tolist()


@both
def test_before_the_first_features_nothing_is_proposed(name: str, tmp_path: Path, target: TargetWeights) -> None:
    drafter = HeadDrafter(BUILD[name](tmp_path, target), Adaptive())
    drafter.start(1, [5, 6], SamplingParams())
    assert drafter.propose(1).tokens.tolist() == [6]
    drafter.observe(1, Verdict(TokenTree.root_only(6), [0], [3], None))
    assert drafter.propose(1, [4]).tokens.tolist() == [4]


@both
def test_asking_about_other_outcomes_does_not_change_the_next_tree(
    name: str, tmp_path: Path, target: TargetWeights
) -> None:
    drafter = drafter_with_text(name, tmp_path, target)
    before = drafter.propose(1)
    before.validate(VOCAB)
    assert before.tokens[0] == 9 and len(before) > 2
    assert name == "eagle" or set(before.tokens[1:].tolist()) <= set(IDS.tolist())  # tokens of the target
    for token in range(30):  # more than the drafted nodes a request has room for
        drafter.propose(1, [int(before.tokens[1]), token])
    assert same(drafter.propose(1), before)


@both
def test_after_a_verdict_the_tree_is_that_of_a_drafter_that_read_the_text_at_once(
    name: str, tmp_path: Path, target: TargetWeights
) -> None:
    drafter = drafter_with_text(name, tmp_path, target)
    tree = drafter.propose(1)
    more = true_features(2, name, seed=8)
    drafter.observe(1, Verdict(tree, [0, 1], [int(tree.tokens[1]), 33], bfloat16_bits(more)))
    fresh = HeadDrafter(drafter.head, drafter.policy)
    fresh.start(1, [5, 6, 7, 8, 9, int(tree.tokens[1])], SamplingParams(max_tokens=40))
    features = bfloat16_bits(torch.cat([true_features(4, name), more]))
    fresh.observe(1, Verdict(TokenTree.root_only(9), [0], [33], features))
    assert same(drafter.propose(1), fresh.propose(1))


@both
def test_tokens_without_features_are_drafted_like_a_continuation(
    name: str, tmp_path: Path, target: TargetWeights
) -> None:
    lost, asked = drafter_with_text(name, tmp_path / "a", target), drafter_with_text(name, tmp_path / "b", target)
    lost.observe(1, Verdict(TokenTree.root_only(9), [0], [12], None))
    assert same(lost.propose(1), asked.propose(1, [12]))


@both
@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_a_wrong_tensor_is_refused_by_name(name: str, damage: str, tmp_path: Path, target: TargetWeights) -> None:
    tensors = dict(EAGLE if name == "eagle" else EAGLE3)
    if damage == "missing":
        del tensors["fc.weight"]
    elif damage == "extra":
        tensors["fd.weight"] = torch.zeros(1)
    else:
        tensors["fc.weight"] = torch.zeros(HIDDEN, 7)
    config = LLAMA | ({"draft_vocab_size": DRAFT_VOCAB} if name == "eagle3" else {})
    path = write_checkpoint(tmp_path, "pytorch_model.bin", config, tensors)
    load = EagleHead.load if name == "eagle" else Eagle3Head.load
    with pytest.raises(ModelError, match=r"f[cd]\.weight.*talon train " + name) as error:
        load(path, target)
    assert "\n" not in str(error.value)


@both
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_head_for_another_target_is_refused(name: str, key: str, tmp_path: Path, target: TargetWeights) -> None:
    path = write_checkpoint(tmp_path, "pytorch_model.bin", LLAMA | {key: 128}, {})
    load = EagleHead.load if name == "eagle" else Eagle3Head.load
    with pytest.raises(DrafterMismatch, match=r"128 != target .*talon train"):
        load(path, target)


def test_vocabulary_maps_that_disagree_are_refused_and_a_pickle_with_code_in_it_is_not_run(
    tmp_path: Path, target: TargetWeights
) -> None:
    tensors = EAGLE3 | {"t2d": torch.ones(VOCAB, dtype=torch.bool)}
    path = write_checkpoint(tmp_path, "model.safetensors", LLAMA | {"draft_vocab_size": DRAFT_VOCAB}, tensors)
    with pytest.raises(ModelError, match="d2t and t2d"):
        Eagle3Head.load(path, target)
    code = {"fc.weight": Path("x")}
    path = write_checkpoint(tmp_path / "code", "pytorch_model.bin", LLAMA, code)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="convert it to safetensors"):
        EagleHead.load(path, target)
