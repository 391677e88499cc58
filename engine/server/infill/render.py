"""Turns what the engine emits into llama.cpp's completions: events of a stream, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.answer import Piece, Result
from engine.server.answers import Chunk, JsonObject
from engine.server.infill.schema import InfillRequest
from engine.server.reading.progress import progress_fields, timings
from engine.server.render import Renderer
from engine.server.translate import ChoiceRequest
from engine.server.vocabulary import Vocabulary
from engine.wire.messages import PromptProgress

_REASONS = {"eos": "eos", "stop": "eos", "length": "limit"}
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")


class InfillRenderer(Renderer):
    """One answer; see `Renderer`. context: the model's. With an `n_predict` of 0 nothing is shown."""

    def __init__(
        self, model: str, body: InfillRequest, wanted: ChoiceRequest, vocabulary: Vocabulary, context: int
    ) -> None:
        self._model, self._body, self._wanted, self._vocabulary = model, body, wanted, vocabulary
        self._context = context
        self._sent = 0  # tokens that were sent

    def progress(self, choice: int, progress: PromptProgress) -> list[Chunk]:
        shown = {"index": 0, "content": "", "tokens": [], "stop": False} | progress_fields(progress)
        return [shown] if self._body.return_progress else []

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        self._sent += len(piece.token_ids)
        if not self._body.n_predict:
            return []
        counts = {"tokens_predicted": self._sent, "tokens_evaluated": len(self._wanted.prompt)}
        said = {"index": 0, "content": piece.text, "tokens": list(piece.token_ids), "stop": False}
        return [said | counts]

    def closing(self, choice: int, result: Result) -> list[Chunk]:
        return [self._chosen(self._final(result) | {"content": ""})]

    def whole(self, results: Sequence[Result]) -> JsonObject:
        return JsonObject(self._chosen(self._final(results[0])))

    def _final(self, result: Result) -> dict[str, Any]:
        shown = result.token_ids if self._body.n_predict else []
        content = result.text if self._body.n_predict else ""
        return {
            "index": 0,
            "content": content,
            "tokens": list(shown) if self._body.return_tokens else [],
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(shown),
            "tokens_evaluated": len(self._wanted.prompt),
            "tokens_cached": min(result.metrics.cached_tokens, len(self._wanted.prompt)),
            "generation_settings": self._settings(),
            "prompt": self._vocabulary.texts(self._wanted.prompt),
            "has_new_line": "\n" in content,
            "truncated": False,
            "stop_type": self._stop_type(result),
            "stopping_word": result.stop_text,
            "timings": timings(result).model_dump(),
        }

    def _stop_type(self, result: Result) -> str:
        """Return why the answer ended, in llama.cpp's words."""
        if result.stop_text:
            return "word"
        return _REASONS[result.finish_reason] if self._body.n_predict else "limit"

    def _settings(self) -> dict[str, Any]:
        own = {"n_ctx": self._context, "n_predict": self._body.n_predict, "repeat_penalty": self._body.repeat_penalty}
        used = {name: getattr(self._wanted.sampling, name) for name in _SETTINGS}
        return own | used | {"stop": self._body.stop or [], "stream": self._body.stream}

    def _chosen(self, final: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the client wants. One within another gets its own name."""
        if self._body.response_fields is None:
            return final
        found = {}
        for path in self._body.response_fields:
            value: Any = final
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path.rpartition("/")[2]] = value
        return found
