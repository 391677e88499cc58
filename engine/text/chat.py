"""Chat messages to token ids: control tokens are those that the chat template writes, never what a message spells.

A template is a program, so only a trial tells what it wrote from what it copied. It runs again on messages in disguise,
whose characters are replaced, one by one, with private-use characters that the text does not hold. If the outcome is
the text in disguise, whatever still spells a control token in it is the template's own.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer

from engine.core.errors import RequestError, first_line, shown
from engine.text.call_text import with_calls_in_texts
from engine.text.token_pieces import special_tokens

_BLOCK = 256
_BLOCKS = range(0xF0000 // _BLOCK, 0x10FF00 // _BLOCK)  # blocks of private-use characters
_ESCAPED = '"\\'  # their escapes in JSON would depend on the disguise
_RESERVED = {  # arguments of `apply_chat_template` in `transformers`, some of which templates see
    *("self", "conversation", "messages", "tools", "documents", "chat_template", "kwargs", "tokenizer_kwargs"),
    *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "tokenize", "truncation"),
    *("padding", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
_TESTED = ("role", "type")  # keys whose values templates compare with words
_Change = Callable[[str], str]


@dataclass(frozen=True)
class Rendering:
    """How chat messages become a prompt. opens_answer: the prompt ends with what begins an answer. continues: the
    answer continues the last message, which is left open. variables: of the template, such as enable_thinking. tools:
    those that the answer may call, as OpenAI writes them.
    """

    opens_answer: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `apply_chat_template`. No variable may take the place of one of the method's own."""
        if taken := self.variables.keys() & _RESERVED:
            raise RequestError(f"chat_template_kwargs.{min(taken)}: is no variable of a chat template; leave it out")
        own = {"add_generation_prompt": self.opens_answer, "continue_final_message": self.continues}
        return {**self.variables, **own, "tools": list(self.tools) or None}


def render(tokenizer: Any, messages: Sequence[Any], rendering: Rendering) -> str:
    """Return the text that the chat template makes of the messages. Raises RequestError."""
    arguments = rendering.arguments
    try:
        shown = with_calls_in_texts(tokenizer, messages)
        return str(tokenizer.apply_chat_template(shown, tokenize=False, **arguments))
    except Exception as error:  # the template is the model's own code
        raise RequestError(f"prompt: the chat template refused the messages: {first_line(error)}") from error


