from __future__ import annotations

from pathlib import Path

import pytest

from drafters.heads.head_drafter import HeadDrafter
from drafters.small_model import SmallModel, common_vocabulary, level_by_level
from engine.core.drafter_protocol import Verdict
from engine.core.errors import DrafterMismatch
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.loading import load_config
from engine.model.target import Target
from tests.conftest import save_tiny_llama

PROMPT = list(b"what is one and one?")


def continuation(model: Target, text: list[int], count: int) -> list[int]:
    """What the model says greedily, token by token, without any cache."""
    tokens: list[int] = []
    for _ in range(count):
        logits, _ = model.prefill(model.new_cache(200), text + tokens)
        tokens.append(int(logits.argmax()))
    return tokens


def drafter(path: str, branches: list[int], budget: int = 40) -> HeadDrafter:
    small = HeadDrafter(SmallModel(Target.load(path)), level_by_level(branches, budget))
    small.start(1, PROMPT, SamplingParams(max_tokens=50))
    return small


def model_of(small: HeadDrafter) -> Target:
    assert isinstance(small.head, SmallModel)
    return small.head.model


def test_it_goes_on_from_what_the_target_said(tiny_draft: str) -> None:
    small = drafter(tiny_draft, [1] * 4)
    for tokens in ([5], [6, 7, 8], [9]):
        small.observe(1, Verdict(TokenTree.root_only(0), [0], tokens))
        small.propose(1)
    text = [*PROMPT, 5, 6, 7, 8, 9]
    assert small.propose(1).tokens.tolist() == [9, *continuation(model_of(small), text, 4)]


def test_at_rest_it_drafts_and_foresees_nothing_and_computes_nothing(tiny_draft: str) -> None:
    small = drafter(tiny_draft, [1] * 4)
    small.observe(1, Verdict(TokenTree.root_only(0), [0], [5, 6], rest=True))
    steps = small.steps
    assert [tree.tokens.tolist() for tree in small.propose_many([(1, ()), (1, (7, 8))])] == [[6], [8]]
    assert small.following([(1, (7,))]) == [([], [])]
    assert small.steps == steps


def test_when_woken_it_drafts_as_if_it_had_not_rested(tiny_draft: str) -> None:
    rested, awake = drafter(tiny_draft, [1] * 4), drafter(tiny_draft, [1] * 4)
    for tokens, rest in (([5], True), ([6, 7], True), ([8], False)):
        rested.observe(1, Verdict(TokenTree.root_only(0), [0], tokens, rest=rest))
        rested.propose(1)
        awake.observe(1, Verdict(TokenTree.root_only(0), [0], tokens))
        awake.propose(1)
    assert rested.propose(1).tokens.tolist() == awake.propose(1).tokens.tolist()


def test_an_outcome_asked_about_leaves_no_trace(tiny_draft: str) -> None:
    small = drafter(tiny_draft, [1] * 4)
    before = small.propose(1)
    assert small.propose(1, [50, 60]).tokens.tolist()[0] == 60
    assert small.propose(1).tokens.tolist() == before.tokens.tolist()


def test_a_tree_has_the_likeliest_children_of_each_node_with_the_draft_models_probability(tiny_draft: str) -> None:
    small = drafter(tiny_draft, [3, 2])
    tree = small.propose(1)
    assert tree.depths.tolist() == [0] + [1] * 3 + [2] * 6
    for node in range(4):
        logits, _ = model_of(small).prefill(model_of(small).new_cache(100), PROMPT[:-1] + tree.path_tokens(node))
        best = logits.softmax(-1).topk(3 if node == 0 else 2)
        assert tree.tokens[tree.children(node)].tolist() == best.indices.tolist()
        expected = (float(tree.confidence[node]) * best.values).tolist()
        assert tree.confidence[tree.children(node)].tolist() == pytest.approx(expected, rel=1e-4)


def test_finished_requests_are_forgotten(tiny_draft: str) -> None:
    small = drafter(tiny_draft, [1])
    small.finish(1)
    assert not small._requests


def test_a_token_of_the_targets_padding_alone_is_drafted_behind_like_any(tiny_draft: str) -> None:
    model = Target.load(tiny_draft)
    small = HeadDrafter(SmallModel(model), level_by_level([1] * 3, 40))
    small.start(1, [*PROMPT, model.vocab_size + 5], SamplingParams(max_tokens=50))
    small.observe(1, Verdict(TokenTree.root_only(0), [0], [model.vocab_size]))
    assert len(small.propose(1)) == 4
    assert len(small.propose(1, [model.vocab_size + 9])) == 4


def test_vocabularies_that_differ_in_padding_alone_share_the_smaller_one(
    tiny: str, tiny_stranger: str, tmp_path: Path
) -> None:
    vocab = load_config(tiny).vocab_size
    padded = save_tiny_llama(tmp_path / "padded", vocab_size=vocab + 8)
    assert common_vocabulary(tiny, padded) == common_vocabulary(padded, tiny) == vocab
    with pytest.raises(DrafterMismatch, match=r"drafter tokenizer != target tokenizer from token 0 on \(drafter.path="):
        common_vocabulary(tiny_stranger, tiny)
    (Path(padded) / "tokenizer.json").unlink()  # of padding of which no tokenizer tells the target alone may have some
    assert common_vocabulary(tiny, padded) == vocab
    with pytest.raises(DrafterMismatch, match=f"drafter vocabulary {vocab + 8} != target vocabulary {vocab}"):
        common_vocabulary(padded, tiny)


def test_tokens_that_the_target_does_not_have_are_never_drafted(tmp_path: Path) -> None:
    padded = Target.load(save_tiny_llama(tmp_path / "padded", vocab_size=300))
    small = HeadDrafter(SmallModel(padded, vocabulary=20), level_by_level([4, 2, 2], 40))
    small.start(1, PROMPT, SamplingParams(max_tokens=50))
    tree = small.propose(1)
    assert len(tree) == 1 + 4 + 8 + 16 and max(tree.tokens[1:]) < 20
