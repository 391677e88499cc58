"""Turns what the engine emits into OpenAI's responses: events of a stream, and whole responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.answer import Piece, Result
from engine.server.answers import Chunk, JsonObject, named_event
from engine.server.errors import ApiError
from engine.server.render import Renderer
from engine.server.responses.functions import ShownTool
from engine.server.responses.output import OutputItems
from engine.server.responses.schema import ResponsesRequest
from engine.server.responses.tools import AskedTool, FunctionTool, NamespaceTool
from engine.server.tools.blocks import Block, Blocks, Change
from engine.server.tools.calling import Calling
from engine.server.tools.message import ChatAnswer
from engine.server.translate import ChoiceRequest

_ECHOED = (
    "instructions", "previous_response_id", "store", "parallel_tool_calls", "max_output_tokens", "temperature",
    "background", "user",
)  # fmt: skip
Completed = Callable[[dict[str, Any], Sequence[Block]], None]


class ResponseHead:
    """The fields that every event's response has beside its output."""

    def __init__(self, model: str, body: ResponsesRequest):
        self.id, self._model, self._created = f"resp_{uuid.uuid4().hex}", model, int(time.time())
        self._echo = _echo(body)

    def response(self, status: str, items: Sequence[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        """Return the response as it is now."""
        head = {"id": self.id, "object": "response", "created_at": self._created, "status": status}
        open_ = {"error": None, "incomplete_details": None, "model": self._model, "output": items, "usage": usage}
        return {**head, **open_, **self._echo, "top_p": self._echo["top_p"] or 1.0}

    def failure(self, error: ApiError, items: Sequence[Any] = ()) -> Chunk:
        """Return the event of a response that an error has ended."""
        said = {"code": error.code if error.over is not None else "server_error", "message": str(error)}
        return {"type": "response.failed", "response": self.response("failed", items, None) | {"error": said}}


def refused(model: str, body: ResponsesRequest, error: ApiError) -> bytes:
    """Return the stream of a response that was refused before it began."""
    head = ResponseHead(model, body)
    created: Chunk = {"type": "response.created", "response": head.response("in_progress", (), None)}
    events = enumerate((created, head.failure(error)))
    return b"".join(named_event({**chunk, "sequence_number": number}) for number, chunk in events)


class ResponsesRenderer(Renderer):
    """One response; see `Renderer`. tools: those that the model has seen. completed: called with the whole response and
    its blocks.
    """

    def __init__(
        self,
        model: str,
        body: ResponsesRequest,
        tools: Sequence[ShownTool],
        wanted: Sequence[ChoiceRequest],
        calling: Calling,
        completed: Completed,
    ):
        self._wanted, self._calling, self._completed = wanted[0], calling, completed
        self._answer = ChatAnswer(calling.reader(wanted[0].thinking), calling.format)
        self._blocks, self._sent, self._head = Blocks(), 0, ResponseHead(model, body)
        self._items = OutputItems(self._head.id, tools)

    def opening(self) -> list[Chunk]:
        response = self._head.response("in_progress", [], None)
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        return self._events(self._blocks.add(self._answer.feed(piece.text)))

    def closing(self, choice: int, result: Result) -> list[Chunk]:
        rest = self._events(self._blocks.add(self._answer.end()))
        return [*rest, *self._events(self._blocks.end(), self._ending(result))]

    def ending(self, results: Sequence[Result]) -> list[Chunk]:
        response = self._complete(results[0])
        return [{"type": f"response.{response['status']}", "response": response}]

    def whole(self, results: Sequence[Result]) -> JsonObject:
        (result,) = results
        for deltas in (self._answer.feed(result.text), self._answer.end()):
            for _ in self._blocks.add(deltas):
                pass
        return JsonObject(self._complete(result))

    def failure(self, error: ApiError) -> Chunk:
        return self._head.failure(error, [self._items.whole(block, "incomplete") for block in self._blocks.all])

    def event(self, chunk: Chunk) -> bytes:
        self._sent += 1
        return named_event({**chunk, "sequence_number": self._sent - 1})

    def _complete(self, result: Result) -> dict[str, Any]:
        ending, blocks = self._ending(result), self._blocks.all
        statuses = [*["completed"] * (len(blocks) - 1), ending]
        items = [self._items.whole(block, status) for block, status in zip(blocks, statuses, strict=False)]
        response = self._head.response(ending, items, self._usage(result))
        if ending == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._completed(response, blocks)
        return response

    def _ending(self, result: Result) -> str:
        """Return the status of the response and of its last item."""
        return "incomplete" if self._answer.reason(result) == "length" else "completed"

    def _usage(self, result: Result) -> dict[str, Any]:
        prompt, answer = len(self._wanted.prompt), len(result.token_ids)
        thought = self._calling.reasoning_tokens(result.token_ids, self._wanted.thinking)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": min(result.metrics.cached_tokens, prompt),
                "cache_write_tokens": 0,
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + answer,
        }

    def _events(self, changes: Iterable[Change], ending: str = "completed") -> list[Chunk]:
        """Return the events of changes. ending: the status of an item that ends with them."""
        return [event for change in changes for event in self._items.events(change, ending)]


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    choice = body.tool_choice
    format_ = body.text.format if body.text is not None else None
    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "metadata": body.metadata or {},
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"} if format_ is None else format_.model_dump(by_alias=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [_echoed(tool) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _echoed(tool: AskedTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return tool.model_dump(include={"type", "name", "description", "parameters"}) | {"strict": True}
    plain = tool.model_dump(exclude_unset=True)
    return plain | ({"tools": [_echoed(one) for one in tool.tools]} if isinstance(tool, NamespaceTool) else {})
