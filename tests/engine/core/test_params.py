from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine import Engine
from engine.core.errors import ModelError, RequestError
from engine.core.grammar import Grammar
from engine.core.params import SamplingParams, Speculation, not_applied, own_defaults
from tests.conftest import save_tiny_llama

PROMPT = list(b"the cat sat on the mat, the cat")
LENGTH = 40
OFF = SamplingParams(max_tokens=LENGTH, repetition_penalty=1.0)


def save_with_defaults(folder: Path, **defaults: Any) -> str:
    """A tiny model whose generation_config.json says more than where an answer ends."""
    model = save_tiny_llama(folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | defaults))
    return model


@pytest.fixture(scope="module")
def penal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_with_defaults(
        tmp_path_factory.mktemp("penal"), repetition_penalty=1.3, do_sample=True, temperature=0.7, top_k=3
    )


def test_what_a_request_says_goes_before_what_the_model_says() -> None:
    model = SamplingParams(top_k=20, top_p=0.8, repetition_penalty=1.1)
    asked = SamplingParams(top_p=1.0, repetition_penalty=1.0, seed=4).over(model)
    assert (asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty) == (20, 1.0, None, 1.0)
    assert (asked.temperature, asked.seed) == (0.0, 4)
    assert SamplingParams(stop="end").validate().stop == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"stop": tuple("abcdefghijklmnopq")}, r"stop=\('a'.*: holds 17 texts; 16 are the most"),
        ({"stop": ("a" * 1025,)}, r"stop=\('a.*: holds a text of 1025 characters; 1024 are the most"),
        ({"stop_token_ids": tuple(range(1025))}, r"stop_token_ids=\(0, .*: holds 1025 tokens; 1024 are the most"),
        ({"top_p": -0.1}, r"top_p=-0\.1: use a fraction in \[0, 1\], 0 is greedy"),
        ({"stop": ("end", "\ud83d")}, "stop=.*half a character.*"),
        ({"speculation": Speculation(owner="\ud83d")}, r"speculation\.owner=.*half a character.*"),
        ({"grammar": Grammar(regex="\ud83d")}, r"grammar\.regex: .*half a character.*"),
        ({"grammar": Grammar(json_schema='{"title": "\ud83d"}')}, r"grammar\.json_schema: .*half a character.*"),
    ],
)
def test_what_is_over_a_bound_or_half_a_character_is_refused_where_it_stands(params: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=f"^{told}$"):
        SamplingParams(**params).validate()


async def test_a_stop_token_ends_the_answer_and_is_no_part_of_its_text(tiny: str) -> None:
    async with await Engine.start(model=tiny, method="none", transport="inproc") as engine:
        whole = await engine.generate(PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        at = next(i for i in range(4, LENGTH) if whole.token_ids[i] not in whole.token_ids[:i])
        stopped = await engine.generate(
            PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop_token_ids=(whole.token_ids[at],))
        )
        with pytest.raises(RequestError, match=r"^stop_token_ids=\(260,\): token ids go from 0 to 259$"):
            await engine.generate(PROMPT, SamplingParams(stop_token_ids=(260,)))
        before = engine.tokenizer.decode(whole.token_ids[:at], skip_special_tokens=True)
    assert stopped.token_ids == whole.token_ids[: at + 1]
    assert (stopped.text, stopped.finish_reason) == (before, "stop")


def test_a_value_that_makes_no_sense_is_refused_with_the_file_it_is_in() -> None:
    with pytest.raises(ModelError, match=r"^model=m: generation_config\.json: repetition_penalty=-1\.0: use"):
        own_defaults({"repetition_penalty": -1.0}, "m")


def test_settings_that_would_change_the_text_and_are_not_followed_are_named() -> None:
    stored = GenerationConfig(no_repeat_ngram_size=3, eos_token_id=2, repetition_penalty=1.1, temperature=0.7)
    assert not_applied(stored) == ["no_repeat_ngram_size=3"]


async def test_the_models_own_penalty_and_top_k_hold_unless_the_request_has_its_own(penal: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(penal, dtype=torch.float32)

    def generated(**options: Any) -> list[int]:
        ids = torch.tensor([PROMPT])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, **options
        )
        return output[0, len(PROMPT) :].tolist()

    sampled = [OFF, msgspec.structs.replace(OFF, top_k=3), msgspec.structs.replace(OFF, top_k=0)]
    overrides = {"method": "sps", "transport": "inproc", "drafter.path": penal}
    async with await Engine.start({"model": penal}, **overrides) as engine:
        own = (await engine.generate(PROMPT, SamplingParams(max_tokens=LENGTH))).token_ids
        assert own == generated()
        assert (await engine.generate(PROMPT, OFF)).token_ids == generated(repetition_penalty=1.0) != own
        texts = [
            (await engine.generate(PROMPT, msgspec.structs.replace(params, temperature=2.0))).token_ids
            for params in sampled
        ]
    assert texts[0] == texts[1] != texts[2]


def test_numbers_and_arrays_of_numpy_are_taken_as_pythons() -> None:
    given = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int64(4): -100.0},
    ).validate()
    assert (given.max_tokens, given.temperature, given.logit_bias) == (3, 0.5, {4: -100.0})
    assert list(given.stop_token_ids) == [1, 2]
    with pytest.raises(RequestError, match="max_tokens="):
        SamplingParams(max_tokens=np.array([1, 2])).validate()  # type: ignore[arg-type]
