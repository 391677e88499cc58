"""The routes of Anthropic's API."""

from __future__ import annotations

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.server.answers import AnthropicError, InputTokens, OpenApiResponses
from engine.server.messages.billing import without_effect
from engine.server.messages.render import MessagesRenderer
from engine.server.messages.schema import CountRequest, MessagesRequest
from engine.server.messages.translate import chat_fields, client_names
from engine.server.schema import ChatRequest
from engine.server.serving import Serving
from engine.server.tools.calling import Calling
from engine.server.translate import ChoiceRequest, chat_request, check_model, count_prompt, names_of


def add_messages(app: FastAPI, serving: Serving, stream: OpenApiResponses, refusals: OpenApiResponses) -> None:
    """Register Anthropic's routes. `stream` and `refusals` are OpenAPI response tables; the error bodies are replaced
    by Anthropic's.
    """
    refusals = {status: one | {"model": AnthropicError} for status, one in refusals.items()}

    @app.post("/v1/messages", responses=stream | refusals)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer messages, as Anthropic's API does."""
        chat = chat_request(chat_fields(body))
        ignored = without_effect(body)
        serving.note(ignored)

        def renderer(wanted: list[ChoiceRequest], calling: Calling) -> MessagesRenderer:
            return MessagesRenderer(serving.settings.model, wanted, calling, ignored)

        return await serving.chat(request, chat, renderer, client_names(body))

    @app.post("/v1/messages/count_tokens", responses=refusals)
    async def count_tokens(body: CountRequest, request: Request) -> InputTokens:
        """Count the tokens of messages, also of more than fit."""
        chat: ChatRequest = chat_request(chat_fields(body))
        names = client_names(body)
        request.state.names = names_of(chat, names)
        check_model(chat.model, serving.settings)
        serving.note(without_effect(body))
        calling = await anyio.to_thread.run_sync(Calling.of, chat, serving.answers, names)
        return InputTokens(input_tokens=await count_prompt(chat, serving.engine, calling))
