from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.noise import _bits, _bits_in_torch, _rivals, _rivals_on_device, gumbel, gumbel_argmax
from engine.noise_bits import key_of, keys_from, missing_to_one

SEEDS = st.integers(-(2**63), 2**63 - 1)


def reference_bits(seed: int, position: int, token: int) -> int:
    """The same numbers by plain integers: splitmix64's finaliser over a key of seed and position."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    key = mix(mix(seed * 0x9E3779B97F4A7C15) ^ (position + 1) * 0xBF58476D1CE4E5B9)
    return mix((token + 1) * 0x9E3779B97F4A7C15 + key) >> 12


@settings(deadline=None)  # compiles first
@given(SEEDS, st.integers(0, 2**40), st.integers(0, 300_000))
def test_bits_are_those_of_plain_integer_arithmetic(seed: int, position: int, token: int) -> None:
    assert int(_bits(seed, position, torch.tensor([token]))[0]) == reference_bits(seed, position, token)


@settings(deadline=None)  # compiles first
@given(SEEDS, st.integers(0, 2**40))
def test_keys_of_neighbouring_positions_are_those_of_each(seed: int, position: int) -> None:
    assert keys_from(seed, position, 3).tolist() == [int(key_of(seed, position + i)) for i in range(3)]


@given(SEEDS, st.integers(0, 2**40), st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_bits_are_the_same_wherever_they_are_computed(seed: int, position: int, tokens: list[int]) -> None:
    """What a GPU computes, here on the CPU."""
    elsewhere = _bits_in_torch(int(key_of(seed, position)), torch.tensor(tokens))
    assert torch.equal(elsewhere, _bits(seed, position, torch.tensor(tokens)))


@settings(deadline=None)  # compiles first
@given(SEEDS, st.integers(0, 5000))
def test_what_is_left_of_one_is_that_of_the_bits(seed: int, position: int) -> None:
    bits = _bits(seed, position, torch.arange(50)).numpy()
    left = (((1 << 52) - 1 - bits).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-52)
    assert np.array_equal(missing_to_one(key_of(seed, position), 50), left)


@st.composite
def scores(draw: st.DrawFn) -> Tensor:
    """From flat to peaky, from one token to many, of any magnitude, with equals and tokens ruled out."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vocabulary = draw(st.one_of(st.integers(1, 8), st.integers(9, 400)))
    spread = draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0, 1e6, 1e30]))
    values = torch.randn(vocabulary, generator=generator) * spread
    values[torch.rand(vocabulary, generator=generator) < 0.02] += draw(st.sampled_from([0.0, 10.0, 40.0]))
    if draw(st.booleans()):
        values = values.round()
    values += draw(st.sampled_from([0.0, -100.0, 1e5, 1e9, -1e15, 1e18]))
    excluded = torch.rand(vocabulary, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    return values.masked_fill(excluded, -torch.inf)


@settings(deadline=None, max_examples=500)
@given(SEEDS, st.integers(0, 5000), scores())
def test_ruling_tokens_out_never_changes_the_winner(seed: int, position: int, scores: Tensor) -> None:
    everything = scores.double() + gumbel(seed, position, torch.arange(len(scores)))
    assert gumbel_argmax(scores, seed, position) == int(everything.argmax())
    left = _rivals_on_device(scores, seed, position)
    assert left[everything[left].argmax()] == everything.argmax()


def test_the_greatest_and_the_smallest_noise_there_can_be_are_compared_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = (1 << 52) - 1
    for bits in ([5, most, most - 1], [most - 2, most - 1, most], [0, 1, 2], [most, 0, most]):
        given = np.array(bits, np.int64)
        rest = ((most - given).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-52)
        monkeypatch.setattr("engine.noise.bits_of_all", lambda key, tokens, given=given: given[tokens].copy())
        monkeypatch.setattr("engine.noise.missing_to_one", lambda key, count, rest=rest: rest[:count])
        everything = torch.zeros(3).double() + gumbel(1, 2, torch.arange(3))
        assert gumbel_argmax(torch.zeros(3), 1, 2) == int(everything.argmax())


def test_an_excluded_token_is_never_drawn() -> None:
    scores = torch.zeros(200)
    scores[:150] = -torch.inf
    assert all(gumbel_argmax(scores, 1, position) >= 150 for position in range(300))


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_uniform_along_every_key(axis: str) -> None:
    n = 4096
    if axis == "token":
        bits = _bits(5, 7, torch.arange(n))
    elif axis == "position":
        bits = torch.cat([_bits(5, i, torch.tensor([7])) for i in range(n)])
    else:
        bits = torch.cat([_bits(i, 5, torch.tensor([7])) for i in range(n)])
    counts = np.bincount((bits >> 46).numpy(), minlength=64)
    chi_square = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)


