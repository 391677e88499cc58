from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.batch import Segment
from engine.core.tree import TokenTree
from engine.model.masked import MaskedForward
from engine.model.masked_cache import MaskedCache
from tests.engine.model.test_target import random_tree
from tests.engine.tiny_families import build

pytestmark = pytest.mark.usefixtures("no_gradients")


def masked(family: str = "qwen3", **changes: Any) -> MaskedForward:
    return MaskedForward(build(family, "float32", **changes).double(), family)


def read(forward: MaskedForward, cache: MaskedCache, prompt: list[int]) -> None:
    """Commit a prompt."""
    forward([Segment.of_text(prompt, cache)], (1, 3))
    cache.commit(range(len(prompt)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_recorded_forwards_give_what_plain_ones_give(family: str) -> None:
    """Rows filled up to a bucket, keys and values written by index, the whole cache attended to behind a mask."""
    plain, recorded, rng = masked(family), masked(family), random.Random(5)
    recorded.records = True
    for _ in range(2):  # the second text over what the first left behind
        caches = plain.new_cache(120), recorded.new_cache(120)
        prompt = [rng.randrange(128) for _ in range(9)]
        for target, cache in zip((plain, recorded), caches, strict=True):
            read(target, cache, prompt)
        for _ in range(6):
            tree = random_tree(rng.randrange(128), [rng.randrange(128) for _ in range(4)], rng)
            found = [
                target([Segment.of_tree(tree, cache)], (1, 3))
                for target, cache in zip((plain, recorded), caches, strict=True)
            ]
            for one, other in zip(*found, strict=True):
                assert isinstance(one, Tensor)
                torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
            for cache in caches:
                cache.commit(tree.path(len(tree) - 1))
        assert len(caches[1].recorded) > 1
        recorded.release(caches[1])
    assert caches[1] is recorded.new_cache(120)


def test_where_a_bucket_does_not_fit_behind_the_text_the_forward_is_a_plain_one() -> None:
    target = masked(max_position_embeddings=256)
    target.records = True
    cache = target.new_cache(250)
    read(target, cache, [7] * 250)
    logits, _ = target([Segment.of_tree(TokenTree.chain(1, [2, 3, 4, 5], [1.0] * 4), cache)])
    assert logits.shape == (5, 128)
    assert not cache.recorded


def test_a_cache_given_back_twice_serves_one_request() -> None:
    target = masked()
    target.records = True
    cache = target.new_cache(40)
    target.release(cache)
    target.release(cache)
    assert target.new_cache(40) is not target.new_cache(40)


def test_a_family_whose_forward_cannot_be_recorded_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    target = masked()
    target.records = True
    monkeypatch.setattr(target, "_tree_recorded", lambda *_: (_ for _ in ()).throw(RuntimeError("while capturing")))
    target.check_recording()
    assert not target.records
    assert not target.new_cache(40).fixed


def test_a_text_has_as_many_rows_of_logits_as_are_wanted() -> None:
    target = masked()
    caches = [target.new_cache(20) for _ in range(3)]
    segments = [
        Segment.of_text([1, 2, 3, 4], cache, wanted=wanted)
        for cache, wanted in zip(caches, ("last", "all", "none"), strict=True)
    ]
    logits, _ = target(segments)
    assert len(logits) == 1 + 4 + 0 == sum(segment.wanted_rows for segment in segments)
    torch.testing.assert_close(logits[0], logits[4], msg="not the last row of the same text")
