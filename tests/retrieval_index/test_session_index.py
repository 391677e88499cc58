from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from engine.core.params import SamplingParams
from engine.sampling.noise import gumbel, gumbel_argmax
from retrieval_index import ngrams
from retrieval_index.memories import LEAST
from retrieval_index.ngrams import SEPARATOR
from retrieval_index.ngrams.contexts import fill_keys, find_slot
from retrieval_index.session_index import BYTES_PER_TOKEN, SessionIndex

TEXTS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=12)


@njit
def slot_of(slots: Any, text: Any, length: int) -> Any:
    """Find the slot of the context that begins the text."""
    keys = np.empty(ngrams.ORDERS, np.uint64)
    fill_keys(text, 0, length, keys)
    return find_slot(slots, keys[length])


def followers(store: ngrams.Store, context: list[int]) -> Counter[int]:
    """What the store has counted behind a context."""
    text = np.zeros(8, np.int32)
    text[: len(context)] = context
    slots, pool, _, _ = ngrams.parts(*store)
    slot = slots[slot_of(slots, text, len(context))]
    if slot[2] == 0:
        return Counter()
    length = int(slot[3]) & 63
    if length == 0:
        return Counter({int(slot[1]): int(slot[2])})
    return Counter({int(token): int(count) for token, count in pool[slot[1] : slot[1] + length]})


