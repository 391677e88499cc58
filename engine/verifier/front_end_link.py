"""The verifier's link to the front end: requests come in, once their grammar is read; tokens and failures go out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from engine.config import Config
from engine.core.errors import NotANumber, ProtocolError, RequestError, first_line
from engine.core.methods import find
from engine.core.params import own_defaults
from engine.costs.cost_model import CostModel
from engine.model.target import Target
from engine.sampling.matcher import Matcher, Matchers
from engine.verifier.request import Request
from engine.verifier.scheduler import Scheduler
from engine.verifier.step import StepResult
from engine.weights.tokenizer import load_tokenizer
from engine.wire.messages import (
    HEARTBEAT_S,
    Array,
    Cancel,
    Emitted,
    Failed,
    Heartbeat,
    PromptsRead,
    Ready,
    Stop,
    Submit,
    Tokens,
)
from engine.wire.transport import Dealer

FROM_FRONT_END = (Submit, Cancel, Stop)
_GRAMMAR_S = 0.005  # between checks whether a grammar has been read


class FrontEndLink:
    """The verifier's end of its link to the front end. budget: maximum nodes of a tree, for which a request reserves
    room.
    """

    def __init__(self, dealer: Dealer, target: Target, config: Config):
        self.dealer, self.target, self.budget = dealer, target, config.drafter.budget
        method = find(config.method)
        self._head = config.drafter.head if method.merges else config.method if method.has_model else ""
        self._matchers = Matchers(lambda: load_tokenizer(config.model), target.vocab_size, target.eos_tokens)
        self._unmatched: list[tuple[Submit, list[Array], Future[Matcher]]] = []  # whose grammar is being read
        self._beaten_ns = 0

    @property
    def patience_s(self) -> float:
        """How long to wait for messages at most."""
        return _GRAMMAR_S if self._unmatched else HEARTBEAT_S

    def close(self) -> None:
        self._matchers.close()

    # What arrives.

    def received(self) -> Iterator[Request | Cancel | Stop]:
        """Yield new requests and control messages. An invalid request is refused at once."""
        for message, arrays in self.dealer.received():
            if not isinstance(message, Submit):
                if isinstance(message, Cancel):
                    self._drop(message.request)
                yield message
            elif (grammar := message.sampling.grammar) is not None:
                self._unmatched.append((message, arrays, self._matchers.begin(grammar, arrays[1].tolist())))
            else:
                yield from self._request(message, arrays, None)
        yield from self._matched()

    def _drop(self, number: int) -> None:
        """Forget the request if its grammar is still to be read, or others would wait for it."""
        for message, _, future in self._unmatched:
            if message.request == number:
                future.cancel()
        self._unmatched = [entry for entry in self._unmatched if entry[0].request != number]

    def _matched(self) -> Iterator[Request]:
        """Requests whose grammar has been read."""
        waiting, self._unmatched = self._unmatched, []
        for message, arrays, future in waiting:
            if not future.done():
                self._unmatched.append((message, arrays, future))
            elif (error := future.exception()) is not None:
                self.refuse(message.request, error)
            else:
                yield from self._request(message, arrays, future.result())

    def _request(self, message: Submit, arrays: list[Array], matcher: Matcher | None) -> Iterator[Request]:
        prompt, answer = (array.tolist() for array in arrays)
        try:
            if not prompt or min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
                raise ProtocolError(f"a prompt of token ids from 0 to {self.target.vocab_size - 1} was expected")
            request = Request(message.request, prompt, answer, message.sampling, self.target, self.budget, matcher)
        except Exception as error:  # whatever is wrong with one request, the others continue
            return self.refuse(message.request, error)
        yield request

    # What is sent.

    def send_ready(self) -> None:
        """Send the front end the facts about the target."""
        target = self.target
        if target.facts.not_applied:
            names = ", ".join(target.facts.not_applied)
            print(f"talon: model={target.name}: of generation_config.json not applied: {names}", file=sys.stderr)
        if target.stock_reason:
            print(
                f"talon: model={target.name}: runs transformers' own forward, which is slower than the lean decoder "
                f"({target.stock_reason})",
                file=sys.stderr,
            )
        if target.own_context < target.full_context:
            print(
                f"talon: model={target.name}: {target.own_context} of the context's {target.full_context} positions "
                "are served, because positions rotate differently (LongRoPE) in longer texts",
                file=sys.stderr,
            )
        if target.context < target.own_context:
            print(
                f"talon: model={target.name}: verifier.kv_memory has room for {target.context} of the context's "
                f"{target.own_context} positions; longer requests are refused",
                file=sys.stderr,
            )
        defaults = own_defaults(target.facts.generation, target.name)
        pool = target.pool
        states = None if pool is None else pool.layer_states
        ready = Ready(
            vocab_size=target.vocab_size,
            context=target.context,
            inexact=target.inexact_reason,
            defaults=defaults,
            eos_tokens=tuple(sorted(target.eos_tokens)),
            weight_bytes=target.weight_bytes,
            kv_bytes=0 if pool is None else pool.blocks * pool.block_bytes,
            state_bytes=0 if states is None else states.memory,
            snapshot_bytes=0 if states is None else states.shape.slot_bytes,
            activations=target.activations,
            kv_type=target.kv_type,
            weights=target.weights,
            head=self._head,
        )
        self.dealer.send(ready)

    def send_tokens(self, results: Sequence[StepResult], forward_ns: int, busy_ns: int, now_ns: int) -> None:
        """Send the tokens of a round. forward_ns: of this round's forward; busy_ns: of all so far."""
        if results:
            self.dealer.send(Emitted(tokens=tuple(_tokens(one, forward_ns, busy_ns, now_ns) for one in results)))

    def send_progress(self, reading: Sequence[tuple[Request, int]], costs: CostModel, most: int, now_ns: int) -> None:
        """Send how far each prompt is whose next chunk is not its last. reading: requests, and the tokens of their next
        chunks. most: maximum rows of a chunk.
        """
        prompts = []
        for request, count in reading:
            past, left = request.cache.length, request.read_to - request.cache.length
            if count < left and not request.has_answer:
                prompts.append(request.progress(now_ns, costs.reading_s(left, past, most)))
        if prompts:
            self.dealer.send(PromptsRead(prompts=tuple(prompts)))

    def refuse(self, number: int, error: BaseException) -> None:
        """End the request of that number with an error."""
        refused = isinstance(error, RequestError)
        where = "" if refused else f"request {number}: {type(error).__name__} in the target: "
        kind = type(error).__name__ if refused or isinstance(error, NotANumber) else "RequestFailed"
        self.dealer.send(Failed(request=number, kind=kind, text=where + first_line(error)))

    def beat(self, scheduler: Scheduler) -> bool:
        """Send a heartbeat if one is due. Returns whether it was."""
        now = time.perf_counter_ns()
        if now - self._beaten_ns <= HEARTBEAT_S * 1e9:
            return False
        self._beaten_ns = now
        pool = self.target.pool
        blocks, free = (0, 0) if pool is None else (pool.blocks, pool.free)
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        self.dealer.send(Heartbeat(running=running, waiting=waiting, held_blocks=blocks - free, blocks=blocks))
        return True


def _tokens(result: StepResult, forward_ns: int, busy_ns: int, now_ns: int) -> Tokens:
    request = result.request
    prompt_logprobs, request.prompt_logprobs = tuple(request.prompt_logprobs), []
    return Tokens(
        request=request.number,
        round=request.round,
        tokens=tuple(result.tokens),
        finish_reason=request.sampler.finish_reason,
        nodes=result.nodes,
        depth=result.depth,
        hit=result.hit,
        round_us=(now_ns - request.since_ns) // 1000,
        forward_us=forward_ns // 1000,
        draft_us=result.draft_us,
        busy_us=busy_ns // 1000,
        at_us=now_ns // 1000,
        sources=result.sources,
        logprobs=result.logprobs,
        prompt_logprobs=prompt_logprobs,
        cached=request.cached,
        queued_us=request.queued_us or 0,
    )
