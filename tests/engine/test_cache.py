"""Engines that are started again with a cache folder: what they find there, and that it changes no text."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.answer import Result
from engine.core.params import SamplingParams, Speculation
from engine.kernels.gemm.int8.dots import instruction_sets
from tests.engine.tiny_engine import tiny_engine

PROMPT = random.Random(1).choices(range(4, 260), k=100)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=7)
SMALL: dict[str, Any] = {"verifier.kv_memory": 12 * 16 * 1024, "drafter.budget": 4}  # for little more than one text
WHOLE = 96  # positions of the prompt's full blocks


async def answers(
    model: str, cache: Path | None, *asked: tuple[list[int], SamplingParams], name: str = "suffix", **options: Any
) -> list[Result]:
    """What an engine that starts and ends here answers, one after the other."""
    kept = {} if cache is None else {"verifier.cache": str(cache)}
    async with tiny_engine(model, "", name, **kept, **options) as engine:
        return [await engine.generate(prompt, sampling) for prompt, sampling in asked]


@pytest.mark.parametrize(("sampling", "dtype"), [(GREEDY, "float32"), (SAMPLED, "bfloat16")], ids=["T=0", "T=1"])
async def test_a_prompt_is_read_back_after_a_restart_and_the_text_is_the_same(
    tiny: str, tmp_path: Path, sampling: SamplingParams, dtype: str
) -> None:
    [plain] = await answers(tiny, None, (PROMPT, sampling), name="none", dtype=dtype)
    results = [(await answers(tiny, tmp_path, (PROMPT, sampling), dtype=dtype))[0] for _ in range(2)]
    assert [result.metrics.cached_tokens for result in results] == [0, WHOLE]
    assert all(result.token_ids == plain.token_ids for result in results)


async def test_the_second_turn_of_a_conversation_finds_the_first_after_a_restart(tiny: str, tmp_path: Path) -> None:
    [first] = await answers(tiny, tmp_path, (PROMPT, SAMPLED))
    second = [*PROMPT, *first.token_ids, *b"and then?"]
    [turn] = await answers(tiny, tmp_path, (second, SAMPLED))
    [plain] = await answers(tiny, None, (second, SAMPLED), name="none")
    assert turn.metrics.cached_tokens == (len(PROMPT) + len(first.token_ids) - 1) // 16 * 16
    assert turn.token_ids == plain.token_ids


@pytest.mark.parametrize(("name", "max_tokens"), [("none", 1), ("suffix", 2)])
async def test_a_probe_of_one_token_keeps_the_whole_prompt_in_memory_and_on_disk(
    tiny: str, tmp_path: Path, name: str, max_tokens: int
) -> None:
    probe = msgspec.structs.replace(SAMPLED, max_tokens=max_tokens)
    [plain] = await answers(tiny, None, (PROMPT, SAMPLED), name="none")
    _, again = await answers(tiny, tmp_path, (PROMPT, probe), (PROMPT, probe), name=name)
    [later] = await answers(tiny, tmp_path, (PROMPT, SAMPLED), name=name)
    assert (again.metrics.cached_tokens, later.metrics.cached_tokens) == (WHOLE, WHOLE)
    assert later.token_ids == plain.token_ids


async def test_an_echo_without_an_answer_keeps_what_it_read(tiny: str) -> None:
    echo = SamplingParams(max_tokens=1, prompt_logprobs=0)
    _, again = await answers(tiny, None, (PROMPT, echo), (PROMPT, GREEDY))
    assert again.metrics.cached_tokens == WHOLE


def of(owner: str | None, sampling: SamplingParams = SAMPLED) -> SamplingParams:
    return msgspec.structs.replace(sampling, speculation=Speculation(owner=owner))


async def test_tenants_find_their_own_alone(tiny: str, tmp_path: Path) -> None:
    await answers(tiny, tmp_path, (PROMPT, of("one/a")))
    owners = (("two/a", 0), (None, 0), ("one/b", WHOLE), ("one/a", WHOLE))
    for owner, cached in owners:
        [result] = await answers(tiny, tmp_path, (PROMPT, of(owner)), name="none")
        assert result.metrics.cached_tokens == cached, owner


async def test_answers_are_drafted_from_after_a_restart_for_their_owner_alone(tiny: str, tmp_path: Path) -> None:
    long = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=7)
    [first] = await answers(tiny, tmp_path, (PROMPT, of("one", long)), **{"verifier.cut": False})
    [again] = await answers(tiny, tmp_path, (PROMPT, of("one", long)), **{"verifier.cut": False})
    [other] = await answers(tiny, tmp_path, (PROMPT, of("two", long)), **{"verifier.cut": False})
    assert again.token_ids == first.token_ids == other.token_ids
    assert again.metrics.rounds < 0.5 * min(first.metrics.rounds, other.metrics.rounds)


def cut(folder: Path, rng: random.Random, most: int = 8) -> int:
    """Cut some of the files there; returns how many."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    chosen = rng.sample(files, min(most, len(files)))
    for path in chosen:
        os.truncate(path, rng.randrange(path.stat().st_size))
    return len(chosen)


