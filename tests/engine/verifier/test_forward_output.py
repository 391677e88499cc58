"""Tokens that are drawn at all nodes of a round's trees before anyone walks down a tree."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling.drawn_tree import DrawnTree
from engine.sampling.sampler import Sampler
from engine.verifier import forward_output
from engine.verifier.forward_output import RowsOnHost, output_of

VOCABULARY = 12
PLAIN = SamplingParams(temperature=0.9, seed=4, max_tokens=50)
GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


def sampler_of(params: SamplingParams, prompt: int = 3) -> Sampler:
    return Sampler(params, [1] * prompt, [], VOCABULARY)


def tree_of(seed: int, nodes: int = 12) -> TokenTree:
    """With many children a node, so that paths are long."""
    rng = random.Random(seed)
    parents, tokens, taken = [-1], [0], set[tuple[int, int]]()
    while len(parents) < nodes:
        parent, token = rng.randrange(len(parents)), rng.randrange(VOCABULARY)
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return TokenTree.from_lists(tokens, parents, [1.0] * nodes)


def logits_of(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"top_p": 0.9}, False),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"repetition_penalty": 1.2}, False),
        ({"min_tokens": 2}, False),
    ],
)
def test_what_depends_on_more_than_the_logits_is_not_drawn_ahead(changes: dict[str, Any], plain: bool) -> None:
    assert sampler_of(SamplingParams(**{"temperature": 0.9, "max_tokens": 50} | changes)).is_plain is plain


def rows_of(
    trees: list[TokenTree], samplers: list[Sampler], logits: Tensor, states: Tensor | None = None
) -> RowsOnHost:
    firsts = [0, *accumulate(map(len, trees))]
    drawn = [DrawnTree(*one) for one in zip(trees, samplers, firsts, strict=False)]
    return RowsOnHost(drawn, logits, states, firsts[-1], 2)


def test_on_a_cpu_the_argmax_of_small_trees_is_known_and_draws_are_not() -> None:
    logits, trees = logits_of(10), [tree_of(1, 5), tree_of(2, 5)]
    found = rows_of(trees, [sampler_of(PLAIN), sampler_of(GREEDY)], logits)
    assert [found.known(0), found.known(1)] == [None, logits[5:].float().argmax(-1).tolist()]
    large = [tree_of(1, 9), tree_of(2, 9)]
    found = rows_of(large, [sampler_of(GREEDY)] * 2, logits_of(18))
    assert [found.known(0), found.known(1)] == [None, None]


def test_nothing_is_computed_on_a_cpu_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a forward has no part in it."""
    for name in ("argmax", "bfloat16_bits"):
        monkeypatch.setattr(forward_output, name, lambda *_: pytest.fail("is computed"))
    output_of([DrawnTree(tree_of(3, 4), sampler_of(GREEDY), 0)], logits_of(4), torch.randn(4, 2, 4), None, 4)


def test_states_and_successors_are_those_of_the_rows_that_are_asked_for() -> None:
    states, logits = torch.randn(12, 2, 4).bfloat16(), logits_of(9)
    found = rows_of([tree_of(3, 4), tree_of(4, 5)], [sampler_of(PLAIN)] * 2, logits, states)
    bits = states.view(torch.uint16).numpy()
    for got, rows in (
        (found.states_of(0, [0, 2]), [0, 2]),
        (found.states_of(1, [0, 4]), [4, 8]),
        (found.read_states(9, 2), [9, 10]),
    ):
        assert got is not None and (got == bits[rows]).all()
    ranked = found.successors_of(4, 5)
    assert ranked is not None and (ranked == logits[4:].topk(2).indices.numpy()).all()
    without = RowsOnHost([], logits, None, 9)
    assert without.successors_of(0, 4) is None and without.read_states(0, 4) is None
