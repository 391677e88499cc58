"""Turns what the engine emits into OpenAI's objects: the chunks of a stream, and whole answers."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from drafters.registry import parts
from engine.answer import Piece, Result, speculative_decoding
from engine.config import Config
from engine.core.methods import METHODS
from engine.server.answers import (
    AnswerMetrics,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Chunk,
    FinishReason,
    PromptTokensDetails,
    SpeculativeDecoding,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenSource,
    ToolCall,
    TopLogprob,
    Usage,
)
from engine.server.errors import ApiError
from engine.server.reading.progress import progress_fields, timings
from engine.server.schema import Generation
from engine.server.tools.calling import Calling
from engine.server.tools.message import REASONS, ChatAnswer, delta_of
from engine.server.translate import ChoiceRequest
from engine.server.vocabulary import Vocabulary, offset
from engine.text.stream import TextStream
from engine.wire.messages import PromptProgress, TokenLogprob


class Renderer(ABC):
    """One of the kinds of answers, and how its events are sent. done: what ends a stream. ping: the event that keeps a
    silent stream open; most APIs have none, and a comment does.
    """

    done = ping = b""

    def opening(self) -> list[Chunk]:
        """Return the chunks before the first token."""
        return []

    def progress(self, choice: int, progress: PromptProgress) -> list[Chunk]:
        """Return the chunks that say how far the prompt is."""
        return []

    @abstractmethod
    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        """Return the chunks of one round of a choice."""

    @abstractmethod
    def closing(self, choice: int, result: Result) -> list[Chunk]:
        """Return the chunks that end a choice."""

    @abstractmethod
    def whole(self, results: Sequence[Result]) -> BaseModel:
        """Return the whole answer with all choices."""

    def ending(self, results: Sequence[Result]) -> list[Chunk]:
        """Return the chunks after all choices."""
        return []

    def failure(self, error: ApiError) -> Chunk:
        """Return the chunk of an error after the stream has begun."""
        return error.body.model_dump()

    def event(self, chunk: Chunk) -> bytes:
        """Return a chunk as it is sent."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class _Format(Renderer):
    """What the forms of chat and text completions share. kind: the chunks' `object`. body: the request. unnamed:
    sources that are shown as "target".
    """

    kind, letters = "", ""
    done = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        wanted: Sequence[ChoiceRequest],
        vocabulary: Vocabulary,
        body: Generation,
        unnamed: frozenset[str] = frozenset(),
    ):
        self.wanted, self.vocabulary, self.body, self.unnamed = wanted, vocabulary, body, unnamed
        self.left_out: Sequence[str] = ()  # keywords of schemas that no grammar follows
        self._sent = 0  # tokens of all answers so far
        self._head = {
            "id": f"{self.letters}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._prompts = sum({id(one.prompt): len(one.prompt) for one in wanted}.values())
        """Tokens of prompts. A prompt counts once, however many choices it has: they share its list. Equal prompts of a
        batch do not.
        """

    def ending(self, results: Sequence[Result]) -> list[Chunk]:
        """Return the chunk that counts tokens, if it was asked for."""
        if not self.body.includes_usage:
            return []
        figures = {"usage": self._usage(results).model_dump(), "metrics": self._metrics(results).model_dump()}
        return [{**self._head, "choices": [], **figures}]

    def _usage(self, results: Sequence[Result]) -> Usage:
        shown = zip(self.wanted, results, strict=True)
        usage = self._count(sum(len(result.token_ids) for wanted, result in shown if not wanted.silent))
        return usage.model_copy(
            update={"prompt_tokens_details": PromptTokensDetails(cached_tokens=self._cached(results))}
        )

    def _cached(self, results: Sequence[Result]) -> int:
        """Return the tokens of the prompts that the prefix cache had; of a prompt with several choices, for each of
        them.
        """
        found: dict[int, int] = {}
        for one, result in zip(self.wanted, results, strict=True):
            cached = min(result.metrics.cached_tokens, len(one.prompt))
            found[id(one.prompt)] = min(cached, found.get(id(one.prompt), cached))
        return sum(found.values())

    def _count(self, answers: int) -> Usage:
        return Usage(prompt_tokens=self._prompts, completion_tokens=answers, total_tokens=self._prompts + answers)

    def _metrics(self, results: Sequence[Result]) -> AnswerMetrics:
        return _metrics(results, [*self.body.ignored, *self.left_out])

    def _see(self, choice: int, piece: Piece) -> None:
        """Count what is about to be sent."""
        self._sent += 0 if self.wanted[choice].silent else len(piece.token_ids)

    def _chunk(self, choice: Chunk) -> Chunk:
        chunk = {**self._head, "choices": [choice]}
        if self.body.counts_throughout:
            chunk["usage"] = self._count(self._sent).model_dump()
        elif self.body.includes_usage:  # as OpenAI's chunks, where usage follows
            chunk["usage"] = None
        return chunk

    def _sources(self, arrival: Piece | Result) -> list[TokenSource] | None:
        if not self.body.return_sources:
            return None
        named = zip(arrival.token_ids, arrival.sources, strict=True)
        shown = ((token, "target" if source in self.unnamed else source) for token, source in named)
        return [TokenSource(token=self.vocabulary.text(token), source=source) for token, source in shown]

    def _source_fields(self, piece: Piece) -> Chunk:
        sources = self._sources(piece)
        return {} if sources is None else {"sources": [source.model_dump() for source in sources]}

    def _envelope(self, results: Sequence[Result]) -> dict[str, Any]:
        head = {name: self._head[name] for name in ("id", "created", "model")}
        figures = {"usage": self._usage(results), "metrics": self._metrics(results), "timings": timings(results[0])}
        return head | figures


class ChatRenderer(_Format):
    """chat.completion and its chunks. calling: what the answers may call."""

    kind, letters = "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        model: str,
        wanted: Sequence[ChoiceRequest],
        vocabulary: Vocabulary,
        body: Generation,
        unnamed: frozenset[str],
        calling: Calling,
    ):
        super().__init__(model, wanted, vocabulary, body, unnamed)
        self._calls, self.left_out = bool(calling.wanted.tools), calling.left_out
        self._messages = [ChatAnswer(calling.reader(one.thinking), calling.format) for one in wanted]

    def opening(self) -> list[Chunk]:
        content = None if self._calls else ""
        return [self._delta(choice, {"role": "assistant", "content": content}) for choice in range(len(self.wanted))]

    def progress(self, choice: int, progress: PromptProgress) -> list[Chunk]:
        shown = self._delta(choice, {"role": "assistant", "content": None}) | progress_fields(progress)
        return [shown] if self.body.return_progress else []

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        self._see(choice, piece)
        logprobs = self._logprobs(choice, piece)
        shown = None if logprobs is None else logprobs.model_dump()
        delta = delta_of(self._messages[choice].feed(piece.text)) or ({} if self._calls else {"content": ""})
        return [self._delta(choice, delta, logprobs=shown, **self._source_fields(piece))]

    def closing(self, choice: int, result: Result) -> list[Chunk]:
        message = self._messages[choice]
        rest = [self._delta(choice, delta)] if (delta := delta_of(message.end())) else []
        last = self._delta(choice, {}, finish_reason=message.reason(result))
        return [*rest, last | {"timings": timings(result).model_dump()}]

    def whole(self, results: Sequence[Result]) -> ChatCompletion:
        choices = []
        for choice, (result, message) in enumerate(zip(results, self._messages, strict=True)):
            parts = message.whole(result.text)
            calls = [ToolCall(**call) for call in parts.calls]
            choices.append(
                ChatChoice(
                    index=choice,
                    message=ChatMessage(
                        content=parts.content or (None if calls else ""),
                        reasoning_content=parts.reasoning or None,
                        tool_calls=calls or None,
                    ),
                    logprobs=self._logprobs(choice, result),
                    finish_reason=message.reason(result),
                    sources=self._sources(result),
                )
            )
        return ChatCompletion(choices=choices, **self._envelope(results))

    def _delta(self, choice: int, delta: Chunk, **more: Any) -> Chunk:
        return self._chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | more)

    def _logprobs(self, choice: int, arrival: Piece | Result) -> ChatLogprobs | None:
        if self.wanted[choice].sampling.logprobs is None:
            return None
        return ChatLogprobs(content=[self._token(one) for one in arrival.logprobs or ()])

    def _token(self, one: TokenLogprob) -> ChatTokenLogprob:
        top = [self._top(token, logprob) for token, logprob in one.top]
        return ChatTokenLogprob(**self._top(one.token, one.logprob).model_dump(), top_logprobs=top)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=self.vocabulary.text(token), logprob=logprob, bytes=self.vocabulary.bytes(token))


