from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.lockstep import Growth
from drafters.heads.growth.policies import Adaptive, TreeBuilder
from drafters.heads.head_drafter import HeadDrafter
from drafters.hybrid.hybrid import HybridDrafter, with_sources
from drafters.hybrid.merge import Merge
from drafters.hybrid.rescues import Gains, Rescues
from drafters.hybrid.retrieval_advice import RetrievalAdvice
from drafters.lookup.prompt_lookup import PromptLookup
from drafters.lookup.recycling import TokenRecycling
from drafters.lookup.suffix import SuffixDrafter
from engine.core.drafter_protocol import Verdict
from engine.core.methods import source_of
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from tests.drafters.conftest import VOCAB
from tests.drafters.heads.test_eagle import eagle3, true_features

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]
CHANCES = st.none() | st.floats(0, 1)


def hybrid(path: Path, target: TargetWeights, text: list[int] = TEXT) -> HybridDrafter:
    """A hybrid that has read `text`, of which the last token is the target's; tokens are dear, so any step pays."""
    drafter = HybridDrafter(HeadDrafter(eagle3(path, target), Adaptive(budget=24)), [SuffixDrafter(budget=24)], 24)
    drafter.head.source, drafter.memories[0].source = source_of("eagle3"), source_of("suffix")
    drafter.start(1, text[:-1], SamplingParams(max_tokens=160))
    features = bfloat16_bits(true_features(len(text) - 1, "eagle3"))
    drafter.observe(1, Verdict(TokenTree.root_only(text[-2]), [0], text[-1:], features, token_s=1e6))
    return drafter


@pytest.fixture
def drafter(tmp_path: Path, target: TargetWeights) -> HybridDrafter:
    return hybrid(tmp_path, target)


def test_its_tree_holds_what_the_head_and_what_the_text_suggest_and_names_the_source(drafter: HybridDrafter) -> None:
    tree = drafter.propose(1).validate(VOCAB)
    model, suffix = drafter.head.propose(1), source_of("suffix")
    retrieved = tree.child(0, 8)  # what followed 5 6 7 in the text
    assert retrieved is not None and tree.source[retrieved] & suffix
    assert [child for child in tree.children(retrieved) if not tree.source[child] & suffix]  # the head drafts on
    assert tree.child(0, int(model.tokens[1])) is not None  # the head's first guess
    assert len(tree) <= 24 and tree.source[0] == 0 and (tree.source[1:] > 0).all()


def test_before_the_first_features_retrieval_drafts_alone(tmp_path: Path, target: TargetWeights) -> None:
    drafter = HybridDrafter(HeadDrafter(eagle3(tmp_path, target), Adaptive()), [PromptLookup()], 60)
    drafter.start(1, TEXT, SamplingParams())
    assert drafter.propose(1).child(0, 8) is not None


def test_an_outcome_asked_about_leaves_no_trace(drafter: HybridDrafter) -> None:
    before = drafter.propose(1)
    assert [tree.tokens[0] for tree in drafter.propose_many([(1, [3]), (1, [4, 5])])] == [3, 5]
    assert drafter.propose(1).tokens.tolist() == before.tokens.tolist()


def test_a_step_that_costs_more_than_it_can_bring_is_left_to_retrieval_where_that_is_sure(
    drafter: HybridDrafter,
) -> None:
    drafter._token_s = 1e-9
    tree = drafter.propose(1)
    assert tree.child(tree.child(0, 8) or 0, 9) is not None  # the text goes on: 8 9
    drafter._token_s = drafter._step_s = 1e6
    drafter._rescues.observe(1, 0, 1e6)
    drafter.propose(1)
    assert not drafter.head.steps, "retrieval is sure"
    drafter.memories = []
    drafter.propose(1)
    assert drafter.head.steps, "whatever it has learned"


def test_a_head_that_is_to_rest_drafts_no_more_until_it_may_again(drafter: HybridDrafter) -> None:
    def steps_after(rest: bool) -> int:
        tree, steps = drafter.propose(1), drafter.head.steps
        features = bfloat16_bits(true_features(1, "eagle3"))
        drafter.observe(1, Verdict(tree, [0], [int(tree.tokens[0])], features, rest=rest, token_s=1e6))
        drafter.propose(1)
        return drafter.head.steps - steps

    assert [steps_after(rest) > 0 for rest in (False, True, True, False)] == [True, False, False, True]
    assert drafter.rests


