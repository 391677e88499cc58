"""Texts that differ: rounding or a mistake?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure.ties import Referee, most_turned, score_gap
from engine.config import load
from engine.core.params import SamplingParams
from engine.model.target import Target
from engine.sampling.noise import gumbel

PROMPT = [40, 41, 42, 43]
GREEDY = SamplingParams()


@pytest.fixture
def logits(tiny: str) -> torch.Tensor:
    target = Target.load(tiny, "float32")
    return target.prefill(target.new_cache(8), [*PROMPT, 50])[0]


def test_the_gap_is_taken_at_the_first_difference(tiny: str, logits: torch.Tensor) -> None:
    gap = score_gap(Target.load(tiny, "float32"), PROMPT, [50, 60, 1], [50, 61, 2], GREEDY)
    assert gap == pytest.approx(float((logits[60] - logits[61]).abs()), abs=1e-5)


def test_when_sampling_the_noise_counts_too(tiny: str, logits: torch.Tensor) -> None:
    sampling = SamplingParams(temperature=0.5, seed=9)
    noise = 0.5 * gumbel(9, len(PROMPT) + 1, torch.tensor([60, 61]))
    expected = float((logits[60] + noise[0] - logits[61] - noise[1]).abs())
    assert score_gap(Target.load(tiny, "float32"), PROMPT, [50, 60], [50, 61], sampling) == pytest.approx(expected)


def test_the_repetition_penalty_counts_too(tiny: str, logits: torch.Tensor) -> None:
    seen, other = 50, 61
    penalty = 2.0 if logits[seen] < 0 else 0.5
    gap = score_gap(
        Target.load(tiny, "float32"), PROMPT, [50, seen], [50, other], SamplingParams(repetition_penalty=2.0)
    )
    assert gap == pytest.approx(float((logits[seen] * penalty - logits[other]).abs()), abs=1e-5)


def test_an_answer_cut_short_is_no_tie(tiny: str) -> None:
    assert score_gap(Target.load(tiny, "float32"), PROMPT, [50, 60], [50], GREEDY) == float("inf")


def test_what_counts_as_a_tie_depends_on_the_type_of_the_run(tiny: str, logits: torch.Tensor) -> None:
    ranked = logits.sort(descending=True)
    gaps = ranked.values[:-1] - ranked.values[1:]
    at = int(((gaps > 1e-3) & (gaps < 0.09)).nonzero()[0])
    one, other = [50, int(ranked.indices[at])], [50, int(ranked.indices[at + 1])]
    assert Referee(load({"model": tiny, "dtype": "bfloat16"})).is_tie(PROMPT, one, other, GREEDY)
    assert not Referee(load({"model": tiny, "dtype": "float32"})).is_tie(PROMPT, one, other, GREEDY)


class Fixed:
    """A causal model that knows the logits behind each position."""

    device = "cpu"

    def __init__(self, logits: list[list[float]]):
        self.logits = torch.tensor([logits])

    def __call__(self, ids: torch.Tensor, logits_to_keep: int) -> Any:
        assert ids.shape[1] == self.logits.shape[1]
        return SimpleNamespace(logits=self.logits[:, -logits_to_keep:])


def test_rounding_turns_what_the_rounded_model_ranks_otherwise_along_the_text() -> None:
    exact = Fixed([[9, 0, 0], [0, 1.0, 0.7], [2.0, 1.5, 0], [0, 9, 0]])
    rounded = Fixed([[0, 9, 0], [0, 1.0, 1.1], [1.5, 1.6, 0], [9, 0, 0]])  # the prompt's and the end's do not count
    assert most_turned(exact, rounded, [7, 8], [2, 0]) == 0.5
    assert most_turned(exact, exact, [7, 8], [2, 0]) == 0.0


def test_rounding_is_measured_on_models_of_transformers(tiny: str) -> None:
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
    )
    text = torch.randint(100, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    assert 0 < most_turned(exact, rounded, PROMPT, text) < 0.5
