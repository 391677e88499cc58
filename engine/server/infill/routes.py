"""The route of llama.cpp's /infill."""

from __future__ import annotations

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.server.answers import OpenApiResponses
from engine.server.errors import ApiError
from engine.server.infill.render import InfillRenderer
from engine.server.infill.schema import InfillRequest
from engine.server.serving import Serving
from engine.server.translate import check_model, owned, places_for, text_choices
from engine.text.fill_in import FillIn

_NAMES = {"prompt": "input_prefix", "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}
_LEAST_ANSWER = 256  # tokens that other files leave to an answer without a limit


def add_infill(app: FastAPI, serving: Serving, stream: OpenApiResponses, refusals: OpenApiResponses) -> None:
    """Register llama.cpp's infill route. `stream` and `refusals` are OpenAPI response tables."""

    @app.post("/infill", responses=stream | refusals)
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill in what is between a prefix and a suffix, as llama.cpp's server does."""
        serving.check()
        request.state.names = _NAMES
        engine, settings, fill_in = serving.engine, serving.settings, serving.fill_in
        if body.model is not None:
            check_model(body.model, settings)
        if fill_in is None:
            message = "input_suffix: this model has no tokens for filling in; ask a model of code"
            raise ApiError(400, message, code="unsupported", param="input_suffix")
        tokens = await anyio.to_thread.run_sync(_prompt, body, fill_in, engine.target.context)
        asked = body.completion(settings.model, tokens, fill_in.ends)
        with places_for(asked, 1, engine, settings) as places:
            choices = await text_choices(asked, engine, settings, serving.vocabulary, None)
            (wanted,) = owned(choices, request.state.owner, engine.config)
            format_ = InfillRenderer(settings.model, body, wanted, serving.vocabulary, engine.target.context)
            serving.note(body.ignored)
            return await serving.answer(request, asked, [wanted], format_, places)


def _prompt(body: InfillRequest, fill_in: FillIn, context: int) -> list[int]:
    """Return the tokens of the prompt, after as many tokens of the other files as fit."""
    prompt = fill_in.prompt(body.input_prefix + body.prompt, body.input_suffix)
    answer = _LEAST_ANSWER if body.n_predict == -1 else max(1, body.n_predict)
    files = [(one.filename, one.text) for one in body.input_extra]
    before = fill_in.before(files, context - len(prompt) - answer)
    return [*fill_in.begins, *before, *prompt[len(fill_in.begins) :]]
