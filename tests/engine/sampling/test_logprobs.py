from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling.logprobs import token_logprob, token_logprobs
from engine.sampling.sampler import Sampler, verify

PROMPT = list(b"What is the sum of 1 and 2?")


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 500), st.integers(0, 20), st.booleans())
def test_it_is_the_log_softmax_with_the_likeliest_tokens_in_order(
    seed: int, vocabulary: int, alternatives: int, coarse: bool
) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 5
    logits = logits.bfloat16() if coarse else logits  # ties
    right = logits.double().log_softmax(0)
    found = token_logprob(logits, seed % vocabulary, alternatives)
    assert found.token == seed % vocabulary
    assert math.isclose(found.logprob, right[found.token].item(), abs_tol=1e-5)
    order = sorted(range(vocabulary), key=lambda token: (-logits[token].item(), token))
    assert [token for token, _ in found.top] == order[:alternatives]
    assert all(math.isclose(value, right[token].item(), abs_tol=1e-5) for token, value in found.top)


def test_huge_and_infinite_logits_are_no_trouble() -> None:
    found = token_logprob(torch.tensor([1e4, -torch.inf, 1e4, -1e4]), 1, 4)
    assert found.logprob == -math.inf
    assert [token for token, _ in found.top] == [0, 2, 3, 1]
    assert math.isclose(found.top[0][1], -math.log(2), abs_tol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_among_others_has_the_bits_it_has_alone(threads: int) -> None:
    torch.set_num_threads(threads)
    rows = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)).bfloat16()
    together = token_logprobs(rows, range(40), 5)
    assert together == [token_logprob(row.clone(), token, 5) for token, row in enumerate(rows)]


def test_a_row_with_no_token_behind_it_is_left_out() -> None:
    assert len(token_logprobs(torch.zeros(3, 5), [1, 2], 0)) == 2


def test_they_are_the_models_own_whatever_is_said_of_the_draw() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    says = [
        SamplingParams(logprobs=3),
        SamplingParams(logprobs=3, temperature=1.7, top_k=2, seed=5, presence_penalty=1.0),
        SamplingParams(logprobs=3, logit_bias={7: 100.0}, min_tokens=3),
    ]
    for params in says:
        sampler = Sampler(params, [1, 2], [9], 50)
        tokens = verify(TokenTree.root_only(2), logits, sampler)[1]
        assert sampler.take_logprobs() == (token_logprob(logits[0], tokens[0], 3),)
        assert sampler.take_logprobs() == ()