def turn_end(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes after an assistant's turn, the last one if it writes
    several; None if it writes none.
    """
    if not tokenizer.chat_template:
        return None
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "TALON"}
    for messages in ([asked, answer], [asked, answer, asked]):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # the template is the model's own code, and need not like such messages
            continue
        after = tokenizer(text.rpartition(answer["content"])[2].lstrip(), add_special_tokens=False)["input_ids"]
        if after and after[0] in tokenizer.added_tokens_decoder:
            return int(after[0])
    return None


def chat_tokens(tokenizer: Any, messages: Sequence[Any], text: str, rendering: Rendering) -> list[int]:
    """Return the token ids of chat messages, of which the chat template makes `text`."""
    named = [name for name in special_tokens(tokenizer).values() if name.strip()]
    if named and (spelled := _places(named, text)):
        own = _places_of_template(tokenizer, messages, text, rendering, named)
        if own != spelled:
            return _without_others(tokenizer, text, own)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _places(named: Iterable[str], text: str) -> list[tuple[int, int]]:
    return [match.span() for match in _any_of(named).finditer(text)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match the longest of the texts at a place, as tokenizers find special tokens."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


# Which places of a text the template wrote.


def _places_of_template(
    tokenizer: Any, messages: Sequence[Any], text: str, rendering: Rendering, named: Sequence[str]
) -> list[tuple[int, int]]:
    """Return where in `text` the template itself wrote control tokens."""
    disguise = Disguise.of(text, named)

    def rendered(every: bool, hidden: Iterable[str]) -> str | None:
        """Render the disguised messages; return None if the template reacts to the disguise. With `every`, all
        characters of contents are disguised; otherwise only texts in `hidden`.
        """
        pattern = _any_of(hidden)

        def spelled(value: str) -> str:
            return pattern.sub(lambda match: match[0].translate(disguise.table), value)

        def changed(value: str) -> str:
            return value.translate(disguise.table) if every else spelled(value)

        try:
            variables = _changed(rendering.variables, spelled, spelled)
            tools = [_changed(tool, spelled, spelled) for tool in rendering.tools]
            disguised = [_changed(message, changed, spelled) for message in messages]
            outcome = render(tokenizer, disguised, replace(rendering, variables=variables, tools=tools))
        except RequestError:
            return None
        return outcome if disguise.reveal(outcome) == text else None

    # A template that tests what a message holds does not know it in disguise: then only control tokens are disguised,
    # and of these only the ones that it does not test for.
    outcome = rendered(True, named) or rendered(False, named)
    if outcome is None:
        held = {match[0] for value in _texts([*messages, *rendering.tools]) for match in _any_of(named).finditer(value)}
        outcome = rendered(False, [name for name in sorted(held) if rendered(False, [name]) is not None])
    if outcome is None:
        raise RequestError(
            f"prompt: the chat template treats messages that hold control tokens such as {shown(min(held))} in another "
            "way; leave them out"
        )
    return _places(named, outcome)


@dataclass(frozen=True)
class Disguise:
    """Replaces characters, so that what is copied can be told from what a template writes. table: of `str.translate`,
    from characters to private-use ones that the text does not hold.
    """

    table: dict[int, int]

    @classmethod
    def of(cls, text: str, named: Sequence[str]) -> Disguise:
        """Make a disguise for what is copied into `text`. Raises RequestError if the text holds all
        private-use blocks.
        """
        taken = {ord(character) // _BLOCK for character in text if ord(character) >= _BLOCKS[0] * _BLOCK}
        block = next((block for block in _BLOCKS if block not in taken), None)
        if block is None:
            raise RequestError("prompt: holds characters of every private-use block; leave some out")
        characters = {chr(code) for code in range(33, 127)} | set("".join(named))
        hidden = sorted(character for character in characters if not (character.isspace() or character in _ESCAPED))
        return cls({ord(character): block * _BLOCK + i for i, character in enumerate(hidden[:_BLOCK])})

    def reveal(self, text: str) -> str:
        return text.translate({hidden: plain for plain, hidden in self.table.items()})


def _changed(value: Any, changed: _Change, spelled: _Change) -> Any:
    """Change the texts of a message, or of a value in one; those that templates test, and keys, as `spelled` says."""
    if isinstance(value, str):
        return changed(value)
    if isinstance(value, Mapping):
        return {
            spelled(key) if isinstance(key, str) else key: _changed(
                item, spelled if key in _TESTED else changed, spelled
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(item, changed, spelled) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


# Tokens of a text of which only some places are control tokens.


@dataclass(frozen=True)
class _PlainTokenizer:
    """A copy of a tokenizer for which a special token's text is text. Before the special tokens themselves stands a
    mark that nobody can guess. ids: the original ids of the tokens so marked. A marked token is found within a word
    too.
    """

    tokenizer: Tokenizer
    mark: str
    ids: dict[int, int]

    @classmethod
    def of(cls, tokenizer: Any) -> _PlainTokenizer:
        copy, mark = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), f"\U0010fffd{secrets.token_hex(8)}"
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        ids: dict[int, int] = {}
        for token, known in tokenizer.added_tokens_decoder.items():
            if known.special:
                how = {name: getattr(known, name) for name in ("lstrip", "rstrip", "normalized")}
                copy.add_tokens([AddedToken(mark + known.content, **how)])
                marked = copy.token_to_id(mark + known.content)
                assert marked is not None
                ids[marked] = token
        return cls(copy, mark, ids)


_plain: WeakKeyDictionary[Any, _PlainTokenizer] = WeakKeyDictionary()


def _without_others(tokenizer: Any, text: str, own: Sequence[tuple[int, int]]) -> list[int]:
    """Return the token ids of `text`, in which special tokens are at the places `own` alone. Raises RequestError."""
    if tokenizer not in _plain:
        _plain[tokenizer] = _PlainTokenizer.of(tokenizer)
    plain, marked, end = _plain[tokenizer], "", 0
    places = _tokens_at(tokenizer, text, own)
    for start, stop in places:
        marked += text[end:start] + plain.mark + text[start:stop]
        end = stop
    ids = plain.tokenizer.encode(marked + text[end:], add_special_tokens=False).ids
    if sum(token in plain.ids for token in ids) != len(places):  # the mark would otherwise be in the prompt
        spelled = sorted({*_places(special_tokens(tokenizer).values(), text)}.difference(own))
        names = [text[start:stop] for start, stop in spelled]
        raise RequestError(
            f"prompt: this tokenizer cannot tell control tokens such as {shown(names[:1])} that messages hold from "
            "those of the chat template; leave them out"
        )
    return [plain.ids.get(token, token) for token in ids]


def _tokens_at(tokenizer: Any, text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Keep the places at which the tokenizer finds the special token that is written there: within a word, or after
    other text, it may find none.
    """
    encoded, special = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False), special_tokens(tokenizer)
    found = [(*span, special[i]) for i, span in zip(encoded.ids, encoded.offsets, strict=True) if i in special]

    def is_token(start: int, stop: int) -> bool:
        """Return whether a token is there. Spans hold the white space that a token takes with it."""
        before = bisect_right(found, start, key=itemgetter(0))
        _, end, name = found[before - 1] if before else (0, 0, "")
        return bool(end >= stop and name == text[start:stop])

    return [place for place in places if is_token(*place)]
