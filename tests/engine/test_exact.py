"""A token's logits are the same bits however it is forwarded: alone, in a chunk, in a tree, beside other requests."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from engine.core.batch import Segment
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import pack_linears
from engine.model.decoder import LeanDecoder
from engine.model.stock import NAME, StockForward
from engine.model.structure import OtherStructure
from engine.model.target import Target
from engine.sampling.sampler import Sampler, verify
from tests.engine.tiny_families import (
    COMMON,
    EXPERTS,
    FAMILIES,
    IN_BOTH,
    MLA,
    STATES,
    STOCK,
    SURE,
    TYPES,
    VOCABULARY,
    build,
)

ALIKE = {"olmo3", "olmoe", "exaone4", "ernie4.5", "helium", "seed-oss", "glm4 lite with experts"}
"""Families of layers that others here have too: they run with -m slow."""
OWN_LOOP = {"llama", "mistral with a window", "smollm3", "gemma2", "gemma3", "cohere2", "phi with norms of heads"}
OWN_LOOP |= {"gpt_neox", "stablelm in parallel"}
"""Families that transformers' own loop decodes in any case: each kind of mask, position and residual."""
WITHOUT_LOOP = EXPERTS | STATES | MLA | {"apertus"} | {family for family in FAMILIES if family.startswith("gemma4")}
"""Families of which operations of the stock forward are not exact."""


def in_types(families: Collection[str] = FAMILIES, always: Collection[str] = FAMILIES) -> pytest.MarkDecorator:
    """Parametrise by these families and a type: each runs in one, every second in float32; `IN_BOTH` in both. The other
    types, `ALIKE`, and the families that are not in `always`, run with -m slow.
    """
    usual = set(always) - ALIKE
    return pytest.mark.parametrize(
        ("family", "dtype"),
        [
            pytest.param(family, dtype, marks=[pytest.mark.slow] * (family not in usual or elsewhere))
            for number, family in enumerate(FAMILIES)
            for at, dtype in enumerate(TYPES)
            for elsewhere in [family not in IN_BOTH and (number - at) % 2 == 1]
            if family in families
        ],
    )


every_family = in_types()
THREADS = (1, 2)
LENGTH = 48  # of the texts; windows are shorter
FAR = 900


@cache
def target_of(family: str, dtype: str) -> Target:
    """A target whose products were measured with one thread and with two."""
    torch.set_num_threads(2)
    made = Target.of_model(build(family, dtype), family, kv_memory=1 << 22)
    torch.set_num_threads(1)
    return made