def counted(tokens: list[int]) -> dict[tuple[int, ...], Counter[int]]:
    """Count the n-grams by brute force: -1 separates texts."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for at, token in enumerate(tokens):
        for order in range(ngrams.ORDERS):
            context = tokens[at - order : at]
            if token >= 0 and order <= at and -1 not in context:
                counts.setdefault(tuple(context), Counter())[token] += 1
    return counts


def remembered(texts: list[list[int]], bound: int) -> ngrams.Store:
    store = ngrams.new_store(slots=8192, pool=8192, ring=1024, heads=1024)
    for text in texts:
        tokens = np.asarray([*text, ngrams.SEPARATOR], np.int32)
        assert ngrams.remember(*store, tokens, bound) == len(tokens)
    return store


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, bound=st.integers(5, 200))
def test_counts_are_those_of_the_tokens_that_were_not_evicted(texts: list[list[int]], bound: int) -> None:
    store = remembered(texts, bound)
    live = [token for text in texts for token in [*text, -1]][-bound:]
    expected = counted(live)
    for context, counts in expected.items():
        assert followers(store, list(context)) == counts
    assert int(store.state[ngrams.USED]) == len(expected), "contexts that nothing follows any more are gone"


@settings(max_examples=30, deadline=None)
@given(texts=TEXTS)
def test_a_store_that_grew_holds_what_the_small_one_held(texts: list[list[int]]) -> None:
    store = remembered(texts, 100)
    bigger = ngrams.new_store(slots=16384, pool=16384, ring=2048, heads=2048)
    ngrams.copy_into(*store, *bigger)
    for context, counts in counted([token for text in texts for token in [*text, -1]][-100:]).items():
        assert followers(bigger, list(context)) == counts


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, continuation=st.lists(st.integers(0, 6), max_size=6), budget=st.integers(1, 40))
def test_trees_are_valid_and_propose_only_what_was_seen(
    texts: list[list[int]], continuation: list[int], budget: int
) -> None:
    index = SessionIndex(capacity=64)
    for request, text in enumerate(texts):
        index.start(request, text[:1])
        index.append(request, text[1:])
        tree = index.draft(request, continuation, budget).validate(vocab_size=7)
        assert 1 <= len(tree) <= budget
        assert tree.tokens[0] == [*text, *continuation][-1]
        assert set(tree.tokens[1:].tolist()) <= {token for earlier in texts[: request + 1] for token in earlier}
        index.finish(request)
        assert index.cached_tokens() <= 64


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=12, max_size=60), continuation=st.lists(st.integers(0, 3), max_size=9)
)
def test_asking_about_an_outcome_changes_nothing(prompt: list[int], continuation: list[int]) -> None:
    index = SessionIndex()
    index.start(1, prompt)
    before = index.draft(1)
    index.draft(1, continuation)
    after = index.draft(1)
    assert before.tokens.tolist() == after.tokens.tolist()
    assert before.confidence.tolist() == after.confidence.tolist()


def test_a_long_repetition_is_drafted_to_its_end() -> None:
    passage = list(range(100, 120))
    index = SessionIndex()
    index.start(1, [*passage, 7, 8, 9, *passage[:8]])
    tree = index.draft(1, budget=60)
    node = 0
    for token in passage[8:]:
        child = tree.child(node, token)
        assert child is not None
        node = child


def test_a_long_match_survives_what_the_outcome_adds() -> None:
    passage = list(range(100, 120))
    index = SessionIndex()
    index.start(1, [*passage, 7, 8, 9, *passage[:5]])
    assert index.draft(1, passage[5:9]).child(0, passage[9]) is not None


def test_later_requests_draft_from_finished_answers_but_not_from_a_private_index() -> None:
    for capacity in (1000, 0):
        index = SessionIndex(capacity)
        index.start(1, [1])
        index.append(1, [11, 12, 13, 14])
        index.finish(1)
        index.start(2, [12])
        tree = index.draft(2, budget=4)
        assert (tree.child(0, 13) is not None) == (capacity > 0)


def test_answers_remembered_from_elsewhere_draft_like_finished_ones() -> None:
    index = SessionIndex(6, [np.asarray([11, 12, 13, SEPARATOR, 21, 22, SEPARATOR], np.int32)])
    for request, owner in enumerate(["", "a", None]):
        index.start(request, [12], owner=owner)
        tree = index.draft(request, budget=8)
        assert tree.child(0, 13) is not None and tree.child(0, 11) is None
        index.append(request, [*range(30, 50)])
        index.finish(request)
    assert index.cached_tokens("a") == 6, "public answers take no room of it"


@settings(max_examples=30, deadline=None)
@given(texts=TEXTS, owners=st.lists(st.sampled_from(["a", "b", None]), min_size=12, max_size=12))
def test_no_draft_has_a_token_that_only_others_saw(texts: list[list[int]], owners: list[str | None]) -> None:
    index, alphabet = SessionIndex(10_000), {"a": 0, "b": 10, None: 20}
    for request, (text, owner) in enumerate(zip(texts, owners, strict=False)):
        own = [9, *(alphabet[owner] + token for token in text)]
        index.start(request, [9], owner=owner)
        index.append(request, own[1:])
        tokens = index.draft(request, [9], budget=20).tokens.tolist()
        assert all(token == 9 or alphabet[owner] <= token < alphabet[owner] + 5 for token in tokens)
        index.finish(request)


def test_the_owner_that_was_used_least_recently_is_forgotten_first() -> None:
    index = SessionIndex(capacity=2 * LEAST)

    def knows(owner: str) -> bool:
        return index.cached_tokens(owner) > 0

    for request, owner in enumerate(["a", "b", "a", "c"]):
        index.start(request, [1], owner=owner)
        index.append(request, [2, 3])
        index.finish(request)
    assert [knows(owner) for owner in "abc"] == [True, False, True]


def test_a_request_goes_on_when_its_owner_is_forgotten() -> None:
    index = SessionIndex(capacity=LEAST)
    index.start(1, [1], owner="a")
    index.append(1, [*range(100, 120)])
    index.finish(1)
    index.start(2, [*range(100, 110)], owner="a")
    assert index.draft(2).child(0, 110) is not None
    index.start(3, [1], owner="b")
    index.append(3, [2, 3])
    index.finish(3)
    assert index.cached_tokens("a") == 0
    index.append(2, [110])
    assert index.draft(2).child(0, 111) is None
    index.finish(2)
    assert index.cached_tokens("a") > 0


SAMPLED = SamplingParams(temperature=1.0, seed=7)


def drawn(prompt: int, probs: list[float], answered: int) -> int:
    """What a target of those chances draws from tokens 0, 1, ... as the answer's token number `answered`."""
    return gumbel_argmax(torch.tensor(probs).log(), SAMPLED.seed, prompt + answered)


