"""Turns what the engine emits into Anthropic's messages: events of a stream, and whole messages."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from engine.answer import Piece, Result
from engine.core.batch import BLOCK_SIZE
from engine.server.answers import Chunk, JsonObject, named_event
from engine.server.errors import ApiError, anthropic_error
from engine.server.render import Renderer
from engine.server.tools.arguments import read_arguments
from engine.server.tools.blocks import Block, Blocks, Change
from engine.server.tools.calling import Calling
from engine.server.tools.message import ChatAnswer
from engine.server.translate import ChoiceRequest

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CACHED = ("cache_creation_input_tokens", "cache_read_input_tokens")
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesRenderer(Renderer):
    """One message; see `Renderer`. ignored: the request's fields that had no effect."""

    ping = named_event({"type": "ping"})

    def __init__(
        self,
        model: str,
        wanted: Sequence[ChoiceRequest],
        calling: Calling,
        ignored: Sequence[str] = (),
    ):
        self._wanted = wanted[0]
        self._answer = ChatAnswer(calling.reader(wanted[0].thinking), calling.format)
        self._blocks = Blocks()
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._head: Chunk = head | {"metrics": {"ignored": [*ignored, *calling.left_out]}}

    def opening(self) -> list[Chunk]:
        usage = {"input_tokens": len(self._wanted.prompt), "output_tokens": 0, **dict.fromkeys(_CACHED, 0)}
        message: Chunk = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        return self._events(self._blocks.add(self._answer.feed(piece.text)))

    def closing(self, choice: int, result: Result) -> list[Chunk]:
        changes = [*self._blocks.add(self._answer.end()), *self._blocks.end()]
        delta = {"type": "message_delta", "delta": self._ending(result), "usage": self._usage(result)}
        return [*self._events(changes), delta, {"type": "message_stop"}]

    def whole(self, results: Sequence[Result]) -> JsonObject:
        (result,) = results
        for deltas in (self._answer.feed(result.text), self._answer.end()):
            for _ in self._blocks.add(deltas):
                pass
        content = [_whole(block) for block in self._blocks.all]
        usage = self._usage(result)
        return JsonObject({**self._head, "content": content, **self._ending(result), "usage": usage})

    def failure(self, error: ApiError) -> Chunk:
        return anthropic_error(error)

    def event(self, chunk: Chunk) -> bytes:
        return named_event(chunk)

    def _events(self, changes: Iterable[Change]) -> list[Chunk]:
        return [_event(change) for change in changes]

    def _ending(self, result: Result) -> dict[str, Any]:
        reason = "stop_sequence" if result.stop_text else _REASONS[self._answer.reason(result)]
        return {"stop_reason": reason, "stop_sequence": result.stop_text or None}

    def _usage(self, result: Result) -> dict[str, int]:
        """Return the tokens of the prompt and the answer. What the prefix cache had, and the whole blocks that it has
        from now on, are not among `input_tokens`. The prompt's last token always is: it is read for every answer, and
        Claude Code takes a count of 0 for a missing one.
        """
        prompt = len(self._wanted.prompt)
        found = min(result.metrics.cached_tokens, prompt - 1)
        kept = max(0, (prompt - 1) // BLOCK_SIZE * BLOCK_SIZE - found)
        cached = dict(zip(_CACHED, (kept, found), strict=True))
        return {"input_tokens": prompt - found - kept, "output_tokens": len(result.token_ids), **cached}


def _event(change: Change) -> Chunk:
    place = {"index": change.block.number}
    if change.what == "begins":
        return {"type": "content_block_start", **place, "content_block": _begun(change.block)}
    if change.what == "ends":
        return {"type": "content_block_stop", **place}
    kind, name = _DELTAS[change.block.kind]
    return {"type": "content_block_delta", **place, "delta": {"type": kind, name: change.text}}


def _begun(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if block.kind == "reasoning" else _plain("")


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        # arguments that were cut off, or that cannot be read, are none
        return {**_begun(block), "input": read_arguments(block.text) or {}}
    return {**_begun(block), "thinking": block.text} if block.kind == "reasoning" else _plain(block.text)


def _plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
