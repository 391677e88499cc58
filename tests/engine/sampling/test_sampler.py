from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.core.errors import NotANumber, RequestFailed
from engine.core.grammar import Grammar
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling import matcher
from engine.sampling.matcher import Matchers
from engine.sampling.noise import gumbel_argmax
from engine.sampling.penalties import penalised
from engine.sampling.sampler import Sampler, _sum_as_integers, truncate, verify
from tests.conftest import VOCABULARY, tiny_tokenizer


def logits_of(tree: TokenTree, draws: dict[int, int], vocabulary: int = 10) -> torch.Tensor:
    """Logits whose argmax at a node is `draws[node]`, and token 9 elsewhere."""
    logits = torch.zeros(len(tree), vocabulary)
    for node in range(len(tree)):
        logits[node, draws.get(node, 9)] = 5.0
    return logits


TREE = TokenTree.from_lists([0, 1, 2, 3, 4], [-1, 0, 0, 1, 3], [1, 0.5, 0.4, 0.3, 0.2])


def greedy(**options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), [7, 8], [5], 10)


@pytest.mark.parametrize(
    ("options", "draws", "walked", "reason"),
    [
        ({}, {0: 1, 1: 3, 3: 8}, ([0, 1, 3], [1, 3, 8]), None),
        ({}, {0: 6}, ([0], [6]), None),
        ({"max_tokens": 2}, {0: 1, 1: 3, 3: 4}, ([0, 1], [1, 3]), "length"),
        ({}, {0: 1, 1: 5}, ([0, 1], [1, 5]), "eos"),
        ({"ignore_eos": True}, {0: 1, 1: 5}, ([0, 1], [1, 5]), None),
        ({"stop_token_ids": (1, 77), "ignore_eos": True}, {0: 1, 1: 3}, ([0], [1]), "stop"),
    ],
)
def test_the_walk_follows_the_targets_own_tokens_and_adds_the_bonus_until_the_answer_ends(
    options: dict[str, Any], draws: dict[int, int], walked: tuple[list[int], list[int]], reason: str | None
) -> None:
    sampler = greedy(**options)
    assert verify(TREE, logits_of(TREE, draws), sampler) == walked
    assert sampler.finish_reason == reason


def test_the_walk_goes_on_behind_an_end_that_is_ignored_and_ends_at_one_that_is_not() -> None:
    tree = TokenTree.chain(0, [5, 1], [0.5, 0.5])
    logits = logits_of(tree, {0: 5, 1: 1, 2: 2})
    assert verify(tree, logits, greedy(ignore_eos=True))[1] == [5, 1, 2] and verify(tree, logits, greedy())[1] == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stop", [(), (6,)])
def test_neither_an_end_nor_a_stop_token_is_drawn_before_min_tokens(stop: tuple[int, ...], temperature: float) -> None:
    """The model does not have some of the tokens that end its texts."""
    end, logits = (stop or (5,))[0], torch.full((1, 10), -100.0)
    logits[0, end], logits[0, 4] = 50.0, 0.0
    params = SamplingParams(min_tokens=2, temperature=temperature, stop_token_ids=stop)
    sampler = Sampler(params, [7, 8], [10, 5, 99], 10)
    assert [verify(TokenTree.root_only(0), logits, sampler)[1][0] for _ in range(3)] == [4, 4, end]


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.1, 3),
    st.integers(0, 60),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
)
def test_truncation_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    ids = torch.tensor([[1]])
    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    if min_p > 0:
        expected = MinPLogitsWarper(min_p)(ids, expected)
    assert torch.equal(truncate(logits[0] / temperature, top_k, top_p, min_p), expected[0])


