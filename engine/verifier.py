"""The verifier worker: owns the target and every request's keys and values, and turns drafts into tokens.

One round: receive -> schedule -> run -> verify -> commit -> tell. All requests share a forward; without a drafter, or
when it is late, a request's tree is its root alone, which is plain decoding: the drafter decides speed, never text.
"""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import zmq
from torch import Tensor

from engine.answer import GRAMMAR
from engine.batch import BLOCK, Segment, Wanted
from engine.config import Config
from engine.cost_model import CostModel
from engine.errors import NotANumber, OutOfBlocks, ProtocolError, RequestError
from engine.logprobs import token_logprobs
from engine.matcher import Matcher, Matchers
from engine.messages import (
    Array,
    Cancel,
    Draft,
    Failed,
    Finish,
    Heartbeat,
    Hello,
    Ready,
    Start,
    Stop,
    Submit,
    TokenLogprob,
    Tokens,
    Verdict,
)
from engine.pace import Pace
from engine.recorded import wait
from engine.request import Request
from engine.sampling import not_applied, own_defaults
from engine.scheduler import Plan, Scheduler
from engine.target import Target, bfloat16_bits
from engine.text import load_tokenizer
from engine.trace import Trace
from engine.transport import Hub, Line
from engine.tree import GRAFT_CHANCE, TokenTree
from engine.verification import verify

FROM_FRONT_END = (Submit, Cancel, Stop)
FROM_DRAFTER = (Hello, Draft)
HEARTBEAT_S = 0.5
_GRAMMAR_S = 0.005  # between looks at whether a grammar has been read
_KEPT_DRAFTS = 64  # per request
_BESIDE = 8  # positions before the rows of a forward that is measured
_MEASURED_ROWS = 256  # of a forward, at most, whose time is measured at start-up


@dataclass(frozen=True)
class Round:
    """One request's part of a round. draft: number of the tree; drafted: the tree; kept: its nodes that are verified.

    draft_us: of a draft model. grafts: tokens that the verifier has added to the tree; own: nodes before it did.
    """

    request: Request
    draft: int
    drafted: TokenTree
    kept: Array
    draft_us: int
    grafts: list[int]
    own: int

    @cached_property
    def tree(self) -> TokenTree:
        """What is verified."""
        return self.drafted if len(self.kept) == len(self.drafted) else self.drafted.keep(self.kept)


@dataclass(frozen=True)
class Conclusion:
    """What came of a round for one request. path: accepted nodes of the tree drafted; tokens: emitted.

    features: [path, layers, hidden]; successors: [nodes drafted, k] int32. sources, logprobs: of the
    tokens. grafts: as of the round.
    """

    request: Request
    draft: int
    path: list[int]
    tokens: list[int]
    nodes: int
    depth: int = 0
    draft_us: int = 0
    features: Tensor | None = None
    successors: Array | None = None
    sources: tuple[int, ...] = (0,)
    logprobs: tuple[TokenLogprob, ...] = ()
    grafts: tuple[int, ...] = ()


def ready(target: Target) -> Ready:
    """What the front end is to know of the target."""
    own = target.model.generation_config
    if ignored := not_applied(own):
        print(
            f"talon: model={target.name}: of generation_config.json not applied: {', '.join(ignored)}", file=sys.stderr
        )
    return Ready(
        vocab_size=target.vocab_size,
        context=target.context,
        inexact=target.inexact,
        defaults=own_defaults(own, target.name),
    )


