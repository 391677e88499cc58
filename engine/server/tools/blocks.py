"""A message as blocks, one after another: reasoning, text, and each call. Anthropic's messages and OpenAI's responses
are such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.server.tools.message import Delta


@dataclass
class Block:
    """A part of a message. kind: "content", "reasoning" or "call". number: its place in the message. name, call_id: of
    a call, whose text is its arguments.
    """

    kind: str
    number: int
    name: str = ""
    call_id: str = ""
    text: str = ""


class Change(NamedTuple):
    """What happens to a block; text: what it grows by."""

    what: Literal["begins", "grows", "ends"]
    block: Block
    text: str = ""


class Blocks:
    """Divides a message into blocks as it grows. all: the blocks so far; the last one is open until `end`."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def add(self, deltas: Sequence[Delta]) -> Iterator[Change]:
        """Yield the changes that deltas make."""
        for delta in deltas:
            kind = "call" if delta.kind == "arguments" else delta.kind
            if not self._open or delta.kind == "call" or self.all[-1].kind != kind:
                yield from self.end()
                name, call_id = (delta.text, delta.call_id) if kind == "call" else ("", "")
                self.all.append(Block(kind, len(self.all), name, call_id))
                self._open = True
                yield Change("begins", self.all[-1])
            if delta.kind != "call" and delta.text:
                self.all[-1].text += delta.text
                yield Change("grows", self.all[-1], delta.text)

    def end(self) -> Iterator[Change]:
        """Yield the change that closes the last block, if it is open."""
        if self._open:
            self._open = False
            yield Change("ends", self.all[-1])
