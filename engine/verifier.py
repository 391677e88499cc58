"""The verifier worker: owns the target and every request's KV cache, and turns drafts into tokens.

Requests are served in turns, one prefill chunk or one round each. A round starts as soon as its tree is there; while
one request waits for its tree another is served. Without a drafter, or when it is late, a round verifies the root
alone, which is plain decoding: the drafter decides speed, never text.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch
import zmq
from torch import Tensor

from engine.budget import Budget, CostCurve
from engine.config import Config
from engine.decoding import Decoding, Round
from engine.errors import NotANumber, ProtocolError
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
    Tokens,
    Verdict,
)
from engine.pace import Choice, Pace
from engine.recorded import wait
from engine.target import Target, bfloat16_bits
from engine.trace import Trace
from engine.transport import Hub, Line
from engine.tree import TokenTree
from engine.verification import verify

FROM_FRONT_END = (Submit, Cancel, Stop)
FROM_DRAFTER = (Hello, Draft)
HEARTBEAT_S = 0.5
_KEPT_DRAFTS = 64  # per request; drafts of outcomes that did not come true are dropped every round


class Verifier:
    """The worker's loop and state. control: the line to the front end; drafts: the hub drafters connect to."""

    def __init__(self, config: Config, target: Target, control: Line, drafts: Hub, pace: Pace):
        self.config, self.target, self.control, self.drafts, self.pace = config, target, control, drafts, pace
        self.trace = Trace(control, config.trace is not None)
        self.waiting: deque[Decoding] = deque()
        self.running: deque[Decoding] = deque()
        self.newcomers: list[tuple[str, Hello]] = []  # drafters to welcome between rounds
        self.drafter: str | None = None
        self.drafter_late = False
        self.feature_layers: tuple[int, ...] = ()
        self.successors = 0
        self.calibrated = False
        self.budget: Budget | None = None
        self.misses = Choice(tried=8, retried=32, kept=0.98)  # to wait for a draft, or to verify the root alone
        self.busy_ns = 0
        self.heard_ns = 0
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        if self.config.verifier.cut and self.config.method != "none":
            self.budget = Budget(CostCurve.measure(self._forward_s, self.config.drafter.budget))
        self.control.send(
            Ready(vocab_size=self.target.vocab_size, context=self.target.context, inexact=self.target.inexact)
        )
        poller = zmq.Poller()
        poller.register(self.control.socket, zmq.POLLIN)
        poller.register(self.drafts.socket, zmq.POLLIN)
        while not self.stopping:
            decoding = self._next()
            if decoding is None:
                poller.poll(self._patience_ms())
            else:
                self._advance(decoding)
            self._receive()
            self._beat()
        self.trace.flush()

    def _forward_s(self, nodes: int) -> float:
        """Seconds of a forward over a tree of so many nodes behind a short text."""
        cache = self.target.new_cache(nodes + 8)
        self.target.prefill(cache, list(range(min(8, self.target.vocab_size))))
        started = time.perf_counter()
        self.target.verify(cache, TokenTree.chain(0, [0] * (nodes - 1), [1.0] * (nodes - 1)))
        wait(self.target.device)
        self.target.release(cache)
        return time.perf_counter() - started + self.config.verifier.simulated_latency_ms / 1000

    def _advance(self, decoding: Decoding) -> None:
        try:
            if decoding.unread:
                self._prefill(decoding)
            else:
                self._round(decoding)
        except Exception as error:  # exhausted memory, a logit that is no number: the others go on
            reason = (str(error) or "no reason given").splitlines()[0]
            text = f"request {decoding.request}: {type(error).__name__} in the target: {reason}"
            kind = "NotANumber" if isinstance(error, NotANumber) else "RequestFailed"
            self.control.send(Failed(request=decoding.request, kind=kind, text=text))
            self._forget(decoding)

    # The step, on one page.

    def _round(self, decoding: Decoding) -> None:
        """Propose, verify, commit."""
        draft, tree, draft_us = self._tree(decoding)
        worth = decoding.trust.worth(tree)
        kept = self.budget.keep(worth) if self.budget is not None and self.calibrated else np.arange(len(tree))
        verified = tree.keep(kept) if len(kept) < len(tree) else tree
        started = time.perf_counter_ns()
        logits, features = self.target.verify(decoding.cache, verified, self.feature_layers)
        forward_ns = self._forward_ended("verify", started, decoding, len(kept))
        if self.pace.ahead:
            self._hear_drafts()  # what was pushed meanwhile
        path, tokens = verify(verified, logits, decoding.sampler)
        decoding.trust.learn(float(worth[kept].sum()), len(tokens))
        decoding.round += 1
        features = None if features is None else features[path]
        successors = self._successors(logits, kept, len(tree)) if self.successors else None
        accepted, depth = kept[path].tolist(), int(verified.depths.max())
        round_ = Round(draft, accepted, tokens, len(kept), forward_ns, draft_us, features, successors, depth)
        self._conclude(decoding, round_)
        if decoding.sampler.finish_reason is None:
            decoding.cache.commit(path)  # last: by now the drafter is at work

    def _successors(self, logits: Tensor, kept: Array, nodes: int) -> Array:
        """[nodes, successors] int32: the target's likeliest tokens behind every drafted node, -1 for those cut off."""
        ranked = np.full((nodes, self.successors), -1, np.int32)
        ranked[kept] = logits.topk(self.successors).indices.cpu().numpy()
        return ranked

    def _tree(self, decoding: Decoding) -> tuple[int, TokenTree, int]:
        """The draft to verify, its number and the draft model's microseconds; the root alone if there is none."""
        root = (0, TokenTree.root_only(decoding.text[-1]), 0)
        if (filed := decoding.drafts.get(decoding.outcome)) is None:
            return root
        draft, arrays = filed
        try:
            tree = TokenTree(*arrays).validate(self.target.vocab_size)
            if len(tree) > self.config.drafter.budget or tree.tokens[0] != draft.token:
                raise ProtocolError("draft is over the budget or does not continue its outcome")
        except ProtocolError:
            self.drafts.malformed += 1
            return root
        fits = len(decoding.text) + int(tree.depths.max()) <= self.target.context
        return (draft.draft, tree, draft.draft_us) if fits else root

    def _forward_ended(self, name: str, started_ns: int, decoding: Decoding, nodes: int) -> int:
        """Nanoseconds of a forward, the simulated accelerator's included."""
        wait(self.target.device)
        if self.config.verifier.simulated_latency_ms:
            time.sleep(self.config.verifier.simulated_latency_ms / 1000)
        self.trace.span(name, started_ns, decoding.request, f"{nodes} tokens")
        return time.perf_counter_ns() - started_ns

    def _prefill(self, decoding: Decoding) -> None:
        """Read one chunk of the prompt; behind the last, draw the first token."""
        chunk = decoding.unread[: self.config.verifier.prefill_chunk]
        decoding.unread = decoding.unread[len(chunk) :]
        started = time.perf_counter_ns()
        logits, features = self.target.prefill(decoding.cache, chunk, self.feature_layers)
        forward_ns = self._forward_ended("prefill", started, decoding, len(chunk))
        if features is not None:
            decoding.features.append(bfloat16_bits(features))
        if decoding.unread:
            self.busy_ns += forward_ns
            return
        token = decoding.sampler.draw(decoding.sampler.choices(logits[None])[0])
        self._conclude(decoding, Round(0, [0], [token], len(chunk), forward_ns))

    def _conclude(self, decoding: Decoding, round_: Round) -> None:
        """Commit the verdict to the text, and tell the drafter and the front end."""
        now = time.perf_counter_ns()
        self._measure(decoding, round_, now)  # first: what is decided below is for the next round
        decoding.text.extend(round_.tokens)
        decoding.outcome = (decoding.round + 1, round_.draft, round_.path[-1], round_.tokens[-1])
        hit, decoding.hit = decoding.hit, decoding.outcome in decoding.drafts
        decoding.alone = not decoding.hit and self._goes_alone()
        self.busy_ns += round_.forward_ns
        if self.drafter is not None and decoding.sampler.finish_reason is None:
            self._tell_drafter(decoding, round_)
        decoding.drafts = {decoding.outcome: decoding.drafts[decoding.outcome]} if decoding.hit else {}
        self._tell_front_end(decoding, round_, hit, now)
        decoding.since_ns = now
        decoding.deadline_ns = now + int(self.config.verifier.draft_timeout_s * 1e9)
        if decoding.sampler.finish_reason is not None:
            self._forget(decoding)

    def _tell_drafter(self, decoding: Decoding, round_: Round) -> None:
        assert self.drafter is not None
        if round_.features is not None:
            decoding.features.append(bfloat16_bits(round_.features))
        waiting, decoding.features = decoding.features or [np.zeros((0, 0, 0), np.uint16)], []
        features = waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
        verdict = Verdict(
            request=decoding.request,
            round=decoding.round,
            draft=round_.draft,
            following=decoding.drafts[decoding.outcome][0].draft if decoding.hit else 0,
            ahead=self.pace.ahead,
            alone=decoding.alone,
        )
        successors = np.zeros((0, 0), np.int32) if round_.successors is None else round_.successors
        arrays = [np.asarray(round_.path), np.asarray(round_.tokens), features, successors]
        self.drafts.send(self.drafter, verdict, arrays)

    def _tell_front_end(self, decoding: Decoding, round_: Round, hit: bool, now_ns: int) -> None:
        tokens = Tokens(
            request=decoding.request,
            round=decoding.round,
            tokens=tuple(round_.tokens),
            finish_reason=decoding.sampler.finish_reason,
            nodes=round_.nodes,
            depth=round_.depth,
            hit=hit,
            round_us=(now_ns - decoding.since_ns) // 1000,
            forward_us=round_.forward_ns // 1000,
            draft_us=round_.draft_us,
            busy_us=self.busy_ns // 1000,
            at_us=now_ns // 1000,
        )
        self.control.send(tokens)

    def _measure(self, decoding: Decoding, round_: Round, now_ns: int) -> None:
        """What the round cost, for the tree's budget and the pace; one request alone shows its own costs."""
        if decoding.round == 0 or len(self.running) > 1:
            return
        round_s = (now_ns - decoding.since_ns) / 1e9
        if self.budget is not None:
            self.budget.observe(round_.nodes, len(round_.tokens), round_.forward_ns / 1e9, round_s)
        if self.drafter is None:
            return
        if self.pace.ahead:
            self.misses.observe(len(round_.tokens), round_s)
        if self.pace.observe(len(round_.tokens), round_s, round_.forward_ns / 1e9):
            torch.set_num_threads(self.pace.threads)

    # Whose turn it is.

    def _next(self) -> Decoding | None:
        """The request whose turn it is, if one can go on."""
        while self.waiting and len(self.running) < self.config.verifier.max_running:
            self.running.append(self.waiting.popleft())
        for decoding in self.running:
            if decoding.unread or not self._awaits_draft(decoding):
                self.running.remove(decoding)
                self.running.append(decoding)
                return decoding
        return None

    def _goes_alone(self) -> bool:
        """Whether to verify the root alone when no draft is there. Beside other requests waiting costs nothing."""
        lonely = len(self.running) == 1 and not self.waiting
        return self.pace.ahead and self.drafter is not None and lonely and self.misses.decide()

    def _awaits_draft(self, decoding: Decoding) -> bool:
        if self.drafter is None or self.drafter_late or decoding.alone or decoding.outcome in decoding.drafts:
            return False
        if time.perf_counter_ns() > decoding.deadline_ns:
            self.drafter_late = True
        return not self.drafter_late

    def _patience_ms(self) -> int:
        """How long nothing but a message can change what is to be done."""
        deadlines = [d.deadline_ns - time.perf_counter_ns() for d in self.running]
        return min(int(HEARTBEAT_S * 1000), *(max(0, left // 1_000_000 + 1) for left in deadlines), 500)

    # What arrives.

    def _receive(self) -> None:
        for message, arrays in self.control.received():
            if isinstance(message, Submit):
                self._admit(message, arrays[0])
            elif isinstance(message, Cancel):
                for decoding in [d for d in (*self.running, *self.waiting) if d.request == message.request]:
                    self._forget(decoding)
            else:
                self.stopping = True
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

    def _admit(self, message: Submit, prompt: Array) -> None:
        decoding = Decoding(message.request, prompt.tolist(), message.sampling, self.target, self.config.drafter.budget)
        self.waiting.append(decoding)
        if self.drafter is not None:
            start = Start(request=message.request, round=0, sampling=message.sampling)
            self.drafts.send(self.drafter, start, [prompt])

    def _welcome(self, peer: str, hello: Hello) -> None:
        """A drafter joins: it learns of every request, and drafts from the text so far."""
        layers_exist = all(0 <= layer <= self.target.layers for layer in hello.feature_layers)
        if not (layers_exist and 0 <= hello.successors <= self.target.vocab_size):
            self.drafts.malformed += 1
            return
        self.drafter, self.drafter_late = peer, False
        self.feature_layers, self.successors = hello.feature_layers, hello.successors
        self.calibrated = hello.calibrated
        for decoding in (*self.running, *self.waiting):
            decoding.drafts, decoding.alone = {}, False
            round_ = 0 if decoding.unread else decoding.round + 1
            decoding.outcome = (round_, 0, 0, decoding.text[-1])
            start = Start(request=decoding.request, round=round_, sampling=decoding.sampling)
            self.drafts.send(peer, start, [np.asarray(decoding.text)])

    def _keep(self, message: Draft, arrays: list[Array]) -> None:
        """File a draft under the outcome it is for; what is for an earlier round, or unknown, is dropped.

        Most drafts made ahead are never used, so a tree is looked at when its outcome has come true.
        """
        decoding = next((d for d in self.running if d.request == message.request), None)
        if decoding is None or message.round <= decoding.round or len(decoding.drafts) >= _KEPT_DRAFTS:
            return
        if message.draft < 1:
            self.drafts.malformed += 1
            return
        outcome = (message.round, message.parent, message.node, message.token)
        if not (decoding.alone and outcome == decoding.outcome):  # too late: the drafter was told of the root alone
            decoding.drafts[outcome] = (message, arrays)

    def _forget(self, decoding: Decoding) -> None:
        for queue in (self.running, self.waiting):
            if decoding in queue:
                queue.remove(decoding)
        self.target.release(decoding.cache)
        if self.drafter is not None:
            self.drafts.send(self.drafter, Finish(request=decoding.request))

    def _beat(self) -> None:
        now = time.perf_counter_ns()
        if now - self.heard_ns > HEARTBEAT_S * 1e9:
            self.heard_ns = now
            self.control.send(Heartbeat())
            self.drafts.restore()
            self.trace.flush()