@cache
def text_of(family: str, dtype: str) -> list[int]:
    """A prompt and its greedy continuation: what a good drafter proposes."""
    rng = random.Random(1)
    prompt = [rng.randrange(VOCABULARY) for _ in range(LENGTH // 2)]
    return prompt + decoded(target_of(family, dtype), prompt, SamplingParams(max_tokens=LENGTH - len(prompt)))


@cache
def alone(family: str, dtype: str) -> Tensor:
    """[LENGTH, vocab]: every token of the text forwarded by itself."""
    return read(target_of(family, dtype), text_of(family, dtype), 1)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def read(target: Target, text: Sequence[int], chunk: int) -> Tensor:
    """The logits behind every token of a text that is read in chunks."""
    held, logits = target.new_cache(len(text)), []
    for at in range(0, len(text), chunk):
        part = text[at : at + chunk]
        logits.append(target.run([Segment.of_text(part, held, wanted="all")])[0])
        held.commit(range(len(part)))
    target.release(held)
    return torch.cat(logits)


def with_siblings(root: int, truth: Sequence[int], rng: random.Random) -> tuple[TokenTree, list[int]]:
    """A tree that holds the true continuation, wrong siblings beside it and wrong branches below those; and the true
    path's nodes. Nodes of one level stand in any order."""
    tokens, parents, spine, level = [root], [-1], [0], [0]
    for token in truth:
        wrong = [(node, rng.randrange(VOCABULARY)) for node in rng.choices(level, k=rng.randrange(4))]
        nodes = {*wrong, (spine[-1], token)}
        level = []
        for parent, candidate in rng.sample(sorted(nodes), len(nodes)):
            level.append(len(tokens))
            if (parent, candidate) == (spine[-1], token):
                true = len(tokens)
            tokens.append(candidate)
            parents.append(parent)
        spine.append(true)
    return TokenTree.from_lists(tokens, parents, [1.0] * len(tokens)), spine


def decoded(target: Target, prompt: Sequence[int], sampling: SamplingParams, truth: Sequence[int] = ()) -> list[int]:
    """Decoding, through trees if there is a truth to draft; all of the draft that can be accepted must be."""
    sampler, rng = Sampler(sampling, prompt, [], target.vocab_size), random.Random(0)
    held = target.new_cache(len(prompt) + sampling.max_tokens + 64)
    logits, _ = target.prefill(held, prompt)
    tokens = [sampler.draw(sampler.choices(logits[None])[0])]
    while sampler.finish_reason is None:
        draft = truth[len(tokens) : len(tokens) + rng.randrange(7)]
        tree, spine = with_siblings(tokens[-1], draft, rng) if truth else (TokenTree.root_only(tokens[-1]), [0])
        logits, _ = target.verify(held, tree)
        path, new = verify(tree, logits, sampler)
        if sampler.finish_reason is None:
            assert path[: len(spine)] == spine
            held.commit(path)
        tokens += new
    target.release(held)
    return tokens


@every_family
def test_a_family_is_exact_and_a_prompt_has_the_same_logits_in_chunks_of_any_size(family: str, dtype: str) -> None:
    target = target_of(family, dtype)
    assert target.exact, target.inexact_reason
    assert isinstance(target.forward, StockForward if family in STOCK else LeanDecoder)
    assert bool(target.stock_reason) == (family in STOCK)
    for threads in THREADS:
        torch.set_num_threads(threads)
        for chunk in (7, LENGTH):
            assert torch.equal(read(target, text_of(family, dtype), chunk), alone(family, dtype))


@in_types(always=EXPERTS | {family for family in FAMILIES if family.startswith("gemma4")})
def test_logits_at_first_and_far_positions_are_those_of_transformers(family: str, dtype: str) -> None:
    """In bfloat16 and with experts those of the rows that rounding changes least. Of dense families, states and latent
    attention test_probe.py and test_logits.py show it.
    """
    target, text, model = target_of(family, dtype), text_of(family, dtype), build(family, dtype)
    for first in (0, FAR):
        held = target.new_cache(LENGTH)
        found, _ = target.run([replace(Segment.of_text(text, held, wanted="all"), offset=first)])
        target.release(held)
        places = torch.arange(first, first + LENGTH)[None]
        expected = model(torch.tensor([text]), position_ids=places, use_cache=False).logits[0].float()
        errors = (found.float() - expected).pow(2).mean(1).sqrt() / expected.std()
        if dtype == "bfloat16":
            assert errors.quantile(0.25) < 0.1
        else:
            assert (errors.quantile(0.25) if family in SURE | EXPERTS else errors.max()) < 1e-3


@every_family
def test_every_node_of_a_tree_has_the_logits_of_its_path_alone(family: str, dtype: str) -> None:
    """The tree is a chain, or bushy and run as a whole or level by level."""
    target, text, split = target_of(family, dtype), text_of(family, dtype), LENGTH - 8
    tree, spine = with_siblings(text[split], text[split + 1 :], random.Random(2))
    held, expected = target.new_cache(LENGTH + len(tree)), alone(family, dtype)[split:]
    target.prefill(held, text[:split])
    chain = TokenTree.chain(text[split], text[split + 1 :], [1.0] * (LENGTH - split - 1))
    assert torch.equal(target.run([Segment.of_tree(chain, held)])[0], expected)
    for threads in THREADS:
        torch.set_num_threads(threads)
        logits, _ = target.run([Segment.of_tree(tree, held)])
        assert torch.equal(logits[spine], expected)
    torch.set_num_threads(1)
    starts = [int((tree.depths < depth).sum()) for depth in range(int(tree.depths.max()) + 2)]
    parts = [target.run([Segment.of_tree(tree.keep(range(end)), held, first)])[0] for first, end in pairwise(starts)]
    assert torch.equal(torch.cat(parts), logits)
    target.release(held)
    for node in range(len(tree)):
        if node not in spine:
            assert torch.equal(logits[node], read(target, text[:split] + tree.path_tokens(node), 64)[-1])


@every_family
def test_requests_in_one_forward_have_the_logits_that_each_has_alone(family: str, dtype: str) -> None:
    """Trees of three requests beside chunks of two prompts, one of them at its beginning."""
    target, text, expected = target_of(family, dtype), text_of(family, dtype), alone(family, dtype)
    rng = random.Random(4)
    held = [target.new_cache(LENGTH + 64) for _ in range(5)]
    for request, past in zip(held, (30, 17, 41, 10, 0), strict=True):
        if past:
            target.prefill(request, text[:past])
    drafted = [with_siblings(text[c.length], text[c.length + 1 :][:6], rng) for c in held[:3]]
    segments = [Segment.of_tree(tree, request) for (tree, _), request in zip(drafted, held[:3], strict=True)]
    segments.insert(1, Segment.of_text(text[10:33], held[3], wanted="all"))
    segments.append(Segment.of_text(text[:20], held[4], wanted="last"))
    for threads in THREADS:
        torch.set_num_threads(threads)
        logits, _ = target.run(segments)
        first, chunk, second, third, last = logits.split([len(s) for s in segments[:4]] + [1])
        for found, (_, spine), request in zip((first, second, third), drafted, held[:3], strict=True):
            assert torch.equal(found[spine], expected[request.length : request.length + len(spine)])
        assert torch.equal(chunk, expected[10:33]) and torch.equal(last[0], expected[19])
    for request in held:
        target.release(request)


@every_family
def test_drafted_text_is_plain_text_and_right_drafts_are_accepted(family: str, dtype: str) -> None:
    target, text = target_of(family, dtype), text_of(family, dtype)
    prompt, answer = text[: LENGTH // 2], text[LENGTH // 2 :]
    assert decoded(target, prompt, SamplingParams(max_tokens=len(answer)), answer) == answer
    sampling = SamplingParams(max_tokens=len(answer), temperature=1.0, seed=5)
    plain = decoded(target, prompt, sampling)
    assert decoded(target, prompt, sampling, plain) == plain


@in_types(FAMILIES.keys() - WITHOUT_LOOP, OWN_LOOP)
def test_transformers_own_generate_gives_the_text_of_the_stock_forward(
    family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle of its own: transformers' loop, cache and masks, and only attention and products are ours."""
    monkeypatch.setattr(LeanDecoder, "__init__", refused)
    target = Target.of_model(build(family, dtype), family, kv_memory=1 << 22)
    assert isinstance(target.forward, StockForward) and target.exact
    model, prompt = build(family, dtype), text_of(family, dtype)[:20]
    model.set_attn_implementation(NAME)
    pack_linears(model)
    truth = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        past_key_values=DynamicCache(),  # the model's own drops what a window has passed: other lanes, other bits
        max_new_tokens=32,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    assert decoded(target, prompt, SamplingParams(max_tokens=32), truth) == truth


def refused(*_: Any) -> None:
    raise OtherStructure


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16")])
def test_chunks_of_one_seven_sixty_four_and_512_give_a_long_prompt_the_same_logits(family: str, dtype: str) -> None:
    target, rng = target_of(family, dtype), random.Random(6)
    text = [rng.randrange(VOCABULARY) for _ in range(530)]
    expected = read(target, text, 64)
    assert torch.equal(read(target, text, 1), expected)
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert all(torch.equal(read(target, text, chunk), expected) for chunk in (7, 512))


@pytest.mark.parametrize(
    ("config", "matrix"),
    [
        (transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4), "transformer.h.0.attn.c_attn.weight"),
        (
            transformers.PhimoeConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
            "model.layers.0.mlp.router.weight",
        ),
    ],
)
def test_a_family_with_products_of_its_own_is_not_called_exact_and_the_matrix_is_named(
    config: Any, matrix: str
) -> None:
    torch.manual_seed(0)
    target = Target.of_model(AutoModelForCausalLM.from_config(config).eval(), "other", kv_memory=1 << 22)
    assert not target.exact
    assert target.inexact_reason == f"{matrix} is multiplied in a way of its own"


def test_rows_that_are_no_whole_vectors_are_not_called_exact_where_a_function_is_not() -> None:
    model = build("phi with norms of heads", "bfloat16", intermediate_size=112, hidden_act="gelu")
    target = Target.of_model(model, "phi", kv_memory=1 << 22)
    assert isinstance(target.forward, StockForward)
    reason = "on this machine gelu over rows of 112 depends on the rows before it"
    assert target.exact or target.inexact_reason == reason


@pytest.fixture(scope="module")
def real(smollm2: str) -> Target:
    torch.set_num_threads(2)
    return Target.load(smollm2, device="cpu", kv_memory=1 << 28)


def test_the_real_models_prompt_has_the_same_logits_in_any_chunks_and_threads(real: Target) -> None:
    rng = random.Random(7)
    text = [rng.randrange(real.vocab_size) for _ in range(130)]
    assert real.exact
    expected = read(real, text, 64)
    assert torch.equal(read(real, text[:40], 1), expected[:40])
    assert torch.equal(read(real, text, 7), expected)
    torch.set_num_threads(2)
    assert torch.equal(read(real, text, 512), expected)


def test_the_real_models_drafted_text_is_its_plain_text(real: Target) -> None:
    rng = random.Random(8)
    prompt = [rng.randrange(real.vocab_size) for _ in range(30)]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=9)
        plain = decoded(real, prompt, sampling)
        assert decoded(real, prompt, sampling, plain) == plain