class TextRenderer(_Format):
    """text_completion and its chunks, which have the same form."""

    kind, letters = "text_completion", "cmpl"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._answers: dict[int, TextStream] = {}
        """The text of its answer's tokens, for each choice that has begun, so that its echo was sent."""

    def progress(self, choice: int, progress: PromptProgress) -> list[Chunk]:
        return [self._text(choice, "") | progress_fields(progress)] if self.body.return_progress else []

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        self._see(choice, piece)
        text, logprobs = self._shown(choice, piece, piece.text)
        fields = {} if self.wanted[choice].silent else self._source_fields(piece)
        return [self._text(choice, text, logprobs=None if logprobs is None else logprobs.model_dump(), **fields)]

    def closing(self, choice: int, result: Result) -> list[Chunk]:
        last = self._text(choice, "", finish_reason=self._reason(choice, result))
        return [last | {"timings": timings(result).model_dump()}]

    def whole(self, results: Sequence[Result]) -> TextCompletion:
        choices = []
        for choice, result in enumerate(results):
            text, logprobs = self._shown(choice, result, result.text)
            reason, silent = self._reason(choice, result), self.wanted[choice].silent
            sources = None if silent else self._sources(result)
            choices.append(
                TextChoice(index=choice, text=text, logprobs=logprobs, finish_reason=reason, sources=sources)
            )
        return TextCompletion(choices=choices, **self._envelope(results))

    def _reason(self, choice: int, result: Result) -> FinishReason:
        return "length" if self.wanted[choice].silent else REASONS[result.finish_reason]

    def _text(self, choice: int, text: str, **more: Any) -> Chunk:
        return self._chunk({"index": choice, "text": text, "logprobs": None, "finish_reason": None} | more)

    def _shown(self, choice: int, arrival: Piece | Result, text: str) -> tuple[str, TextLogprobs | None]:
        """Return the text, and its tokens' log-probabilities. An echo comes before everything else."""
        wanted = self.wanted[choice]
        echo = None if choice in self._answers else wanted.echo
        if choice not in self._answers:
            self._answers[choice] = self.vocabulary.stream(before=wanted.prompt)
        answer = self._answers[choice]
        text = (echo or "") + ("" if wanted.silent else text)
        if wanted.sampling.logprobs is None:
            return text, None
        tokens: list[tuple[int, TokenLogprob | None]] = []
        offsets: list[int] = []
        if echo is not None:
            logprobs = arrival.prompt_logprobs or [None] * len(wanted.prompt)
            tokens += zip(wanted.prompt, logprobs, strict=True)
            offsets += self.vocabulary.prompt_offsets(wanted.prompt, echo)
        if not wanted.silent:
            tokens += [(one.token, one) for one in arrival.logprobs or ()]
            offsets += [len(wanted.echo or "") + offset(answer, one.token) for one in arrival.logprobs or ()]
        return text, self._logprobs(tokens, offsets)

    def _logprobs(self, tokens: Sequence[tuple[int, TokenLogprob | None]], offsets: list[int]) -> TextLogprobs:
        return TextLogprobs(
            tokens=[self.vocabulary.text(token) for token, _ in tokens],
            token_logprobs=[None if one is None else one.logprob for _, one in tokens],
            top_logprobs=[None if one is None else self._top(one) for _, one in tokens],
            text_offset=offsets,
        )

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """Return the log-probability of each text: of tokens with the same text, the likeliest counts; the token itself
        is always included.
        """
        ranked = {self.vocabulary.text(token): logprob for token, logprob in reversed(one.top)}
        return {self.vocabulary.text(one.token): one.logprob} | ranked


