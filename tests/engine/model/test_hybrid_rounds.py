"""Rounds of models with states: whatever trees were verified and accepted before, a row has the bits it has alone."""

from __future__ import annotations

import random

import pytest
import torch

from engine.core.batch import Segment
from engine.core.tree import TokenTree
from engine.model.target import Target
from tests.engine.test_exact import read
from tests.engine.weights.family_gguf import random_model

pytestmark = pytest.mark.usefixtures("no_gradients")

LENGTH, VOCABULARY = 60, 262


def tree_along(text: list[int], rng: random.Random) -> tuple[TokenTree, list[int]]:
    """Some tokens of the text, each perhaps with wrong siblings, and further wrong nodes below any; the right nodes."""
    tokens, parents, spine = text[:1], [-1], [0]
    for right in text[1 : rng.randrange(1, 6)]:
        above = spine[-1]
        before, after = ([rng.randrange(VOCABULARY)] * rng.randrange(2) for _ in range(2))
        spine.append(len(tokens) + len(before))
        tokens += [*before, right, *after]
        parents += [above] * (len(before) + 1 + len(after))
    for _ in range(rng.randrange(5)):
        parents.append(rng.randrange(len(tokens)))
        tokens.append(rng.randrange(VOCABULARY))
    return TokenTree.from_lists(tokens, parents, [1.0] * len(tokens)), spine


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "lfm2", "granite 4 with experts"])
def test_rows_after_any_rounds_have_the_bits_that_they_have_alone(family: str) -> None:
    target = Target.of_model(random_model(family), family, kv_memory=1 << 24)
    for seed in range(8):
        rng = random.Random(seed)
        text = [rng.randrange(VOCABULARY) for _ in range(LENGTH)]
        alone, held, at = read(target, text, 1), target.open_cache(2 * LENGTH), rng.choice([1, 4, 5, 16, 17])
        assert torch.equal(target.run([Segment.of_text(text[:at], held, wanted="all")])[0], alone[:at])
        held.commit(range(at))
        while at < LENGTH - 8:
            tree, spine = tree_along(text[at:], rng)
            logits, _ = target.run([Segment.of_tree(tree, held)])
            assert torch.equal(logits[spine], alone[at : at + len(spine)])
            accepted = rng.randrange(1, len(spine) + 1)
            held.commit(spine[:accepted])
            at += accepted
        target.release(held)
