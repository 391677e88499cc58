"""What the engine emits as OpenAI's responses: events of a stream, and whole responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.answer import Piece, Result
from engine.server.answers import Chunk, JsonObject, named_event
from engine.server.errors import ApiError
from engine.server.responses.schema import ResponsesRequest
from engine.server.tools.blocks import Block, Blocks, Change
from engine.server.tools.calling import Calling
from engine.server.tools.message import ChatAnswer
from engine.server.translate import ChoiceRequest
from engine.wire.messages import PromptProgress

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
_ECHOED = (
    "instructions", "previous_response_id", "store", "parallel_tool_calls", "max_output_tokens", "temperature",
    "background", "truncation", "user",
)  # fmt: skip
Completed = Callable[[dict[str, Any], Sequence[Block]], None]


class ResponsesRenderer:
    """One response; see `Renderer`. completed: called with the whole response and its blocks."""

    done = b""

    def __init__(
        self,
        model: str,
        body: ResponsesRequest,
        wanted: Sequence[ChoiceRequest],
        calling: Calling,
        completed: Completed,
    ):
        self._wanted, self._calling, self._completed = wanted[0], calling, completed
        self._answer = ChatAnswer(calling.reader(wanted[0].thinking), calling.format)
        self._blocks, self._sent, self._echo = Blocks(), 0, _echo(body)
        self._id, self._model, self._created = f"resp_{uuid.uuid4().hex}", model, int(time.time())

    def opening(self) -> list[Chunk]:
        response = self._response("in_progress", [], None)
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def progress(self, choice: int, progress: PromptProgress) -> list[Chunk]:
        return []

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        return self._events(self._blocks.add(self._answer.feed(piece.text)))

    def closing(self, choice: int, result: Result) -> list[Chunk]:
        return self._events([*self._blocks.add(self._answer.end()), *self._blocks.end()])

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
        response = self._response("failed", [_item(block, self._id, "incomplete") for block in self._blocks.all], None)
        return {
            "type": "response.failed",
            "response": response | {"error": {"code": "server_error", "message": str(error)}},
        }

    def event(self, chunk: Chunk) -> bytes:
        self._sent += 1
        return named_event({**chunk, "sequence_number": self._sent - 1})

    def _complete(self, result: Result) -> dict[str, Any]:
        cut = self._answer.reason(result) == "length"
        blocks = self._blocks.all
        statuses = ["completed"] * (len(blocks) - 1) + ["incomplete" if cut else "completed"]
        items = [_item(block, self._id, status) for block, status in zip(blocks, statuses, strict=False)]
        response = self._response("incomplete" if cut else "completed", items, self._usage(result))
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._completed(response, blocks)
        return response

    def _response(self, status: str, items: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        head = {"id": self._id, "object": "response", "created_at": self._created, "status": status}
        open_ = {"error": None, "incomplete_details": None, "model": self._model, "output": items, "usage": usage}
        return {**head, **open_, **self._echo, "top_p": self._echo["top_p"] or 1.0}

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

    def _events(self, changes: Iterable[Change]) -> list[Chunk]:
        return [event for change in changes for event in _events(change, self._id)]


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    choice = body.tool_choice
    tools = [
        {
            "type": "function",
            "name": one.name,
            "description": one.description,
            "parameters": one.parameters,
            "strict": True,
        }
        for one in body.tools or ()
    ]
    format_ = body.text.format if body.text is not None else None
    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "metadata": body.metadata or {},
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"} if format_ is None else format_.model_dump(by_alias=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_p": body.top_p,
    }


def _events(change: Change, response: str) -> list[Chunk]:
    block, place = change.block, {"output_index": change.block.number}
    at = {"item_id": _id(block, response), **place}
    inner = at | {"content_index": 0}
    if change.what == "begins":
        item = _item(block, response, "in_progress")
        added: list[Chunk] = [{"type": "response.output_item.added", **place, "item": item}]
        if block.kind != "call":
            added.append({"type": "response.content_part.added", **inner, "part": _part(block)})
        return added
    name = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
    more: Chunk = {"logprobs": []} if block.kind == "content" else {}
    where = at if block.kind == "call" else inner
    if change.what == "grows":
        return [{"type": f"response.{name}.delta", **where, "delta": change.text, **more}]
    whole = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
    done: list[Chunk] = [{"type": f"response.{name}.done", **where, **whole, **more}]
    if block.kind != "call":
        done.append({"type": "response.content_part.done", **inner, "part": _part(block)})
    return [*done, {"type": "response.output_item.done", **place, "item": _item(block, response, "completed")}]


def _id(block: Block, response: str) -> str:
    """An id of a block's item, the same in all events."""
    return f"{_PREFIXES[block.kind]}_{response.removeprefix('resp_')}_{block.number}"


def _item(block: Block, response: str, status: str) -> dict[str, Any]:
    head = {"id": _id(block, response), "status": status}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", **head, **call}
    content = [] if status == "in_progress" else [_part(block)]
    if block.kind == "reasoning":
        return {"type": "reasoning", **head, "summary": [], "content": content}
    return {"type": "message", **head, "role": "assistant", "content": content}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