def unnamed_sources(config: Config) -> frozenset[str]:
    """Return the sources that clients are not told of: where answers are shared, retrieval names what
    others were told, and so does a head that has learned it.
    """
    if not config.drafter.share_answers:
        return frozenset()
    remembers = any(METHODS[name].remembers for name in parts(config))
    return frozenset(({"retrieval"} if remembers else set()) | ({"head"} if config.drafter.learned else set()))


def _metrics(results: Sequence[Result], ignored: list[str]) -> AnswerMetrics:
    """Return metrics of all choices together, which ran concurrently."""
    rounds = [round_ for result in results for round_ in result.rounds[1:]]
    tokens = sum(len(result.token_ids) for result in results)
    longest_s = max(len(result.token_ids) / result.metrics.tokens_per_second for result in results)
    return AnswerMetrics(
        rounds=len(rounds),
        mean_accepted_tokens=(tokens - len(results)) / len(rounds) if rounds else 0.0,
        tokens_per_second=tokens / longest_s,
        time_to_first_token_s=min(result.metrics.time_to_first_token_s for result in results),
        decoding_s=max(sum(round_.round_us for round_ in result.rounds[1:]) for result in results) / 1e6,
        exact=all(result.metrics.exact for result in results),
        activations=results[0].metrics.activations,
        kv_type=results[0].metrics.kv_type,
        weights=results[0].metrics.weights,
        ignored=ignored,
        speculative_decoding=SpeculativeDecoding(**msgspec.structs.asdict(speculative_decoding(rounds))),
    )