def test_choices_are_settled_where_nothing_changes_the_logits() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    choices = greedy().choices(logits)
    assert choices.settled and [choices[node].best for node in range(50)] == logits.argmax(-1).tolist()
    assert not greedy(min_tokens=1).choices(logits).settled
    assert not greedy(repetition_penalty=1.2).choices(logits).settled


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.3}, {"min_tokens": 3}])
def test_logits_that_are_no_numbers_emit_nothing_and_say_where(options: dict[str, Any]) -> None:
    """The prompt has two tokens, so 8 is drawn at position 2 and the next would be at position 3, which plain decoding
    finds a round later.
    """
    tree = TokenTree.chain(0, [8], [0.5])
    logits = logits_of(tree, {0: 8})
    logits[1, 2] = torch.nan
    sampler = greedy(top_k=1, **options)
    assert verify(tree, logits, sampler) == ([0], [8])
    with pytest.raises(NotANumber) as error:
        verify(TokenTree.root_only(8), logits[1:], sampler)
    assert str(error.value) == (
        "logits are not numbers (NaN) at position 3: the model overflows on this text, or its weights are damaged; "
        "try dtype: float32, or get the checkpoint again"
    )
    assert sampler.drawn == 1


def decoded(text: list[int], logits: Tensor, sampler: Sampler, drafted: int) -> tuple[list[int], str]:
    """Decode until it fails, with so many tokens of the text drafted in each round; return what was emitted, and why it
    failed. logits: [len(text) + 1, vocab]
    """
    tokens = list[int]()
    while True:
        at = len(tokens)
        tree = TokenTree.chain(0, (ahead := text[at : at + drafted]), [0.9] * len(ahead))
        try:
            tokens += verify(tree, logits[at : at + len(tree)], sampler)[1]
        except RequestFailed as error:
            return tokens, str(error)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 1, "presence_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("fails", ["logits", "grammar"])
def test_where_nothing_can_be_drawn_drafts_change_neither_the_tokens_before_nor_the_error(
    fails: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar needs more and more states of its library, which has few here."""
    limits = pytest.importorskip("llguidance").LLParserLimits(max_lexer_states=20)
    monkeypatch.setattr(matcher, "_limits", lambda: limits)
    text: list[int] = tiny_tokenizer()("abbaabababbbaab" * 4)["input_ids"]
    logits = torch.zeros(len(text) + 1, VOCABULARY)
    logits[range(len(text)), text] = 50.0
    if fails == "logits":
        logits[7, 3] = torch.nan
    found = []
    for drafted in (0, 1, 5, len(text)):
        matchers = Matchers(tiny_tokenizer, VOCABULARY, [END])
        grammar = Grammar(regex="[ab]*a[ab]{14}c" if fails == "grammar" else "[ab]*")
        guide = matchers.begin(grammar, []).result(30)
        matchers.close()
        sampler = Sampler(SamplingParams(max_tokens=200, **options), [7, 8], [END], VOCABULARY, (), guide)
        found.append((*decoded(text, logits, sampler, drafted), sampler.drawn, sampler.position, sampler.logprobs))
    tokens, error, *_ = found[0]
    assert 0 < len(tokens) < len(text) and tokens == text[: len(tokens)]
    assert ("too many states" if fails == "grammar" else "position 9") in error
    assert found[1:] == found[:1] * 3


def test_logits_in_bfloat16_are_drawn_from_with_the_noise_of_their_position() -> None:
    """As their values in float32 are, by another code."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)).bfloat16()

    def drawn(rows: Tensor, start: int, seed: int) -> int:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed), range(start), [], VOCABULARY, ())
        return verify(TokenTree.root_only(0), rows, sampler)[1][0]

    places = [(start, seed) for start in range(1, 9) for seed in range(4)]
    expected = [drawn(logits.float(), *place) for place in places]
    assert [drawn(logits, *place) for place in places] == expected
    assert len(set(expected)) > 4


