"""How vocabularies that transformers' tables leave out split text into words: one pattern after the other, as llama.cpp
applies them.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GLM4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+",
)
_PATTERNS = {"deepseek-v3": _DEEPSEEK3, "hunyuan-dense": _DEEPSEEK3, "glm4": _GLM4, "chatglm-bpe": _GLM4}
"""The patterns that split a text into words, by what `tokenizer.ggml.pre` calls the vocabulary."""


def split_of(vocabulary: str) -> pre_tokenizers.PreTokenizer | None:
    """Return what splits text for a vocabulary of bytes; None if its patterns are not known."""
    if vocabulary not in _PATTERNS:
        return None
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[vocabulary]]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
