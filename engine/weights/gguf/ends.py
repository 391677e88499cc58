"""Which tokens end an answer of a GGUF file's model: those that the file names, what its chat template writes after an
assistant's turn, and those that llama.cpp knows by their text (`special_eog_ids` in its llama-vocab.cpp).
"""

from __future__ import annotations

from typing import Any

from engine.text.chat import turn_end
from engine.weights.gguf.file import GgufFile

_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
"""Added tokens that end a text, a turn or a message, and those between the files of a repository."""
_TAG = {"</s>"}
"""Texts of them that are a tag of HTML, unless the token is a control token."""
_NO_ENDS = {
    "<|end|>": [{one, other} for one in ("<|return|>", "<|flush|>") for other in ("<|call|>", "<|calls|>")],
    "</s>": [{"<|tool_response>"}, {"<|plamo:eos|>"}],
}
"""Texts that end no answer where others do: gpt-oss writes <|end|> after each message, the first of several too."""


def end_tokens(file: GgufFile, tokenizer: Any) -> list[int] | None:
    """Return the token ids that end an answer, None if there are none."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if i < tokens}
    known = {i for i, token in added.items() if token.content in (_TEXTS if token.special else _TEXTS - _TAG)}
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _KEYS]
    found = known | {i for i in (*named, turn_end(tokenizer)) if isinstance(i, int) and 0 <= i < tokens}
    texts = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in found}
    ends = [i for i, text in texts.items() if not any(other <= {*texts.values()} for other in _NO_ENDS.get(text, ()))]
    return sorted(ends) or None
