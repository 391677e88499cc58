"""Texts are split into words as the vocabularies of GGUF files say."""

from __future__ import annotations

import random

import pytest
import regex

from engine.weights.gguf.splits import split_of


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        ("deepseek-v3", "It|'s| |123|45| ,|ab|\u6c49|cd"),
        *((name, "It|'s| |123|45| ,|ab\u6c49cd") for name in ("glm4", "glm5", "minicpm5")),
        ("deepseek-coder", "It|'|s| |1|2| ,|ab|\u6c49|cd|\n|\n| \u00df\u00e4| ;;"),
        ("deepseek-llm", "It|'|s| |12345| ,|ab|\u6c49|cd|\n|\n| \u00df\u00e4| ;;"),
        ("falcon", "It|'|s| |123|4| |,|ab\u6c49cd|\n\n| \u00df\u00e4| |;;"),
        ("youtu", "It's| |1|2| ,|ab|\u6c49\u5b57|Cd|EF'RE|\n\n| \u00dfx| ;;\n/|\u3001\uff0c|\uac00\u3131|\u3105"),
    ],
)
def test_vocabularies_split_text_as_llama_cpp_does(vocabulary: str, words: str) -> None:
    split, text = split_of(vocabulary), words.replace("|", "")
    assert split is not None
    assert [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)] == words.split("|")


_KIMI_K2 = "|".join(  # as the model's own tokenization_kimi.py has it
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def test_kimis_vocabulary_splits_any_text_as_its_own_pattern_does() -> None:
    signs = [*"aB7's ;\n", "LL", "\u00df", "\u01c5", "\u6c49", "\u3005", "\u0301", "\u3042", "\u0664", "\u20ac"]
    split = split_of("kimi-k2")
    assert split is not None
    for seed in range(20):
        text = "".join(random.Random(seed).choices(signs, k=60))
        found = [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)]
        assert found == regex.findall(_KIMI_K2, text, flags=regex.V1)
