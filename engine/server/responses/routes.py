"""The routes of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.server.answers import JsonObject
from engine.server.responses.render import ResponsesRenderer
from engine.server.responses.schema import ResponsesRequest
from engine.server.responses.store import ResponseStore
from engine.server.responses.translate import Message, chat_fields, conversation_of, schema_paths
from engine.server.serving import Serving
from engine.server.tools.blocks import Block
from engine.server.tools.calling import Calling
from engine.server.translate import ChoiceRequest, chat_request

Responses = dict[int | str, dict[str, Any]]


def add_responses(app: FastAPI, serving: Serving, stream: Responses, refusals: Responses) -> None:
    """Add the routes to the application. stream: a streamed answer, as it is documented; refusals: their documented
    errors.
    """
    store = ResponseStore()

    @app.post("/v1/responses", responses=stream | refusals)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Answer, as OpenAI's responses do."""
        key, earlier = request.state.key, []
        if body.previous_response_id is not None:
            earlier = store.find(body.previous_response_id, key, "previous_response_id").conversation
        conversation = [*earlier, *conversation_of(body.input)]
        chat = chat_request(chat_fields(body, conversation))
        serving.note(body.ignored)

        def completed(response: dict[str, Any], blocks: Sequence[Block]) -> None:
            if body.store:
                store.add(key, response, [*conversation, *_answered(blocks)])

        def renderer(wanted: list[ChoiceRequest], calling: Calling) -> ResponsesRenderer:
            return ResponsesRenderer(serving.settings.model, body, wanted, calling, completed)

        return await serving.chat(request, chat, renderer, schema_paths(body))

    @app.get("/v1/responses/{response_id}", responses=refusals)
    async def response(response_id: str, request: Request) -> JsonObject:
        """A response that is stored."""
        return JsonObject(store.find(response_id, request.state.key).response)

    @app.delete("/v1/responses/{response_id}", responses=refusals)
    async def forget(response_id: str, request: Request) -> JsonObject:
        """Forget a response."""
        store.remove(response_id, request.state.key)
        return JsonObject({"id": response_id, "object": "response", "deleted": True})


def _answered(blocks: Sequence[Block]) -> list[Message]:
    """The answer as a chat message. A call that was cut off is left out, as it cannot be said again."""
    text = "".join(block.text for block in blocks if block.kind == "content")
    thought = "".join(block.text for block in blocks if block.kind == "reasoning")
    calls = [
        {"id": block.call_id, "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.kind == "call" and block.text.endswith("}")
    ]
    return [{"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": thought or None}]