def test_the_more_requests_share_a_step_the_less_it_has_to_bring(drafter: HybridDrafter) -> None:
    features = bfloat16_bits(true_features(len(TEXT) - 1, "eagle3"))
    drafter.start(2, TEXT[:-1], SamplingParams(max_tokens=160))
    drafter.observe(2, Verdict(TokenTree.root_only(TEXT[-2]), [0], TEXT[-1:], features, token_s=1.0))
    steps = drafter.head.steps
    expected = float(drafter._retrieve(1, ()).confidence[1:].sum())
    drafter._step_s = 1.5 * drafter._gains.expected(expected)  # of a token's time
    drafter.propose(1)
    assert drafter.head.steps == steps
    drafter.propose_many([(1, ()), (2, ())])
    assert drafter.head.steps > steps


def test_what_a_gpu_has_drafted_ahead_is_in_the_tree_though_no_step_is_worth_its_time(drafter: HybridDrafter) -> None:
    def growth() -> Growth:
        """The growth of a tree, with the root's candidates."""
        advice = RetrievalAdvice(Merge(), root, 1e9, 1.0, 0.5)
        grown = Growth(trie, 0, trie.text[-1], drafter.head.policy, advice)
        grown.frontier = grown.steps.send(grown.candidates())
        return grown

    drafter.settle()
    drafter.head.propose(1)  # as if on a GPU
    trie, root = drafter.head._requests[1], TokenTree.root_only(TEXT[-1])
    assert growth().undrafted() == [] and growth().reach == 0
    trie.ahead = max(trie.depth)
    grown = growth()
    assert grown.undrafted() == [] and grown.reach == 1
    drafted = [node for node in grown.frontier.nodes if node in grown.known]
    assert len(drafted) == len(grown.frontier.nodes) > 1
    assert grown.adviser is not None and cast(RetrievalAdvice, grown.adviser).expected_misses > 0


def test_a_step_has_to_pay_at_the_nodes_that_are_not_drafted_yet() -> None:
    text = TreeBuilder([5])
    below = text.frontier([text.add(0, 6, 0.6), text.add(0, 7, 0.3)])
    for drafted, pays, misses in (([], True, 0.9), ([2], True, 0.9), ([1], False, 0.6), ([1, 2], False, 0.9)):
        advice = RetrievalAdvice(Merge(), TokenTree.root_only(5), 0.2, 1.0, 0.5)
        assert advice.worth_drafting(below, drafted) is pays
        assert advice.expected_misses == pytest.approx(misses)


def test_below_the_root_a_one_pass_heads_candidates_cost_no_forward() -> None:
    text, tree = TreeBuilder([5]), TokenTree.root_only(5)
    below = text.frontier([text.add(0, 6, 0.01)])
    dear = {one_pass: RetrievalAdvice(Merge(), tree, 1.0, 0.5, 0.5, one_pass) for one_pass in (False, True)}
    assert [dear[one_pass].worth_drafting(below) for one_pass in (False, True)] == [False, True]
    assert not dear[True].begins()  # the first forward is weighed


def test_a_step_behind_which_the_head_read_a_long_text_is_not_timed(tmp_path: Path, target: TargetWeights) -> None:
    timed = []
    for text in (TEXT, TEXT * 10):
        drafter = hybrid(tmp_path, target, text)
        before = drafter._step_s
        drafter.propose(1)
        assert drafter.head.steps
        timed.append(drafter._step_s != before)
    assert timed == [True, False]


def rescue_after(drafter: HybridDrafter, tree: TokenTree, path: list[int], tokens: list[int]) -> float:
    """What the head is expected to bring after this verdict."""
    features = bfloat16_bits(true_features(len(path), "eagle3"))
    drafter.observe(1, Verdict(tree, path, tokens, features))
    return drafter._rescues.expected(1)


def unforeseen_by(tree: TokenTree) -> int:
    """Return a token that does not follow the root."""
    return next(token for token in range(VOCAB) if tree.child(0, token) is None)


def test_what_the_head_brings_where_retrieval_misses_is_learned_by_each_request_and_handed_on(
    tmp_path: Path, target: TargetWeights
) -> None:
    drafter = hybrid(tmp_path, target)
    before, tree = drafter._rescues.expected(1), drafter.propose(1)
    own = next(node for node in tree.children(0) if tree.source[node] == source_of("eagle3"))
    unforeseen = unforeseen_by(tree)
    after = rescue_after(drafter, tree, [0], [unforeseen])
    drafter.start(2, TEXT, SamplingParams())
    assert after < drafter._rescues.expected(2) < before, "the next one begins with what all have learned"
    cut = hybrid(tmp_path / "cut", target)
    cut.propose(1)
    assert rescue_after(cut, tree, [0], [int(tree.tokens[own])]) < before  # the verifier had cut the node
    followed = hybrid(tmp_path / "followed", target)
    followed.propose(1)
    assert rescue_after(followed, tree, [0, own], [int(tree.tokens[own]), unforeseen]) > before


