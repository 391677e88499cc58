"""Text to tokens and back. The text comes back in pieces of whole characters that cannot begin a stop string."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.chat_text import Rendering, chat_tokens, render
from engine.config import Config
from engine.errors import ConfigError, ModelError, RequestError, first_line, shown
from engine.model_hub import is_hub_id, is_local
from engine.stop_text import StopText
from engine.token_text import PARTIAL, partial_bytes, special_tokens

HALF_A_CHARACTER = "holds half a character; decode the text it comes from as UTF-8"
_BEHIND = range(6, 10)  # tokens before an answer to decode its first ones with: some may be special, four a character


def is_text(text: str) -> bool:
    """Whether UTF-8 can encode it. What JSON writes in two escapes may have been cut: a lone surrogate is left."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def load_tokenizer(model: str) -> Any:
    """The model's own tokenizer; ModelError if it has none."""
    if not is_hub_id(model) and not Path(model).is_dir():
        raise ModelError(f"model={model}: no such directory; name a model directory, a hub id or a GGUF file")
    from transformers import AutoTokenizer  # takes seconds, while the verifier imports too

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=is_local(model))
    except Exception as error:  # an invalid file may raise anything
        if (folder := Path(model)).is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab.*")]:
            raise ModelError(
                f"model={model}: has no tokenizer: copy tokenizer.json and tokenizer_config.json of its model there"
            ) from error
        raise ModelError(f"model={model}: has no usable tokenizer: {first_line(error)}") from error


def tokenizer_of(config: Config) -> Any:
    """The tokenizer of the configuration's model, with its chat template; TalonError if there is no such thing."""
    tokenizer = load_tokenizer(config.model)
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template={config.chat_template}: cannot be read: {error}") from None
    return tokenizer


def encode_text(
    tokenizer: Any, prompt: str | Sequence[Any], raw: bool = False, rendering: Rendering | None = None
) -> list[int]:
    """Token ids of a text (one user message, unless `raw`) or of chat messages, through the chat template.

    What a message spells never becomes a special token; a text that is taken as it is (`raw`, or without a template)
    may spell them, and where it has no tokens it is the token that begins texts, if the tokenizer has one. Raises
    RequestError for messages it cannot take.
    """
    if isinstance(prompt, str):
        if raw or not tokenizer.chat_template:
            return _raw_tokens(tokenizer, prompt)
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise RequestError("prompt: this model has no chat template; give text or token ids, or set chat_template=FILE")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise RequestError(f"prompt: {shown(message)} is no chat message; each needs role and content")
    rendering = rendering or Rendering()
    text = render(tokenizer, prompt, rendering)
    _check_text(text)
    return chat_tokens(tokenizer, prompt, text, rendering)


def _raw_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that may spell special ones. The token that the tokenizer begins a text with is not there
    twice, where the text spells it too.
    """
    _check_text(text)
    tokens: list[int] = list(tokenizer(text)["input_ids"])
    begins, spelled = tokenizer.bos_token_id, tokenizer.bos_token
    if not tokens and begins is not None:
        return [begins]
    twice = begins is not None and tokens[:2] == [begins, begins] and text.lstrip().startswith(spelled)
    return tokens[1:] if twice else tokens


def _check_text(text: str) -> None:
    if not is_text(text):
        raise RequestError(f"prompt: {HALF_A_CHARACTER}")


class TextStream:
    """Detokenises one answer. `push` tokens, `take` what can be shown; `text` is all there is so far.

    tokenizer: a `transformers` tokenizer. A window of the last tokens is decoded with and without the newest, because
    a token's text depends on its neighbours (word-initial spaces). Tokens that are parts of characters are decoded
    here, byte by byte: only an incomplete character is waited for, not every U+FFFD that a text ends in. special:
    special tokens are part of the text. behind: the tokens before the answer, without which the decoders of
    SentencePiece drop the space that it begins with.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), special: bool = False, behind: Sequence[int] = ()):
        self._tokenizer, self._stop = tokenizer, [StopText(text) for text in stop]
        named = special_tokens(tokenizer)
        self._stop_tokens = {token for token, text in named.items() if text in stop} if stop else set()
        self._hidden: Container[int] = () if special else named
        self._tokens = self._whole_end(behind)
        self._window, self._read = 0, len(self._tokens)
        self._bytes = getincrementaldecoder("utf8")("replace")
        self._shown = 0
        self.text = ""
        self._may_stop, self.stopped = True, False

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; true once a stop string is complete, which ends the text before it. may_stop: whether a stop
        string that ends with this token counts.
        """
        self._may_stop = may_stop
        if may_stop and token in self._stop_tokens:
            self._append(self._bytes.decode(b"", final=True))
            self.stopped = True
        elif token not in self._hidden:
            self._append(self._text_of(token))
        return self.stopped

    def take(self, final: bool = False) -> str:
        """Text not taken yet. `final`: nothing follows, so hold nothing back."""
        if final and not self.stopped:
            self._append(self._bytes.decode(b"", final=True))
        end = len(self.text)
        if not final and not self.stopped:
            end -= max((stop.matched for stop in self._stop), default=0)
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _text_of(self, token: int) -> str:
        """The text that is complete with `token`, which is added."""
        self._tokens.append(token)
        if (part := partial_bytes(self._tokenizer, token)) is not None:
            piece = self._bytes.decode(part)
        else:
            known, now = (self._decode(self._tokens[self._window : end]) for end in (self._read, len(self._tokens)))
            piece = self._bytes.decode(b"", final=True) + now[len(known) :]
        if piece:  # the space behind a special token that shows nothing would be dropped if the window began there
            self._window = self._read
        self._read = len(self._tokens)
        return piece

    def _whole_end(self, tokens: Sequence[int]) -> list[int]:
        """A few of the last tokens whose text is whole characters: half of one would spoil what it is decoded with."""
        for count in _BEHIND:
            last = [*tokens[-count:]]
            text = self._decode(last)
            if not text.startswith(PARTIAL):
                return [] if text.endswith(PARTIAL) else last
        return []

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._hidden != (), clean_up_tokenization_spaces=False
        )
        return text

    def _append(self, piece: str) -> None:
        begins = [at for stop in self._stop if (at := stop.find(piece, self._may_stop)) is not None]
        before = len(self.text)
        self.text += piece
        if begins:
            self.text, self.stopped = self.text[: max(0, before + min(begins))], True