class Verifier:
    """The worker's loop and state. control: the line to the front end; drafts: the hub drafters connect to."""

    def __init__(self, config: Config, target: Target, control: Line, drafts: Hub, pace: Pace):
        self.config, self.target, self.control, self.drafts, self.pace = config, target, control, drafts, pace
        options = config.verifier
        self.trace = Trace(control, config.trace is not None)
        self.requests = Scheduler(options.max_running, options.prefill_chunk, options.draft_timeout_s)
        self.costs = CostModel({1: 1.0})
        self.drafter: str | None = None
        self.drafter_late = False
        self.wants = Hello()
        self.newcomers: list[tuple[str, Hello]] = []  # drafters to welcome between rounds
        self.matchers = Matchers(lambda: load_tokenizer(config.model), target.vocab_size, target.eos_tokens)
        self.unmatched: list[tuple[Submit, list[Array], Future[Matcher]]] = []  # requests whose grammar is being read
        self.busy_ns = 0
        self.ended_ns = 0  # when the latest round ended
        self.heard_ns = 0
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        self.costs = CostModel.measure(self._forward_s, self._most_rows())
        self.control.send(ready(self.target))
        poller = zmq.Poller()
        poller.register(self.control.socket, zmq.POLLIN)
        poller.register(self.drafts.socket, zmq.POLLIN)
        while not self.stopping:
            plan = self.requests.plan(time.perf_counter_ns(), self.costs, self._drafted(), self.pace.ahead)
            if plan:
                self._step(plan)
            else:
                patience_s = _GRAMMAR_S if self.unmatched else HEARTBEAT_S
                poller.poll(math.ceil(min(patience_s, plan.wait_s) * 1000))
            self._receive()
            self._beat()
        self.matchers.close()
        self.trace.flush()

    # The step, on one page.

    def _step(self, plan: Plan) -> None:
        """Run one forward over the trees and chunks of the plan, and tell everybody what came of it."""
        self._observe_wait(plan.decoding)
        rounds = self._rounds(plan.decoding)
        try:
            plan, rounds = self._reserve(plan, rounds)
        except OutOfBlocks as error:
            return self._fail(self.requests.running[0], error)
        segments = [Segment.of_tree(round_.tree, round_.request.cache) for round_ in rounds]
        segments += [self._chunk(request, count) for request, count in plan.reading]
        if not segments:
            return
        started = time.perf_counter_ns()
        try:
            logits, features = self.target.run(segments, self.wants.feature_layers)
        except Exception as error:  # exhausted memory, say
            return self._blame(plan, error)
        forward_ns = self._forward_ended(started, segments)
        if self.pace.ahead:
            self._hear_drafts()  # what was pushed meanwhile
        concluded = self._verify(rounds, logits, features)
        concluded += self._read(plan, segments[len(rounds) :], logits, features)
        self._measure(concluded, rounds, segments, forward_ns)
        self._tell(concluded, forward_ns)
        for conclusion in concluded:
            self._end_round(conclusion)

    def _reserve(self, plan: Plan, rounds: list[Round]) -> tuple[Plan, list[Round]]:
        """What of the plan there are blocks for. Drafts never decide whether a request fits: where the last one that
        runs has no room for its tree, its root goes alone. Raises OutOfBlocks if not even that fits.
        """
        rows = {round_.request: len(round_.kept) for round_ in rounds} | dict(plan.reading)
        try:
            plan = self.requests.reserve(plan, rows.__getitem__)
        except OutOfBlocks:
            last = self.requests.running[0]
            rounds = [replace(round_, kept=round_.kept[:1]) for round_ in rounds if round_.request is last]
            plan = Plan([round_.request for round_ in rounds], [part for part in plan.reading if part[0] is last])
            plan = self.requests.reserve(plan, lambda request: 1 if rounds else rows[request])
        return plan, [round_ for round_ in rounds if round_.request in plan.decoding]

    def _rounds(self, decoding: list[Request]) -> list[Round]:
        """The trees of all requests, cut together to the nodes that pay."""
        rounds = [self._round(request) for request in decoding]
        if self.config.verifier.cut and self.wants.calibrated and sum(len(r.kept) for r in rounds) > len(rounds):
            worths = [round_.request.trust.worth(round_.drafted)[round_.kept] for round_ in rounds]
            best = self._cut(worths, decoding)
            rounds = [replace(r, kept=r.kept[nodes]) for r, nodes in zip(rounds, best, strict=True)]
        return rounds

    def _round(self, request: Request) -> Round:
        """A request's tree, with what its grammar adds to it and without what that, or the request, rules out."""
        number, own, draft_us = self._tree(request)
        grafts = request.grafts(own)
        tree = own.grafted(grafts, GRAFT_CHANCE)
        return Round(request, number, tree, request.admitted(tree), draft_us, grafts, len(own))

    def _cut(self, worths: list[Array], decoding: list[Request]) -> list[Array]:
        """The nodes of each tree to verify: with every node its ancestors, since worth never grows along a path."""
        owner = np.repeat(np.arange(len(worths)), [len(worth) for worth in worths])
        node = np.concatenate([np.arange(len(worth)) for worth in worths])
        worth = np.concatenate(worths)
        order = np.argsort(np.where(node == 0, -np.inf, -worth), kind="stable")
        keys_each = sum(request.cache.length for request in decoding) / len(decoding)
        best = order[: self.costs.nodes_worth(worth[order], len(decoding), keys_each)]
        return [np.sort(node[best[owner[best] == i]]) for i in range(len(worths))]

    def _tree(self, request: Request) -> tuple[int, TokenTree, int]:
        """The draft to verify, its number and the draft model's microseconds; the root alone if there is none."""
        root = (0, TokenTree.root_only(request.text[-1]), 0)
        if (filed := request.drafts.get(request.outcome)) is None:
            return root
        draft, arrays = filed
        try:
            tree = TokenTree(*arrays).validate(self.target.vocab_size)
            if len(tree) > self.config.drafter.budget or tree.tokens[0] != draft.token:
                raise ProtocolError("draft is over the budget or does not continue its outcome")
        except ProtocolError:
            self.drafts.malformed += 1
            return root
        fits = len(request.text) + int(tree.depths.max()) <= self.target.context
        return (draft.draft, tree, draft.draft_us) if fits else root

    @staticmethod
    def _chunk(request: Request, count: int) -> Segment:
        start = request.cache.length
        last = start + count == request.read_to and not request.has_answer
        wanted: Wanted = "all" if request.reads_all else "last" if last else "none"
        return Segment.of_text(request.text[start : start + count], request.cache, wanted)

    def _verify(self, rounds: list[Round], logits: Tensor, features: Tensor | None) -> list[Conclusion]:
        """Walk down every tree, and commit the accepted paths to the texts."""
        concluded = []
        first = 0
        for round_ in rounds:
            request, tree, kept = round_.request, round_.tree, round_.kept
            rows, first = slice(first, first + len(tree)), first + len(tree)
            try:
                path, tokens = verify(tree, logits[rows], request.sampler)
            except Exception as error:  # logits that are not numbers
                self._fail(request, error)
                continue
            if not round_.grafts:
                worth = request.trust.worth(round_.drafted)
                request.trust.learn(float(worth[kept].sum()), len(tokens))
            request.round += 1
            request.kept_path = path
            successors = self._successors(logits[rows], kept, len(round_.drafted)) if self.wants.successors else None
            accepted = kept[path].tolist()
            sources = (GRAMMAR if node >= round_.own else int(round_.drafted.source[node]) for node in accepted[1:])
            concluded.append(
                Conclusion(
                    request,
                    round_.draft,
                    accepted,
                    tokens,
                    len(kept),
                    int(tree.depths.max()),
                    round_.draft_us,
                    None if features is None else features[rows][path],
                    successors,
                    (*sources, 0),
                    request.sampler.take_logprobs(),
                    tuple(round_.grafts),
                )
            )
        return concluded

    def _read(self, plan: Plan, chunks: list[Segment], logits: Tensor, features: Tensor | None) -> list[Conclusion]:
        """Commit what was read; behind the last of a prompt, draw the first token."""
        concluded = []
        row = (0 if features is None else len(features)) - sum(map(len, chunks))
        first = len(logits) - sum(chunk.wanted_rows for chunk in chunks)
        for (request, count), chunk in zip(plan.reading, chunks, strict=True):
            rows, first = logits[first : first + chunk.wanted_rows], first + chunk.wanted_rows
            if request.reads_all:
                behind = request.text[chunk.past + 1 : chunk.past + 1 + count]
                request.prompt_logprobs += token_logprobs(rows, behind, request.sampling.prompt_logprobs or 0)
            request.cache.commit(range(count))
            self._publish(request)
            if features is not None and not request.has_answer:
                request.features.append(bfloat16_bits(features[row : row + count]))
            row += count
            if request.reading or request.has_answer:
                request.asked_ns = time.perf_counter_ns()
                continue
            try:
                token = request.sampler.draw(request.sampler.choices(rows[-1:])[0])
            except Exception as error:
                self._fail(request, error)
            else:
                request.has_answer = True
                logprobs = request.sampler.take_logprobs()
                concluded.append(Conclusion(request, 0, [0], [token], count, logprobs=logprobs))
        return concluded

    def _successors(self, logits: Tensor, kept: Array, nodes: int) -> Array:
        """[nodes, successors] int32: the target's likeliest tokens behind every drafted node, -1 for those cut off."""
        ranked = np.full((nodes, self.wants.successors), -1, np.int32)
        ranked[kept] = logits.topk(self.wants.successors).indices.cpu().numpy()
        return ranked

    # What is told.

    def _tell(self, concluded: list[Conclusion], forward_ns: int) -> None:
        """First the drafter, who is waited for; then the front end."""
        now = time.perf_counter_ns()
        self.busy_ns += forward_ns
        hits = {}
        for conclusion in concluded:
            request = conclusion.request
            request.text.extend(conclusion.tokens)
            request.outcome = (request.round + 1, conclusion.draft, conclusion.path[-1], conclusion.tokens[-1])
            hits[request], request.hit, request.alone = request.hit, request.has_draft, False
        missing = [c.request for c in concluded if c.request.drafted and not c.request.hit]
        if missing and self._drafted() and not self.requests.waits(self.costs, len(missing), self.pace.ahead):
            for request in missing:
                request.alone = True
        for conclusion in concluded:
            if conclusion.request.drafted and conclusion.request.sampler.finish_reason is None:
                self._tell_drafter(conclusion)
        for conclusion in concluded:
            request = conclusion.request
            request.drafts = {request.outcome: request.drafts[request.outcome]} if request.hit else {}
            self._tell_front_end(conclusion, hits[request], forward_ns, now)
            request.since_ns = request.asked_ns = now

    def _tell_drafter(self, conclusion: Conclusion) -> None:
        if self.drafter is None:
            return
        request = conclusion.request
        if conclusion.features is not None:
            request.features.append(bfloat16_bits(conclusion.features))
        waiting, request.features = request.features or [np.zeros((0, 0, 0), np.uint16)], []
        features = waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
        verdict = Verdict(
            request=request.number,
            round=request.round,
            draft=conclusion.draft,
            following=request.drafts[request.outcome][0].draft if request.hit else 0,
            ahead=self.pace.ahead,
            alone=request.alone,
        )
        successors = np.zeros((0, 0), np.int32) if conclusion.successors is None else conclusion.successors
        grafts = np.asarray(conclusion.grafts, np.int32)
        arrays = [np.asarray(conclusion.path), np.asarray(conclusion.tokens), features, successors, grafts]
        self.drafts.send(self.drafter, verdict, arrays)

    def _tell_front_end(self, conclusion: Conclusion, hit: bool, forward_ns: int, now_ns: int) -> None:
        request = conclusion.request
        tokens = Tokens(
            request=request.number,
            round=request.round,
            tokens=tuple(conclusion.tokens),
            finish_reason=request.sampler.finish_reason,
            nodes=conclusion.nodes,
            depth=conclusion.depth,
            hit=hit,
            round_us=(now_ns - request.since_ns) // 1000,
            forward_us=forward_ns // 1000,
            draft_us=conclusion.draft_us,
            busy_us=self.busy_ns // 1000,
            at_us=now_ns // 1000,
            sources=conclusion.sources,
            logprobs=conclusion.logprobs,
            prompt_logprobs=tuple(request.prompt_logprobs),
            cached=request.cached,
        )
        request.prompt_logprobs = []
        self.control.send(tokens)

    def _end_round(self, conclusion: Conclusion) -> None:
        """Last, when the drafter is at work already: keep the accepted path's keys and values, or let go of all."""
        request = conclusion.request
        if request.sampler.finish_reason is not None:
            return self._forget(request)
        if request.round:
            request.cache.commit(request.kept_path)
            self._publish(request)

    def _publish(self, request: Request) -> None:
        """Let others find what was committed."""
        if self.requests.shares_prefixes and self.target.pool is not None:
            request.cache.publish(request.text)

    # What it costs.

    def _measure(
        self, concluded: list[Conclusion], rounds: list[Round], segments: list[Segment], forward_ns: int
    ) -> None:
        now, forward_s = time.perf_counter_ns(), forward_ns / 1e9
        rows = sum(map(len, segments))
        self.costs.observe_forward(rows, sum(len(s) * s.past for s in segments), forward_s)
        since, self.ended_ns = self.ended_ns, now
        decoded = [conclusion for conclusion in concluded if conclusion.request.round]
        if len(segments) > len(rounds) or not decoded or len(decoded) < len(rounds):
            return
        tokens, round_s = sum(len(c.tokens) for c in decoded), (now - since) / 1e9
        if self.drafter is not None and (asked := sum(r.request.drafted and not r.request.alone for r in rounds)):
            self.costs.observe_drafts(asked, len(rounds), rows, tokens)
        if all(conclusion.request.round > 1 for conclusion in decoded):
            self.costs.observe_round(len(rounds), rows, tokens, round_s - forward_s)
        request = decoded[0].request
        alone = len(rounds) == 1 and self.drafter is not None and request.drafted and request.round > 1
        if alone and self.pace.observe(tokens, round_s, forward_s):
            torch.set_num_threads(self.pace.threads)

    def _observe_wait(self, decoding: list[Request]) -> None:
        """The round begins: learn how long its drafts were waited for, unless a prompt was read meanwhile."""
        asked_ns = [r.asked_ns for r in decoding if r.drafted and not (r.hit or r.alone)]
        if self.drafter is not None and asked_ns and min(asked_ns) >= self.ended_ns:
            self.costs.observe_wait((time.perf_counter_ns() - min(asked_ns)) / 1e9)

    def _forward_ended(self, started_ns: int, segments: list[Segment]) -> int:
        """Nanoseconds of a forward, the simulated accelerator's included."""
        wait(self.target.device)
        if self.config.verifier.simulated_latency_ms:
            time.sleep(self.config.verifier.simulated_latency_ms / 1000)
        name = "verify" if segments[0].tree is not None else "prefill"
        self.trace.span(name, started_ns, 0, f"{sum(map(len, segments))} tokens of {len(segments)} requests")
        return time.perf_counter_ns() - started_ns

    def _most_rows(self) -> int:
        """Of the forwards to measure."""
        drafted = 1 if self.config.method == "none" else self.config.drafter.budget
        room = _MEASURED_ROWS if self.target.pool is None else self.target.pool.blocks * BLOCK - _BESIDE
        return max(2, min(_MEASURED_ROWS, room, drafted * self.config.verifier.max_running))

    def _forward_s(self, rows: int, past: int) -> float:
        """Seconds of a forward over a tree of so many nodes behind a text of that length."""
        past = min(past + _BESIDE, self.target.context // 2)
        if self.target.pool is not None:
            past = max(1, min(past, self.target.pool.blocks * BLOCK - rows))
        cache = self.target.new_cache(rows + past)
        self.target.prefill(cache, [i % self.target.vocab_size for i in range(past)])
        started = time.perf_counter()
        self.target.run([Segment.of_tree(TokenTree.chain(0, [0] * (rows - 1), [1.0] * (rows - 1)), cache)])
        wait(self.target.device)
        self.target.release(cache)
        return time.perf_counter() - started + self.config.verifier.simulated_latency_ms / 1000

    # What arrives.

    def _drafted(self) -> bool:
        """Whether there is a drafter to wait for."""
        if self.drafter is not None and not self.drafter_late:
            running = (r for r in self.requests.running if r.drafted and r.has_answer)
            waiting = (r for r in running if not (r.reading or r.has_draft))
            oldest = min((request.asked_ns for request in waiting), default=None)
            limit_ns = self.config.verifier.draft_timeout_s * 1e9
            self.drafter_late = oldest is not None and time.perf_counter_ns() - oldest > limit_ns
        return self.drafter is not None and not self.drafter_late

    def _receive(self) -> None:
        for message, arrays in self.control.received():
            if isinstance(message, Submit):
                self._admit(message, arrays)
            elif isinstance(message, Cancel):
                self.unmatched = [entry for entry in self.unmatched if entry[0].request != message.request]
                if (request := self.requests.find(message.request)) is not None:
                    self._forget(request)
            else:
                self.stopping = True
        self._admit_matched()
        self._hear_drafts()
        for peer, hello in self.newcomers:
            self._welcome(peer, hello)
        self.newcomers.clear()

    def _hear_drafts(self) -> None:
        for peer, message, arrays in self.drafts.received():
            if isinstance(message, Hello):
                self.newcomers.append((peer, message))
            elif peer == self.drafter:
                self.drafter_late = False
                self._keep(message, arrays)

    def _admit(self, message: Submit, arrays: list[Array]) -> None:
        grammar = message.sampling.grammar
        if grammar is None:
            return self._queue(message, arrays, None)
        self.unmatched.append((message, arrays, self.matchers.begin(grammar, arrays[1].tolist())))

    def _admit_matched(self) -> None:
        """Let those in whose grammar has been read."""
        waiting, self.unmatched = self.unmatched, []
        for message, arrays, future in waiting:
            if not future.done():
                self.unmatched.append((message, arrays, future))
            elif (error := future.exception()) is not None:
                self._refuse(message.request, error)
            else:
                self._queue(message, arrays, future.result())

    def _queue(self, message: Submit, arrays: list[Array], matcher: Matcher | None) -> None:
        prompt, answer = (array.tolist() for array in arrays)
        try:
            if not prompt or min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
                raise ProtocolError(f"a prompt of token ids from 0 to {self.target.vocab_size - 1} was expected")
            room = self.config.drafter.budget
            request = Request(message.request, prompt, answer, message.sampling, self.target, room, matcher)
        except Exception as error:  # whatever one request brings, the others go on
            return self._refuse(message.request, error)
        self.requests.waiting.append(request)
        self._introduce(request)

    def _introduce(self, request: Request) -> None:
        """Tell the drafter of a request and its text so far."""
        if self.drafter is None or not request.drafted:
            return
        round_ = request.round + 1 if request.has_answer else 0
        start = Start(request=request.number, round=round_, sampling=request.sampling)
        self.drafts.send(self.drafter, start, [np.asarray(request.text)])

    def _welcome(self, peer: str, hello: Hello) -> None:
        """A drafter joins: it learns of every request, and drafts from the text so far."""
        layers_exist = all(0 <= layer <= self.target.layers for layer in hello.feature_layers)
        if not (layers_exist and 0 <= hello.successors <= self.target.vocab_size):
            self.drafts.malformed += 1
            return
        self.drafter, self.drafter_late, self.wants = peer, False, hello
        self.requests.shares_prefixes = not hello.feature_layers  # what is shared is not read, so it has no features
        for request in self.requests:
            request.drafts, request.alone, request.asked_ns = {}, False, time.perf_counter_ns()
            request.outcome = (request.round + 1 if request.has_answer else 0, 0, 0, request.text[-1])
            self._introduce(request)

    def _keep(self, message: Draft, arrays: list[Array]) -> None:
        """File a draft under the outcome it is for; what is for an earlier round, or unknown, is dropped.

        Most drafts made ahead are never used, so a tree is looked at when its outcome has come true.
        """
        request = self.requests.find(message.request)
        if request is None or message.round <= request.round or len(request.drafts) >= _KEPT_DRAFTS:
            return
        if message.draft < 1:
            self.drafts.malformed += 1
            return
        outcome = (message.round, message.parent, message.node, message.token)
        if not (request.alone and outcome == request.outcome):  # too late: the drafter was told of the root alone
            request.drafts[outcome] = (message, arrays)

    # When something fails.

    def _blame(self, plan: Plan, error: Exception) -> None:
        """A forward failed: find out whose part of it does so alone, and end those requests only."""
        members = [*plan.decoding, *(request for request, _ in plan.reading)]
        if len(members) == 1:
            return self._fail(members[0], error)
        for request in members:
            alone = Plan([request] if request in plan.decoding else [], [p for p in plan.reading if p[0] is request])
            if request in self.requests.running:  # not preempted, nor failed, by the step of one before it
                self._step(alone)

    def _fail(self, request: Request, error: Exception) -> None:
        self._refuse(request.number, error)
        self._forget(request)

    def _refuse(self, number: int, error: BaseException) -> None:
        reason = (str(error) or "no reason given").splitlines()[0]
        refused = isinstance(error, RequestError)
        text = reason if refused else f"request {number}: {type(error).__name__} in the target: {reason}"
        kind = type(error).__name__ if refused or isinstance(error, NotANumber) else "RequestFailed"
        self.control.send(Failed(request=number, kind=kind, text=text))

    def _forget(self, request: Request) -> None:
        self.requests.remove(request)
        self.target.release(request.cache)
        if self.drafter is not None:
            self.drafts.send(self.drafter, Finish(request=request.number))

    def _beat(self) -> None:
        now = time.perf_counter_ns()
        if now - self.heard_ns > HEARTBEAT_S * 1e9:
            self.heard_ns = now
            pool = self.target.pool
            running, waiting = len(self.requests.running), len(self.requests.waiting)
            blocks, free = (0, 0) if pool is None else (pool.blocks, pool.free)
            self.control.send(Heartbeat(running=running, waiting=waiting, held_blocks=blocks - free, blocks=blocks))
            self.drafts.restore()
            self.trace.flush()
