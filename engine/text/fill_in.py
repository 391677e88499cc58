"""Fill-in-the-middle: a prompt of the text before the cursor and the text after it, with the model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import HALF_A_CHARACTER, RequestError, is_text


@dataclass(frozen=True)
class FillInFormat:
    """The tokens before the prefix, before the suffix, and before the answer. suffix_first: the suffix precedes the
    prefix. ends: tokens, of those that the model has, that end an answer. repository, file: the tokens before the name
    of a repository and of each of its files.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False
    repository: str = ""
    file: str = ""


FILL_IN_FORMATS = (  # the first whose tokens a tokenizer has is taken
    FillInFormat(  # Qwen, CodeGemma
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    FillInFormat(  # StarCoder
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<file_sep>", "<fim_pad>", "<|endoftext|>"),
        repository="<repo_name>",
        file="<file_sep>",
    ),
    FillInFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    FillInFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    FillInFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)

_REPOSITORY, _THIS_FILE = "myproject\n", "filename\n"  # llama.cpp's names, for what editors do not tell
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class FillIn:
    """How a tokenizer's model fills in. begins: the tokens that every text begins with."""

    tokenizer: Any
    format: FillInFormat
    begins: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Any) -> FillIn | None:
        """Find how the tokenizer's model fills in; None if the tokenizer has no tokens for it."""
        for one in FILL_IN_FORMATS:
            if all(_token(tokenizer, text) is not None for text in (one.prefix, one.suffix, one.middle) if text):
                begins = tokenizer.bos_token_id
                adds = begins is not None and tokenizer("a")["input_ids"][:1] == [begins]
                return cls(tokenizer, one, [begins] if adds else [])
        return None

    def prompt(self, prefix: str, suffix: str) -> list[int]:
        """Return the tokens of a prompt. Raises RequestError for a text that is not valid."""
        for field, text in (("prompt", prefix), ("suffix", suffix)):
            if not is_text(text):
                raise RequestError(f"{field}: {HALF_A_CHARACTER}")
        before = self._marked(self.format.prefix, prefix)
        after = self._marked(self.format.suffix, suffix)
        parts = [*after, *before] if self.format.suffix_first else [*before, *after]
        return [*self.begins, *parts, *self._marked(self.format.middle, "")]

    def before(self, files: Sequence[tuple[str, str]], most: int) -> list[int]:
        """Return the tokens of other files, given as (name, text), that precede a prompt: the last ones, at most `most`
        tokens. A model without tokens for files reads snippets.
        """
        marks = (self.format.repository, self.format.file)
        known = all(_token(self.tokenizer, mark) is not None for mark in marks)
        head = self._marked(self.format.repository, _REPOSITORY) if known else []
        last = self._marked(self.format.file, _THIS_FILE) if known else []
        tokens: list[int] = []
        for name, text in reversed(files):
            mark = self._marked(self.format.file, f"{name}\n") if known else self._marked("", _SNIPPET)
            chunk = [*mark, *self._marked("", text)]
            if len(head) + len(chunk) + len(tokens) + len(last) > most:
                break
            tokens = [*chunk, *tokens]
        return [*head, *tokens, *last] if tokens else []

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        found = (_token(self.tokenizer, text) for text in self.format.ends)
        return tuple(token for token in found if token is not None)

    def _marked(self, mark: str, text: str) -> list[int]:
        token = _token(self.tokenizer, mark)
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*([] if token is None else [token]), *tokens]


def _token(tokenizer: Any, text: str) -> int | None:
    """Return the id of a token, None if the tokenizer has none of that text."""
    token: int | None = tokenizer.convert_tokens_to_ids(text) if text else None
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == text else None
