"""Tokens that are drawn at all nodes of a round's trees before anyone walks down a tree."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling.sampler import Sampler, verify
from engine.verifier.known_tokens import Known, RowStates, _draw, known_tokens, row_states

VOCABULARY = 12
PLAIN = SamplingParams(temperature=0.9, seed=4, max_tokens=50)


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


def test_walks_over_known_tokens_are_those_that_draw_node_by_node() -> None:
    trees, prompts = [tree_of(seed) for seed in range(6)], [3, 7, 1, 3, 9, 2]
    samplers = [sampler_of(PLAIN, prompt) for prompt in prompts]
    logits, known = logits_of(72), [None] * 6
    _draw([(tree, samplers[i], 12 * i) for i, tree in enumerate(trees)], logits, range(6), known)  # type: ignore[arg-type]
    lengths = set()
    for i, tree in enumerate(trees):
        rows = logits[12 * i : 12 * i + 12]
        expected = verify(tree, rows, sampler_of(PLAIN, prompts[i]))
        assert verify(tree, rows, samplers[i], known[i]) == expected
        assert tree.walk(known[i]) == expected[0]  # type: ignore[arg-type]
        lengths.add(len(expected[0]))
    assert len(lengths) > 1


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


def test_on_a_cpu_the_argmax_of_small_trees_is_known_and_draws_are_not() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=50)
    logits, trees = logits_of(10), [tree_of(1, 5), tree_of(2, 5)]
    known = known_tokens(trees, [sampler_of(PLAIN), sampler_of(greedy)], logits)
    assert known == [None, logits[5:].float().argmax(-1).tolist()]
    large = [tree_of(1, 9), tree_of(2, 9)]
    assert known_tokens(large, [sampler_of(greedy)] * 2, logits_of(18)) == [None, None]


def test_states_are_those_of_the_rows_that_are_asked_for() -> None:
    states = torch.randn(9, 2, 4).bfloat16()
    trees: list[TokenTree] = [tree_of(3, 4), tree_of(4, 5)]
    known: list[Known] = [[0] * 4, None]
    found = row_states(states, trees, known)
    assert found is not None and row_states(None, trees, known) is None
    assert (found.of([0, 6, 2]) == states[[0, 6, 2]].view(torch.uint16).numpy()).all()


def test_a_device_sends_what_is_expected_at_once_and_other_rows_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states, sent = torch.randn(9, 2, 4).bfloat16(), list[list[int]]()

    def picked(self: RowStates, rows: Any) -> Tensor:
        sent.append(list(rows))
        return states[list(rows)]

    monkeypatch.setattr(RowStates, "_picked", picked)
    found = RowStates(Away(states), [1, 4, 5])  # type: ignore[arg-type]
    for rows in ([4, 1], [5], [2, 4]):
        assert (found.of(rows) == states[rows].view(torch.uint16).numpy()).all()
    assert sent == [[1, 4, 5], [2, 4]]


class Away:
    """States that are on a device."""

    def __init__(self, states: Tensor):
        self.states, self.device = states, torch.device("cuda")
