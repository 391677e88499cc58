from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from engine.sampling.argmax import NAN
from engine.sampling.gumbel_max import _plausible, draw, draw_bfloat16
from engine.sampling.noise import _bits, _rivals_on_device, gumbel, gumbel_argmax, gumbel_nearby
from engine.sampling.noise_bits import GOLDEN, MIX_1, MIX_2, bits_of, key_of, keys_from

SEEDS = st.integers(-(2**63), 2**63 - 1)


@njit
def compiled_bits(key: Any, token: Any) -> Any:
    return bits_of(key, token)


def reference_bits(seed: int, position: int, token: int) -> int:
    """Return the bits by plain integers: splitmix64's finaliser over a key of seed and position."""
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
def test_bits_are_those_of_plain_integer_arithmetic_wherever_they_are_computed(
    seed: int, position: int, token: int
) -> None:
    key, expected = key_of(seed, position), reference_bits(seed, position, token)
    assert compiled_bits(key, token) == expected
    assert int(_bits(int(key), torch.tensor([token]))[0]) == expected, "on an accelerator, here on the CPU"


@settings(deadline=None)  # compiles first
@given(SEEDS, st.integers(0, 2**40))
def test_keys_of_neighbouring_positions_are_those_of_each(seed: int, position: int) -> None:
    assert keys_from(seed, position, 3).tolist() == [int(key_of(seed, position + i)) for i in range(3)]


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


def key_that_gives(bits: int, token: int) -> np.uint64:
    """The finaliser's steps, undone."""
    mask = (1 << 64) - 1

    def shifted_back(x: int, n: int) -> int:
        y = x
        for _ in range(64 // n):
            y = x ^ (y >> n)
        return y

    x = shifted_back(bits << 12, 31)
    x = shifted_back(x * pow(MIX_2, -1, 1 << 64) & mask, 27)
    x = shifted_back(x * pow(MIX_1, -1, 1 << 64) & mask, 30)
    return np.uint64((x - token * GOLDEN) & mask)


@pytest.mark.parametrize("token", [0, 1, 2])
@pytest.mark.parametrize("bits", [0, 1, (1 << 52) - 2, (1 << 52) - 1])
def test_the_greatest_and_the_smallest_noise_there_can_be_are_compared_as_they_are(bits: int, token: int) -> None:
    key = key_that_gives(bits, token)
    assert compiled_bits(key, token) == bits
    for scores in (np.zeros(3, np.float32), np.array([0, -30, -35], np.float32), np.array([-36, -41, 0], np.float32)):
        noise = [-math.log(-math.log((int(compiled_bits(key, t)) + 0.5) / 2**52)) for t in range(3)]
        assert draw(key, scores) == int((scores + np.array(noise)).argmax())


class Elsewhere(Tensor):
    """A tensor that says it is on an accelerator."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cuda")


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_nearly_all_tokens_are_ruled_out_on_an_accelerator(spread: float) -> None:
    for position in range(60):
        scores = torch.randn(2000, generator=torch.Generator().manual_seed(position)) * spread
        assert len(_rivals_on_device(scores, 3, position)) == 1


def test_a_token_is_looked_at_if_its_score_is_near_the_best_or_its_noise_is_rare() -> None:
    key, scores = key_of(5, 6), np.linspace(-20, 0, 1000, dtype=np.float32)
    missing = np.array([1 - (int(compiled_bits(key, token)) + 0.5) / 2**52 for token in range(1000)])
    tokens, weight, rest = _plausible(key, scores, np.float32(0), np.float32(0.01))
    assert tokens.tolist() == np.flatnonzero((scores >= -8) | (missing < 0.01)).tolist()
    assert np.allclose(weight, np.exp(scores[tokens])) and np.allclose(rest, missing[tokens])


def test_infinities_are_compared_as_they_are() -> None:
    inf = torch.inf
    for values in ([-inf, 1.0, 2.0], [1.0, inf, inf], [-inf] * 3):
        scores = torch.tensor(values)
        everything = scores.double() + gumbel(1, 2, torch.arange(3))
        assert gumbel_argmax(scores, 1, 2) == int(everything.argmax())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("where", [0, 99, 4000])
def test_nothing_is_drawn_from_what_is_no_number(where: int, sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.zeros(5000)
    scores[2000] = torch.inf
    scores[where] = math.copysign(math.nan, sign)
    assert gumbel_argmax(scores, 1, 2) == NAN
    monkeypatch.setattr(
        "engine.sampling.noise._rivals_on_device", lambda far, *asking: _rivals_on_device(scores, *asking)
    )
    assert gumbel_argmax(scores.as_subclass(Elsewhere), 1, 2) == NAN


@given(SEEDS, st.integers(0, 5000), st.lists(st.integers(0, 300_000), min_size=1, max_size=9))
def test_noise_is_that_of_its_definition(seed: int, position: int, tokens: list[int]) -> None:
    """-log(-log(u)), u in the middle of one of 2^52 equal parts between 0 and 1."""
    middles = torch.tensor([(2 * reference_bits(seed, position, t) + 1) / 2**53 for t in tokens], dtype=torch.float64)
    expected = -torch.log(-torch.log(middles))
    assert torch.allclose(gumbel(seed, position, torch.tensor(tokens)), expected, rtol=1e-14, atol=1e-15)


def test_each_device_has_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0])
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "engine.sampling.noise._rivals_on_device", lambda *asking: (asked.append(asking), torch.tensor([2]))[1]
    )
    far = scores.as_subclass(Elsewhere)
    assert gumbel_argmax(far, 5, 6) == 2
    assert [(values is far, *rest) for values, *rest in asked] == [(True, 5, 6)]
    assert gumbel_argmax(scores, 5, 6) == int((scores.double() + gumbel(5, 6, torch.arange(4))).argmax())
    assert len(asked) == 1, "a kernel does the work on a CPU"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-30])
def test_bfloat16_logits_are_drawn_from_as_their_quotients_in_float32(temperature: float) -> None:
    logits = torch.randn((3, 5000), generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    bits = logits.view(torch.int16).numpy()
    for row, position in itertools.product(range(3), range(20)):
        drawn = draw_bfloat16(key_of(4, position), bits, row, temperature)
        assert drawn == gumbel_argmax(logits[row].float() / temperature, 4, position)


def test_tokens_far_below_the_best_are_drawn_as_often_as_there_are_many_of_them() -> None:
    """60,000 tokens that are 11 below the best win nearly half of the draws."""
    scores = torch.full((60_000,), -11.0)
    scores[777] = 0.0
    tokens = torch.arange(len(scores))
    drawn = [gumbel_argmax(scores, 5, position) for position in range(200)]
    assert drawn == [int((scores.double() + gumbel(5, position, tokens)).argmax()) for position in range(200)]
    assert 70 < drawn.count(777) < 150


def test_a_drafters_noise_is_the_draws_and_stays_where_the_tokens_are() -> None:
    tokens = torch.arange(0, 999, 7)
    assert torch.equal(gumbel_nearby(3, 5, tokens), gumbel(3, 5, tokens))
    nearby = gumbel_nearby(3, 5, tokens.to("meta"))
    assert nearby.device.type == "meta" and nearby.shape == tokens.shape
