"""A model's tokenizer, over the `tokenizers` library alone.

`transformers` wraps the same library, but takes seconds to import, and decides only when it loads a tokenizer what its
class changes in the file's. Its decisions are kept as plain data, which later starts read instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import tokenizers

from engine.text.template import render_template


class TokenizerState(msgspec.Struct, frozen=True):
    """What a tokenizer is. backend: the JSON of the library's tokenizer. named: special tokens by their roles, such as
    bos_token. special: the texts of all special tokens. splits_special: text never spells special tokens.
    chat_template: one, or some by their names.
    """

    backend: str
    named: dict[str, str]
    special: list[str]
    splits_special: bool
    chat_template: str | dict[str, str] | None


class Tokenizer:
    """Encodes, decodes and applies the chat template, as the tokenizer of `transformers` that `state` was taken from.

    Methods and attributes have its names, so that code works with both.
    """

    def __init__(self, state: TokenizerState):
        self.backend_tokenizer = backend = tokenizers.Tokenizer.from_str(state.backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = state.splits_special
        self.special_tokens_map, self.all_special_tokens = state.named, state.special
        self.chat_template = state.chat_template
        self.bos_token, self.eos_token = state.named.get("bos_token"), state.named.get("eos_token")
        self.bos_token_id, self.eos_token_id = self._id_of(self.bos_token), self._id_of(self.eos_token)
        self._unknown = self._id_of(state.named.get("unk_token"))

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, Any]:
        """Return the ids of a text as `input_ids`, or a list of them for each of several. verbose: `transformers` warns
        of long texts.
        """
        several = [text] if isinstance(text, str) else list(text)
        found = self.backend_tokenizer.encode_batch(several, add_special_tokens=add_special_tokens)
        ids = [one.ids for one in found]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self(text, add_special_tokens)["input_ids"]
        return ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of some ids. clean_up_tokenization_spaces: `transformers` may do this; here it
        has no effect.
        """
        assert not clean_up_tokenization_spaces
        return str(self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def batch_decode(self, texts: Iterable[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in texts]

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return the piece of the vocabulary; None if there is no such token."""
        piece: str | None = self.backend_tokenizer.id_to_token(int(token))
        return piece

    def convert_tokens_to_ids(self, piece: str) -> int | None:
        """Return the id of a piece, or that of the unknown one; None if there is none."""
        token = self._id_of(piece)
        return self._unknown if token is None else token

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens by their ids."""
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    @property
    def all_special_ids(self) -> list[int | None]:
        return [self.convert_tokens_to_ids(piece) for piece in self.all_special_tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Return the text of chat messages, or its ids. variables: of the template. Raises what the template does."""
        template = self._template(tools)
        values = {**self.special_tokens_map, **variables}
        text = render_template(template, messages, tools, add_generation_prompt, continue_final_message, values)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _template(self, tools: Sequence[Any] | None) -> str:
        found = self.chat_template
        if isinstance(found, dict):
            found = (found.get("tool_use") if tools is not None else None) or found.get("default")
        if found is None:
            raise ValueError("this tokenizer has no chat template, or several and none of them the default")
        return found

    def _id_of(self, piece: str | None) -> int | None:
        token: int | None = None if piece is None else self.backend_tokenizer.token_to_id(piece)
        return token