def test_draws_follow_the_softmax() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = [gumbel_argmax(scores, 11, position) for position in range(8000)]
    counts = np.bincount(draws, minlength=4)
    expected = scores.softmax(-1).numpy() * len(draws)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, one in a thousand


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_nearly_all_tokens_are_ruled_out(spread: float) -> None:
    left = []
    for position in range(60):
        scores = torch.randn(2000, generator=torch.Generator().manual_seed(position)) * spread
        left.append(len(_rivals(scores.numpy(), 3, position)))
        assert len(_rivals_on_device(scores, 3, position)) == 1
    assert sum(left) / len(left) < 3


@pytest.mark.filterwarnings("error")
def test_infinities_and_what_is_no_number_are_compared_without_a_word() -> None:
    for values in ([-torch.inf, 1.0, 2.0], [torch.inf, 1.0, 2.0], [torch.nan, 1.0, 2.0], [-torch.inf] * 3):
        scores = torch.tensor(values)
        everything = scores.double() + gumbel(1, 2, torch.arange(3))
        assert gumbel_argmax(scores, 1, 2) == int(everything.argmax())


@given(SEEDS, st.integers(0, 5000), st.lists(st.integers(0, 300_000), min_size=1, max_size=9))
def test_noise_is_that_of_its_definition(seed: int, position: int, tokens: list[int]) -> None:
    """-log(-log(u)), u in the middle of one of 2^52 equal parts between 0 and 1."""
    middles = torch.tensor([(2 * reference_bits(seed, position, t) + 1) / 2**53 for t in tokens], dtype=torch.float64)
    assert torch.equal(gumbel(seed, position, torch.tensor(tokens)), -torch.log(-torch.log(middles)))


class Elsewhere(Tensor):
    """A tensor that says it is on an accelerator."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cuda")


def test_each_device_has_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, scores = torch.arange(4), torch.tensor([0.0, 1.0, 2.0, 3.0])
    here = _bits(1, 2, tokens)
    assert torch.equal(_bits(1, 2, tokens.as_subclass(Elsewhere)).as_subclass(Tensor), here)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("engine.noise._rivals_on_device", lambda *asking: (asked.append(asking), torch.tensor([2]))[1])
    monkeypatch.setattr("engine.noise._bits_in_torch", lambda *asking: asked.append(asking))
    far = scores.as_subclass(Elsewhere)
    assert gumbel_argmax(far, 5, 6) == 2
    assert [(values is far, *rest) for values, *rest in asked] == [(True, 5, 6)]
    assert gumbel_argmax(scores, 5, 6) == int((scores.double() + gumbel(5, 6, tokens)).argmax())
    assert len(asked) == 1, "numpy does the work on a CPU"


def test_tokens_far_below_the_best_are_drawn_as_often_as_there_are_many_of_them() -> None:
    """60,000 tokens that are 11 below the best win nearly half of the draws."""
    scores = torch.full((60_000,), -11.0)
    scores[777] = 0.0
    tokens = torch.arange(len(scores))
    drawn = [gumbel_argmax(scores, 5, position) for position in range(200)]
    assert drawn == [int((scores.double() + gumbel(5, position, tokens)).argmax()) for position in range(200)]
    assert 70 < drawn.count(777) < 150