def test_only_rounds_whose_tree_has_the_heads_nodes_tell_what_it_brings(tmp_path: Path, target: TargetWeights) -> None:
    drafter = hybrid(tmp_path, target)
    drafter._token_s = 1e-9
    before, tree = drafter._rescues.expected(1), drafter.propose(1)  # retrieval's alone
    drafter.following([(1, ())])  # but the head was asked what may come next
    unforeseen = unforeseen_by(tree)
    assert rescue_after(drafter, tree, [0], [unforeseen]) == before
    alone = hybrid(tmp_path / "alone", target)
    alone.propose(1)
    assert rescue_after(alone, TokenTree.root_only(TEXT[-1]), [0], [unforeseen]) == before


def test_what_a_draft_brings_counts_the_heads_accepted_nodes_alone(tmp_path: Path, target: TargetWeights) -> None:
    def gain_after(folder: str, source: int) -> float:
        drafter = hybrid(tmp_path / folder, target)
        expected, tree = float(drafter._retrieve(1, ()).confidence[1:].sum()), drafter.propose(1)
        own = next(node for node in tree.children(0) if tree.source[node] == source)
        rescue_after(drafter, tree, [0, own], [int(tree.tokens[own]), unforeseen_by(tree)])
        return drafter._gains.expected(expected)

    hoped = Gains().expected(0.0)
    by_head, by_retrieval = gain_after("head", source_of("eagle3")), gain_after("suffix", source_of("suffix"))
    assert by_retrieval < by_head == hoped, "it has brought the one token that was hoped for, and none"


def test_a_forward_may_bring_several_tokens_for_one_that_retrieval_misses() -> None:
    rescues = Rescues()
    rescues.start(1)
    for _ in range(100):
        rescues.observe(1, 3, 1.0)
    assert rescues.expected(1) == pytest.approx(3, rel=0.2)


def test_a_draft_is_given_up_where_it_brings_little_beside_as_much_of_retrievals_and_tried_again_later() -> None:
    gains, hoped = Gains(), Gains().expected(2.0)
    for _ in range(50):
        gains.observe(5.0, 0.0)
        gains.observe(1.0, 2.0)
    assert gains.expected(4.0) < 0.2 < hoped < gains.expected(0.8)
    assert gains.expected(2.0) == hoped, "nothing was seen of these"
    for _ in range(500):
        gains.observe(1.0, 2.0)
    assert gains.expected(4.0) > 0.8 * hoped, "it has faded"


def test_a_node_is_the_heads_where_retrieval_alone_would_not_have_had_it_verified() -> None:
    head, suffix = source_of("eagle3"), source_of("suffix")
    both = TokenTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.5])
    retrieved = TokenTree.from_lists([5, 6, 8, 7], [-1, 0, 1, 0], [1.0, 0.4, 0.1, 0.05]).marked(suffix)
    assert with_sources(both, retrieved, head, 0.2).source.tolist() == [0, suffix, head | suffix, head | suffix]
    assert with_sources(both, retrieved, head, 0.0).source.tolist() == [0, suffix, suffix, suffix]
    assert with_sources(both, TokenTree.root_only(5), head, 0.0).source.tolist() == [0, head, head, head]


def test_what_retrieval_alone_would_have_had_verified_stays_in_the_tree_without_confidence() -> None:
    head, suffix = source_of("eagle3"), source_of("suffix")
    tree = TokenTree.from_lists([5, 6, 7], [-1, 0, 1], [1.0, 0.6, 0.3])
    retrieved = TokenTree.from_lists([5, 6, 8, 9, 1], [-1, 0, 1, 2, 3], [1.0, 0.8, 0.7, 0.5, 0.1]).marked(suffix)
    marked = with_sources(tree, retrieved, head, 0.2).validate(10)
    assert marked.tokens.tolist() == [5, 6, 7, 8, 9] and marked.parents.tolist() == [-1, 0, 1, 1, 3]
    assert marked.confidence.tolist() == pytest.approx([1, 0.6, 0.3, 0, 0])
    assert marked.source.tolist() == [0, suffix, head, suffix, suffix]


def test_with_these_nodes_too_a_tree_fits_the_budget_and_the_likelier_nodes_stay(drafter: HybridDrafter) -> None:
    grown, drafter.budget = drafter.propose(1), 3
    chain = TokenTree.chain(int(grown.tokens[0]), [9, 9, 9], [0.9, 0.8, 0.7]).marked(source_of("suffix"))
    (tree,) = drafter._merged([chain], {0: grown})
    assert len(tree) == 3 and (tree.confidence > 0).all()


