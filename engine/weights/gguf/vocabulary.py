"""What transformers makes of a GGUF file's tokenizer otherwise than llama.cpp does: how tokens are spelled, how text is
split into words, and which tokens are found in a text as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_TYPES, get_merges

from engine.core.errors import shown
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.splits import BEGUN, WHOLE_WORDS, split_of

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens (`tokenizer.ggml.token_type`) that are spelled as in a text, not by the letters of bytes."""
_SPACE = "▁"
"""How SentencePiece writes a space."""
_PHI3_ALONE = {"<unk>", "<s>", "<|endoftext|>"}
"""Phi-3's tokens that leave the white space after them."""
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Vocabularies (`tokenizer.ggml.pre`) for which llama.cpp splits off each digit first; transformers does not."""
_LIKE_GPT2 = {"gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}


def teach_tokenizers() -> None:
    """Let transformers read vocabularies of bytes as they are."""
    GGUF_TOKENIZER_TYPES["gpt2"] = _byte_level


def _byte_level(described: dict[str, Any]) -> GPT2Tokenizer:
    """Make the tokenizer of a vocabulary of bytes. transformers would spell every token in the letters of bytes, and
    then lack control tokens with other letters, and tokens of several spaces.
    """
    tokens: list[str] = described["tokens"]
    kinds = described.get("token_type", ())
    tokenizer = GPT2Tokenizer({token: i for i, token in enumerate(tokens)}, get_merges(described))
    for kind, add in (
        (_CONTROL, tokenizer.backend_tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.backend_tokenizer.add_tokens),
    ):
        add([AddedToken(token, normalized=False) for token, one in zip(tokens, kinds, strict=False) if one == kind])
    return tokenizer


def follow_llama_cpp(file: GgufFile, tokenizer: Any) -> None:
    """Change how a tokenizer that transformers has read makes tokens of text."""
    way = file.metadata.get("tokenizer.ggml.pre", "default")
    if file.metadata["tokenizer.ggml.model"] == "llama":
        _mark_spaces(file, tokenizer.backend_tokenizer)
    elif file.metadata["tokenizer.ggml.model"] == "gpt2":
        tokenizer.backend_tokenizer.model.ignore_merges = way in WHOLE_WORDS
        _split_text(file, way, tokenizer.backend_tokenizer)
        if way in BEGUN and "tokenizer.ggml.add_bos_token" not in file.metadata:
            tokenizer.add_bos_token = True


def _split_text(file: GgufFile, way: str, backend: Any) -> None:
    """Split text into words as the vocabulary expects; transformers splits as for GPT-2 where it knows no other way."""
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or way in _LIKE_GPT2:
        return
    if way in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif (split := split_of(way)) is not None:
        backend.pre_tokenizer = split
    else:
        print(f"talon: {file.path.name}: text is split into words as for GPT-2; {shown(way)} is not known", flush=True)


def _mark_spaces(file: GgufFile, backend: Any) -> None:
    """Write each space of a text as SentencePiece does, and one more before the text and after every token that is
    found as a whole; transformers leaves that one out before a space.
    """
    mark = normalizers.Replace(" ", _SPACE)
    begins = file.metadata.get("tokenizer.ggml.add_space_prefix", not file.architecture.startswith("gemma"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), mark]) if begins else mark
    backend.pre_tokenizer = None
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if begins else parts)


def correct_added(file: GgufFile, tokenizer: Path) -> None:
    """Correct the added tokens in a `tokenizer.json`. The end of text of GPT-2, which transformers appends to a
    vocabulary without one, would have no embedding. Phi-3's tokens take the white space after them, which llama.cpp
    knows by the model's name, as no file says so.
    """
    tokens, name = file.metadata["tokenizer.ggml.tokens"], str(file.metadata.get("general.name", "")).lower()
    content = json.loads(tokenizer.read_text(encoding="utf8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    if "phi-3" in name or "phi3" in name:
        for token in content["added_tokens"]:
            token["rstrip"] = token["content"] not in _PHI3_ALONE
    tokenizer.write_text(json.dumps(content, ensure_ascii=False), encoding="utf8")