EQUALS = torch.tensor([[0.0, 7.0, 7.0, -3.0, 7.0, 0.0, 6.5, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-6}, {"temperature": 1e-3}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grammar", [None, Grammar(regex="[a-z]*")], ids=str)
def test_where_only_one_candidate_can_be_meant_the_lowest_of_equals_is_drawn_whatever_the_seed(
    options: dict[str, Any], dtype: torch.dtype, grammar: Grammar | None
) -> None:
    logits = torch.zeros(1, VOCABULARY)
    letters = tiny_tokenizer()("bcd")["input_ids"]
    logits[0, letters] = 7.0
    guide = None
    if grammar is not None:
        pytest.importorskip("llguidance")
        matchers = Matchers(tiny_tokenizer, VOCABULARY, [END])
        guide = matchers.begin(grammar, []).result(30)
    drawn = set()
    for seed in range(12):
        params = SamplingParams(**{"temperature": 1.0, "seed": seed} | options).validate()
        sampler = Sampler(params, [7, 8], [END], VOCABULARY, (), None if guide is None else guide.copy())
        drawn |= set(verify(TokenTree.root_only(0), logits.to(dtype), sampler)[1])
    assert drawn == {min(letters)}


def test_just_above_the_bound_equal_logits_are_drawn_by_the_noise() -> None:
    drawn = set()
    for seed in range(24):
        params = SamplingParams(temperature=1.01e-3, seed=seed)
        drawn |= set(verify(TokenTree.root_only(0), EQUALS, Sampler(params, [7, 8], [], 10))[1])
    assert drawn == {1, 2, 4}


@pytest.mark.parametrize("min_tokens", [0, 1])
@pytest.mark.parametrize(("stop", "expected"), [("b", "b"), ("x", "c"), ("<|user|>", "c")])
def test_under_a_grammar_a_stop_token_comes_where_the_grammar_lets_it_or_is_complete(
    stop: str, expected: str, min_tokens: int
) -> None:
    """`b` is text of the grammar; the others may only come behind the first `c`, where it is complete."""
    pytest.importorskip("llguidance")
    (token, c, first) = (tiny_tokenizer()(text)["input_ids"][0] for text in (stop, "c", expected))
    first = c if min_tokens else first
    logits = torch.zeros(1, VOCABULARY)
    logits[0, token], logits[0, c] = 5.0, 4.0
    matchers = Matchers(tiny_tokenizer, VOCABULARY, [END])
    guide = matchers.begin(Grammar(regex="[bc]+"), []).result(30)
    matchers.close()
    params = SamplingParams(stop_token_ids=(token,), min_tokens=min_tokens)
    sampler, drawn = Sampler(params, [7, 8], [END], VOCABULARY, (), guide), []
    while sampler.finish_reason is None:
        drawn += verify(TokenTree.root_only(0), logits, sampler)[1]
    assert drawn == ([token] if first == token else [first, token]) and sampler.finish_reason == "stop"


def test_a_stop_token_that_alone_may_come_under_a_grammar_comes_before_min_tokens() -> None:
    pytest.importorskip("llguidance")
    matchers = Matchers(tiny_tokenizer, VOCABULARY, [END])
    guide = matchers.begin(Grammar(regex="bc"), []).result(30)
    matchers.close()
    (token,) = tiny_tokenizer()("b")["input_ids"]
    sampler = Sampler(SamplingParams(stop_token_ids=(token,), min_tokens=3), [7, 8], [END], VOCABULARY, (), guide)
    assert verify(TokenTree.root_only(0), torch.zeros(1, VOCABULARY), sampler)[1] == [token]
    assert sampler.finish_reason == "stop"


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 1.0)])
def test_truncation_is_that_of_transformers_at_its_limits(top_k: int, top_p: float, min_p: float) -> None:
    """There are eight equal logits and eight smaller ones."""
    logits, ids = torch.tensor([[3.0] * 8 + [-200.0] * 8]), torch.tensor([[1]])
    warper = TopKLogitsWarper(1) if top_k else MinPLogitsWarper(1.0) if min_p else TopPLogitsWarper(top_p)
    assert torch.equal(truncate(logits[0], top_k, top_p, min_p), warper(ids, logits)[0])


def test_a_sampler_goes_on_behind_what_an_earlier_one_has_drawn() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=6, repetition_penalty=1.2)
    root, whole = TokenTree.root_only(0), Sampler(params, [1, 2, 3], [], 100)
    draws = [verify(root, logits, whole)[1][0] for _ in range(6)]
    resumed = Sampler(params, [1, 2, 3], [], 100, draws[:4])
    assert [verify(root, logits, resumed)[1][0] for _ in range(2)] == draws[4:]
    assert resumed.finish_reason == "length"