def test_what_is_retrievals_alone_is_marked_where_the_head_has_drafted_for_another_outcome(
    drafter: HybridDrafter,
) -> None:
    drafter._row_tokens = 0.5
    chain = TokenTree.chain(5, [6, 7], [0.9, 0.2]).marked(source_of("suffix"))
    (tree,) = drafter._merged([chain], {})
    assert tree.source.tolist() == [0, source_of("suffix"), source_of("suffix") | source_of("eagle3")]


def test_a_tree_that_has_just_begun_does_not_replace_retrievals(drafter: HybridDrafter) -> None:
    def offers() -> list[TokenTree]:
        offered: list[TokenTree] = []
        drafter.propose_many([(1, ())], lambda so_far: offered.append(so_far()[0]))
        return offered

    assert {tuple(tree.tokens.tolist()) for tree in offers()} == {tuple(drafter._retrieve(1, ()).tokens.tolist())}
    drafter.memories = []
    sizes = [len(tree) for tree in offers()]
    assert sizes[0] == 1 and sizes[1] > 1 and sizes == sorted(sizes)


def test_what_several_memories_retrieve_together_fits_the_budget(tmp_path: Path, target: TargetWeights) -> None:
    head = HeadDrafter(eagle3(tmp_path, target), Adaptive(budget=6))
    drafter = HybridDrafter(head, [SuffixDrafter(budget=6), TokenRecycling(budget=6)], 6)
    drafter.start(1, [5, 6, 7, 8, 9, 5, 1, 5, 2, 5, 3, 5, 4, 5, 6], SamplingParams())
    assert [len(memory.propose(1)) for memory in drafter.memories] == [6, 6]
    assert len(drafter.propose(1).validate(VOCAB)) == 6


def test_a_head_alone_drafts_nothing_while_it_rests(drafter: HybridDrafter) -> None:
    drafter.memories = []
    assert len(drafter.propose(1)) > 1
    drafter.observe(1, Verdict(TokenTree.root_only(TEXT[-1]), [0], [3], rest=True, token_s=1e6))
    assert drafter.propose(1).tokens.tolist() == [3]
    features = bfloat16_bits(true_features(2, "eagle3"))
    drafter.observe(1, Verdict(TokenTree.root_only(3), [0], [4], features, token_s=1e6))
    tree = drafter.propose(1)
    assert len(tree) > 1 and set(tree.source[1:].tolist()) == {source_of("eagle3")}


@given(CHANCES, CHANCES)
def test_until_something_was_seen_a_token_is_right_unless_both_are_wrong(
    model: float | None, memory: float | None
) -> None:
    expected = 1 - (1 - (model or 0)) * (1 - (memory or 0))
    assert Merge().prob(model, memory) == pytest.approx(expected)


def test_the_chance_of_a_pair_of_opinions_is_learned() -> None:
    merge = Merge()
    for _ in range(400):
        merge.learn(0.9, 0.5, accepted=False)
        merge.learn(0.1, 0.5, accepted=True)
    assert merge.prob(0.9, 0.5) < 0.1 and merge.prob(0.1, 0.5) > 0.9
    assert merge.prob(0.1, None) == pytest.approx(0.1)


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 1)), st.dictionaries(st.integers(0, 9), st.floats(0, 1)))
def test_merged_candidates_are_both_sides_best_first_and_no_more_than_certain(
    model: dict[int, float], memory: dict[int, float]
) -> None:
    tokens, probs = Merge().following((list(model), list(model.values())), (list(memory), list(memory.values())))
    assert sorted(tokens) == sorted(model | memory)
    assert probs == sorted(probs, reverse=True) and sum(probs) <= 1 + 1e-6


def test_a_verdict_that_the_head_cannot_digest_is_not_kept_for_ever(drafter: HybridDrafter) -> None:
    drafter.settle()
    tree = drafter.propose(1)
    drafter.observe(1, Verdict(tree, [0], [3], np.zeros((1, 3, 5), np.uint16)))
    with pytest.raises(RuntimeError):
        drafter.settle()
        drafter.propose(1)
    drafter.settle()
    drafter.finish(1)


def test_a_request_ends_whatever_others_left_to_read(drafter: HybridDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter.settle()
    drafter.start(2, TEXT, SamplingParams())
    monkeypatch.setattr(drafter.head, "observe", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    drafter.observe(1, Verdict(drafter.propose(1), [0], [3]))
    drafter.finish(2)
    drafter.finish(1)
    drafter.settle()