def test_the_follower_comes_first_that_wins_with_the_noise_of_its_position() -> None:
    winners = set()
    for before in range(20):
        index = SessionIndex()
        prompt = [9, 8, *[7, 0, 7, 1, 7, 2, 7, 3] * 3, *[5] * before, 7]
        index.start(1, prompt)
        for continuation in ([], [4, 7]):
            known = index.draft(1, continuation, budget=40, depth=1)
            followers, position = torch.tensor(known.tokens[1:].astype(np.int64)), len(prompt) + len(continuation)
            scores = torch.tensor(known.confidence[1:]).log() + gumbel(SAMPLED.seed, position, followers)
            first = int(index.draft(1, continuation, sampling=SAMPLED).tokens[1])
            assert first == int(followers[scores.argmax()])
            winners.add(first)
    assert len(winners) > 2


def test_without_temperature_noise_plays_no_part() -> None:
    index = SessionIndex()
    index.start(1, [7, 0, 7, 1, 7, 2, 7])
    greedy, seeded = index.draft(1), index.draft(1, sampling=SamplingParams(seed=3))
    assert greedy.tokens.tolist() == seeded.tokens.tolist()
    assert greedy.confidence.tolist() == seeded.confidence.tolist()


def test_with_the_noise_known_more_is_accepted_and_no_more_is_promised_than_that() -> None:
    """The target draws every token from the same four, whatever came before."""
    probs, accepted, promised = [0.4, 0.3, 0.2, 0.1], {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for noise in (True, False):
        index = SessionIndex()
        index.start(1, [0])
        for answered in range(3000):
            token = drawn(1, probs, answered)
            if answered >= 2000:
                tree = index.draft(1, budget=2, depth=1, sampling=SAMPLED if noise else SamplingParams())
                accepted[noise] += int(tree.tokens[1]) == token
                promised[noise] += float(tree.confidence[1])
            index.append(1, [token])
    assert accepted[True] > 1.5 * accepted[False]
    assert promised[False] < promised[True] < accepted[True]


def test_confidence_comes_to_mean_what_it_says() -> None:
    """In the text 1 is followed by 2 four times out of five, at random."""
    rng = np.random.default_rng(0)
    index = SessionIndex()
    index.start(1, [1])
    for _ in range(3000):
        index.append(1, [2 if rng.random() < 0.8 else 3, 1])
    tree = index.draft(1, budget=3)
    assert float(tree.confidence[tree.child(0, 2)]) == pytest.approx(0.8, abs=0.1)


def test_stores_grow_with_the_text() -> None:
    tokens = np.random.default_rng(0).integers(0, 5000, 30_000).tolist()
    index = SessionIndex(capacity=100)
    index.start(1, tokens[:10])
    index.append(1, tokens[10:])
    index.append(1, tokens[5000:5008])
    assert index.draft(1).child(0, tokens[5008]) is not None


@pytest.mark.parametrize("vocabulary", [10, 300, 1_000_000])
@pytest.mark.parametrize("capacity", [8_190, 8_192, 10_000])
def test_the_cache_stays_below_200_bytes_for_each_token_it_may_hold(capacity: int, vocabulary: int) -> None:
    """The text either repeats or hardly has a context twice, and the cache has long been full. Sizes are powers of two:
    10,000 fill theirs as 10 million do, the others are the worst.
    """
    index = SessionIndex(capacity)
    words = np.random.default_rng(0).integers(0, vocabulary, 5 * capacity)
    for answer in np.array_split(words, 100):
        index.start(1, [])
        index.append(1, answer.tolist())
        index.finish(1)
        assert index.memories.of("").arena.nbytes <= BYTES_PER_TOKEN * capacity
    assert index.cached_tokens() == capacity


def test_importing_the_index_does_not_import_its_compiler() -> None:
    code = "import sys, retrieval_index.session_index, drafters.lookup.suffix; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
