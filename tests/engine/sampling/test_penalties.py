from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import Sampler, verify

VOCABULARY = 30
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
penalty = st.floats(-2, 2).map(lambda value: round(value, 2))


def reference(logits: list[float], prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    """OpenAI's formula, after the repetition penalty of `transformers` and before the bias, number by number."""
    counts, result = Counter(answer), []
    for token, value in enumerate(logits):
        if params.repetition_penalty and token in {*prompt, *answer}:
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        value -= counts[token] * params.frequency_penalty + (counts[token] > 0) * params.presence_penalty
        result.append(value + params.logit_bias.get(token, 0.0))
    return result


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 2**31), tokens.filter(bool), tokens, penalty, penalty, st.sampled_from([None, 0.8, 1.3]),
    st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=5),
)  # fmt: skip
def test_penalties_are_those_of_the_formula_however_far_the_answer_was_known(
    seed: int, prompt: list[int], answer: list[int], presence: float, frequency: float, repetition: float | None,
    bias: dict[int, float],
) -> None:  # fmt: skip
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    half = len(answer) // 2
    penalties = Penalties(params, prompt, answer[:half], VOCABULARY)
    for token in answer[half:]:
        penalties.saw(token)
    expected = torch.tensor(reference(logits.tolist(), prompt, answer, params))
    torch.testing.assert_close(penalties(logits), expected, rtol=1e-5, atol=1e-4)
    assert bool(penalties) == bool(presence or frequency or bias or repetition)


SAYS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"logit_bias": {3: 2.0, 7: -1.5, 9: -100.0}},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"presence_penalty": -1.0, "logit_bias": {5: 1.0}, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize(("say", "drafted"), [*zip(SAYS, [[], [5, 7, 3], [9, 0]] * 2, strict=True)])
def test_the_second_tokens_distribution_is_the_models_own_or_the_penalised_one_through_any_tree(
    say: dict[str, Any], drafted: list[int]
) -> None:
    """A chi-square test over 4,000 seeds: the first token drawn is given, the second follows what is said of it. Trees
    have nothing, likely tokens or unlikely ones.
    """
    vocabulary, first = 12, 5
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 1.5
    certain = torch.full((vocabulary,), -1e4)
    certain[first] = 1e4
    tree = TokenTree.from_lists([1, first, *drafted], [-1, 0, *[1] * len(drafted)], [1, 1, *[0.1] * len(drafted)])
    rows = torch.stack([certain, *[logits] * (len(tree) - 1)])
    draws = []
    for seed in range(4000):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=2, **say)
        path, tokens = verify(tree, rows, Sampler(params, [1, 2], [], vocabulary))
        assert path[:2] == [0, 1] and tokens[0] == first
        draws.append(tokens[1])
    expected = torch.tensor(reference(logits.tolist(), [1, 2], [first], SamplingParams(**say))).softmax(0).numpy()
    counts = np.bincount(draws, minlength=vocabulary)
    kept = expected * len(draws) > 5
    observed = np.append(counts[kept], counts[~kept].sum())
    right = np.append(expected[kept], expected[~kept].sum()) * len(draws)
    statistic = float(((observed - right) ** 2 / np.maximum(right, 1e-9))[right > 0.5].sum())
    assert statistic < 31.3  # 11 degrees of freedom, one in a thousand
    assert counts[expected * len(draws) < 1e-3].sum() == 0