async def test_files_cut_at_fifty_random_places_change_no_text(tiny: str, tmp_path: Path) -> None:
    rng, cuts = random.Random(3), 0
    [plain] = await answers(tiny, tmp_path, (PROMPT, SAMPLED))
    while cuts < 50:
        cuts += cut(tmp_path, rng)
        [result] = await answers(tiny, tmp_path, (PROMPT, SAMPLED))
        assert result.token_ids == plain.token_ids


async def test_files_cut_while_an_engine_reads_them_change_no_text(tiny: str, tmp_path: Path) -> None:
    """In a pool with room for one text, every request reads from the folder."""
    rng = random.Random(4)
    prompts = [rng.choices(range(4, 260), k=100) for _ in range(3)]
    plain = await answers(tiny, None, *[(prompt, SAMPLED) for prompt in prompts], name="none")
    async with tiny_engine(tiny, "", "suffix", **{"verifier.cache": str(tmp_path)}, **SMALL) as engine:
        for turn in range(30):
            cut(tmp_path, rng, 2)
            result = await engine.generate(prompts[turn % 3], SAMPLED)
            assert result.token_ids == plain[turn % 3].token_ids


async def test_a_disk_that_is_full_costs_the_cache_alone(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [plain] = await answers(tiny, None, (PROMPT, SAMPLED))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with tiny_engine(tiny, "", "suffix", **{"verifier.cache": str(tmp_path)}) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            result = await engine.generate(PROMPT, SAMPLED)
            again = await engine.generate(PROMPT, SAMPLED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.token_ids == again.token_ids == plain.token_ids
    assert again.metrics.cached_tokens == WHOLE  # in memory
    assert not [*(tmp_path / "blocks").glob("*")]
    [anew] = await answers(tiny, tmp_path, (PROMPT, SAMPLED))
    assert anew.metrics.cached_tokens == 0 and anew.token_ids == plain.token_ids


async def test_a_pool_that_evicts_reads_back_what_it_needs(tiny: str, tmp_path: Path) -> None:
    """What the second request evicts, the third reads from the folder."""
    others = random.Random(2).choices(range(4, 260), k=100)
    asked = [(PROMPT, SAMPLED), (others, SAMPLED), (PROMPT, SAMPLED)]
    plain = await answers(tiny, None, *asked, name="none")
    await answers(tiny, tmp_path, *asked, **SMALL)
    found = await answers(tiny, tmp_path, *asked, **SMALL)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert [result.metrics.cached_tokens for result in found] == [WHOLE] * 3


@pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
async def test_keys_of_8_bits_are_read_back_as_they_were_and_not_in_another_type(tiny: str, tmp_path: Path) -> None:
    codes: dict[str, Any] = {"dtype": "bfloat16", "verifier.kv_type": "q8_0"}
    [plain] = await answers(tiny, None, (PROMPT, SAMPLED), name="none", **codes)
    results = [(await answers(tiny, tmp_path, (PROMPT, SAMPLED), **codes))[0] for _ in range(2)]
    assert [result.metrics.cached_tokens for result in results] == [0, WHOLE]
    assert all(result.token_ids == plain.token_ids for result in results)
    [other] = await answers(tiny, tmp_path, (PROMPT, SAMPLED), dtype="bfloat16")
    assert other.metrics.cached_tokens == 0
