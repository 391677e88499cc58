"""Text to tokens and back. The text comes back in pieces of whole characters that cannot begin a stop string."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import ConfigError, ModelError, RequestError, first_line
from engine.model_hub import is_hub_id, is_local

HALF_A_CHARACTER = "holds half a character; decode the text it comes from as UTF-8"
_INCOMPLETE = "\ufffd"
_BEHIND = range(6, 10)  # tokens before an answer to decode its first ones with: some may be special, four a character


@dataclass(frozen=True)
class Rendering:
    """How chat messages become a prompt. opens_answer: the prompt ends with what begins an answer. continues: the
    answer continues the last message, which is left open. variables: of the template, such as enable_thinking.
    """

    opens_answer: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


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

    A tokenizer without a template takes a text as it is. A text without tokens is the token that begins texts, if the
    tokenizer has one. Raises RequestError for messages it cannot take.
    """
    if isinstance(prompt, str):
        if raw or not tokenizer.chat_template:
            begins = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            return _tokens(tokenizer, prompt) or begins
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise RequestError("prompt: this model has no chat template; give text or token ids, or set chat_template=FILE")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise RequestError(f"prompt: {message!r} is no chat message; each needs role and content")
    arguments = _arguments(tokenizer, rendering or Rendering())
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, **arguments)
    except Exception as error:  # the template is the model's own code
        raise RequestError(f"prompt: the chat template refused the messages: {first_line(error)}") from error
    return _tokens(tokenizer, text, add_special_tokens=False)


def _arguments(tokenizer: Any, rendering: Rendering) -> dict[str, Any]:
    """The arguments of `apply_chat_template`. No variable may take the place of one of the method's own."""
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if taken := rendering.variables.keys() & reserved:
        raise RequestError(f"chat_template_kwargs.{min(taken)}: is no variable of a chat template; leave it out")
    own = {"add_generation_prompt": rendering.opens_answer, "continue_final_message": rendering.continues}
    return {**rendering.variables, **own}


def _tokens(tokenizer: Any, text: str, **options: Any) -> list[int]:
    if not is_text(text):
        raise RequestError(f"prompt: {HALF_A_CHARACTER}")
    return list(tokenizer(text, **options)["input_ids"])


def _special_tokens(tokenizer: Any, texts: Sequence[str]) -> frozenset[int]:
    """The special tokens with these texts, which an answer's text does not show."""
    added = tokenizer.added_tokens_decoder.items() if texts else ()
    return frozenset(token for token, shown in added if shown.special and shown.content in texts)


class TextStream:
    """Detokenises one answer. `push` tokens, `take` what can be shown; `text` is all there is so far.

    tokenizer: a `transformers` tokenizer. A window of the last tokens is decoded with and without the newest, because
    a token's text depends on its neighbours (word-initial spaces, characters of several tokens). special: special
    tokens are part of the text. behind: the tokens before the answer, without which the decoders of SentencePiece drop
    the space that it begins with.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), special: bool = False, behind: Sequence[int] = ()):
        self._tokenizer, self._stop, self._special = tokenizer, stop, special
        self._stop_tokens = _special_tokens(tokenizer, stop)
        self._tokens = self._whole_end(behind)
        self._window, self._read = 0, len(self._tokens)
        self._shown = 0
        self.text = ""
        self._may_stop, self.stopped = True, False

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; true once a stop string is complete, which ends the text before it. may_stop: whether a stop
        string that ends with this token counts.
        """
        self._may_stop = may_stop
        if may_stop and token in self._stop_tokens:
            self.stopped = True
            return True
        self._tokens.append(token)
        known, now = self._decode(self._tokens[self._window : self._read]), self._decode(self._tokens[self._window :])
        if not now.endswith(_INCOMPLETE):
            self._append(now[len(known) :])
        return self.stopped

    def take(self, final: bool = False) -> str:
        """Text not taken yet. `final`: nothing follows, so hold nothing back."""
        if final and not self.stopped:
            known = self._decode(self._tokens[self._window : self._read])
            self._append(self._decode(self._tokens[self._window :])[len(known) :])
        end = len(self.text) - (0 if final or self.stopped else self._held_back())
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _whole_end(self, tokens: Sequence[int]) -> list[int]:
        """A few of the last tokens whose text is whole characters: half of one would spoil what it is decoded with."""
        for count in _BEHIND:
            last = [*tokens[-count:]]
            text = self._decode(last)
            if not text.startswith(_INCOMPLETE):
                return [] if text.endswith(_INCOMPLETE) else last
        return []

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
        return text

    def _append(self, piece: str) -> None:
        if piece:  # the space behind a special token that shows nothing would be dropped if the window began there
            self._window = self._read
        self._read = len(self._tokens)
        searched = len(self.text)
        self.text += piece
        if not self._may_stop:
            return
        ends = [at for stop in self._stop if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