END = 0
SAYS: list[dict[str, Any]] = [
    {},
    {"min_tokens": 6},
    {"ignore_eos": True, "max_tokens": 9},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7},
    {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 1.0, "ignore_eos": True, "max_tokens": 9},
    {"temperature": 3.0, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.2, "min_tokens": 6},
]


def reference_draw(
    logits: torch.Tensor, allowed: torch.Tensor, params: SamplingParams, seen: list[int], position: int
) -> int:
    """By the definition: what is not allowed has no chance, and truncation sees the rest alone."""
    if params.repetition_penalty:
        mask = torch.zeros(len(logits), dtype=torch.bool)
        mask[seen] = True
        logits = penalised(logits, mask, params.repetition_penalty)
    scores = logits.masked_fill(~allowed, -torch.inf)
    if params.temperature == 0:
        return int(scores.argmax())
    scores = scores / params.temperature
    scores[allowed] = truncate(scores[allowed], params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0)
    return gumbel_argmax(scores, params.seed, position)


@pytest.mark.parametrize("say", SAYS, ids=str)
@pytest.mark.parametrize("grammar", [None, Grammar(regex="(ab|c)*d{0,9}"), Grammar(regex="a{2,}")], ids=str)
def test_draws_are_those_of_the_definition_under_a_grammar_and_without(
    grammar: Grammar | None, say: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    matchers = Matchers(tiny_tokenizer, VOCABULARY, [END])
    generator, endings, off = torch.Generator().manual_seed(4), set(), 0
    for seed in range(6):
        params = SamplingParams(**{"seed": seed, "max_tokens": 30} | say)
        guide, own = (None if grammar is None else matchers.begin(grammar, []).result(30) for _ in range(2))
        sampler, text = Sampler(params, [7, 8], [END], VOCABULARY, (), guide), [7, 8]
        while sampler.finish_reason is None:
            drawn = len(text) - 2
            logits = torch.randn(1, VOCABULARY, generator=generator) * 2
            logits[0, END] += 5
            may_end = drawn >= params.min_tokens and not params.ignore_eos
            if own is None:
                allowed = torch.ones(VOCABULARY, dtype=torch.bool)
                allowed[END] = may_end or (params.ignore_eos and drawn >= params.min_tokens)
            else:
                allowed = torch.from_numpy(own.allowed().copy())
                allowed[END] = own.complete and may_end
                if not allowed.any():  # nothing can follow: the answer ends early
                    allowed[END] = True
            expected = reference_draw(logits[0], allowed, params, text, len(text))
            off += expected != int(logits.argmax())
            assert verify(TokenTree.root_only(text[-1]), logits, sampler)[1] == [expected]
            text.append(expected)
            if own is not None and expected != END:
                own.accept(expected)
        complete = text[-1] == END or (own is not None and own.ended)
        assert len(text) - 2 == params.max_tokens if sampler.finish_reason == "length" else complete
        endings.add(sampler.finish_reason)
    matchers.close()
    assert off or grammar is None
    assert say.get("ignore_eos") or "eos" in endings


def test_a_grammar_that_nothing_fits_any_more_fails_the_request_with_the_reason() -> None:
    """Its only way on is a text that the tokenizer cannot spell: the end stands for nothing here."""

    class Stuck:
        complete, ended, trouble = False, False, ""

        def allowed(self) -> Any:
            return np.zeros(10, np.bool_)

        def allows(self, token: int) -> bool:
            return False

    sampler = Sampler(SamplingParams(), [7, 8], [5], 10, (), Stuck())  # type: ignore[arg-type]
    with pytest.raises(RequestFailed, match="none of the model's tokens come at position 2: write it for text"):
        verify(TokenTree.root_only(8), torch.zeros(1, 10), sampler)


def test_chances_summed_as_integers_are_the_same_in_any_order() -> None:
    probs = torch.randn(5000, generator=torch.Generator().manual_seed(1)).softmax(-1)
    sums, turned = _sum_as_integers(probs), _sum_as_integers(probs.flip(0))
    torch.testing.assert_close(sums, probs.double().cumsum(-1), atol=1e-8, rtol=0)
    assert torch.equal(sums[-1] - turned[:-1], sums[:-1].flip(0))
