"""The routes of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.core.errors import OverContext
from engine.server.answers import JsonObject, OpenApiResponses
from engine.server.errors import api_error
from engine.server.responses.functions import shown_tools
from engine.server.responses.items import without_references
from engine.server.responses.render import ResponsesRenderer, refused
from engine.server.responses.schema import ResponsesRequest
from engine.server.responses.store import ResponseStore
from engine.server.responses.translate import Message, chat_fields, client_names, conversation_of
from engine.server.serving import Serving
from engine.server.tools.arguments import read_arguments
from engine.server.tools.blocks import Block
from engine.server.tools.calling import Calling
from engine.server.translate import ChoiceRequest, chat_request


def add_responses(app: FastAPI, serving: Serving, stream: OpenApiResponses, refusals: OpenApiResponses) -> None:
    """Register OpenAI's routes of responses. `stream` and `refusals` are OpenAPI response tables."""
    store = ResponseStore()

    @app.post("/v1/responses", responses=stream | refusals)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Answer, as OpenAI's responses do."""
        key, earlier = request.state.key, []
        if body.previous_response_id is not None:
            earlier = store.find(body.previous_response_id, key, "previous_response_id").conversation
        given = body.input
        if not isinstance(given, str):
            given = without_references(given, partial(store.item, key=key))
        conversation = [*earlier, *conversation_of(given)]
        tools = await anyio.to_thread.run_sync(shown_tools, body.tools or [], body.added_tools)
        chat = chat_request(chat_fields(body, conversation, tools))
        serving.note([*body.ignored, *(["tools.format"] if any(tool.free for tool in tools) else [])])

        def completed(response: dict[str, Any], blocks: Sequence[Block]) -> None:
            if body.store:
                store.add(key, response, [*conversation, *_answered(blocks)])

        def renderer(wanted: list[ChoiceRequest], calling: Calling) -> ResponsesRenderer:
            return ResponsesRenderer(serving.settings.model, body, tools, wanted, calling, completed)

        try:
            return await serving.chat(request, chat, renderer, client_names(tools))
        except OverContext as error:
            if not body.stream:
                raise
            refusal = api_error(error, request.state.names)  # clients that stream read it from an event alone
            request.state.record["error"] = str(refusal)
            serving.latencies.refused(refusal.status)
            return Response(refused(serving.settings.model, body, refusal), media_type="text/event-stream")

    @app.get("/v1/responses/{response_id}", responses=refusals)
    async def response(response_id: str, request: Request) -> JsonObject:
        """Return a response that is stored."""
        return JsonObject(store.find(response_id, request.state.key).response)

    @app.delete("/v1/responses/{response_id}", responses=refusals)
    async def forget(response_id: str, request: Request) -> JsonObject:
        """Forget a response."""
        store.remove(response_id, request.state.key)
        return JsonObject({"id": response_id, "object": "response", "deleted": True})


def _answered(blocks: Sequence[Block]) -> list[Message]:
    """Return the answer as a chat message. A call that was cut off is left out, as it cannot be said again."""
    text = "".join(block.text for block in blocks if block.kind == "content")
    thought = "".join(block.text for block in blocks if block.kind == "reasoning")
    calls = [
        {"id": block.call_id, "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.kind == "call" and block.text and read_arguments(block.text) is not None
    ]
    return [{"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": thought or None}]
