"""The verifier worker: owns the target and every request's keys and values, and turns drafts into tokens.

One round: receive -> schedule -> run -> verify -> tell -> commit. All requests share a forward; without a drafter, or
when it is late, a request's tree is its root alone, which is plain decoding: the drafter decides speed, never text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
import zmq

from engine.config import Config
from engine.core.batch import Segment
from engine.core.drafter_protocol import OnItsWay
from engine.core.errors import OutOfBlocks, StateLost
from engine.core.methods import METHODS
from engine.model.target import Target
from engine.placement import Threads
from engine.verifier.ahead import Ahead
from engine.verifier.drafter_link import FROM_DRAFTER, DrafterLink
from engine.verifier.forward_output import Output
from engine.verifier.front_end_link import FROM_FRONT_END, FrontEndLink
from engine.verifier.request import Request
from engine.verifier.round_timer import RoundTimer
from engine.verifier.scheduler import Plan, Scheduler
from engine.verifier.step import DeferredDraw, Step, StepResult, cut, deferred_draws
from engine.wire.loop_link import LoopRouter
from engine.wire.messages import Cancel
from engine.wire.trace import Trace
from engine.wire.transport import Dealer, Router

if TYPE_CHECKING:
    from engine.drafting.worker import DrafterWorker

__all__ = ["FROM_DRAFTER", "FROM_FRONT_END", "Verifier"]


class Verifier:
    """The worker's loop. control: the link to the front end; drafts: the router that drafters connect to.
    inline_drafter: one that takes turns with the verifier in this loop.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        control: Dealer,
        drafts: Router | LoopRouter,
        threads: Threads,
        inline_drafter: DrafterWorker | None = None,
    ):
        self.config, self.target = config, target
        options = config.verifier
        self.ahead = Ahead(target)
        self.scheduler = Scheduler(options.max_running, options.prefill_chunk, options.draft_timeout_s)
        self.front_end = FrontEndLink(control, target, config)
        self.drafter_link = DrafterLink(drafts, target, self.scheduler, config)
        self.trace = Trace(control, config.trace is not None)
        self.timer = RoundTimer(config, target, threads, self.trace)
        self.method = METHODS[config.method]
        self.inline_drafter = inline_drafter
        self.stopping = False

    def run(self) -> None:
        """Serve until the front end stops it."""
        self.timer.measure()
        self.target.capture(())
        self.front_end.send_ready()
        poller = zmq.Poller()
        for socket in (self.front_end.dealer.socket, self.drafter_link.router.socket):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while not self.stopping:
            if plan := self._plan():
                self._step(plan)
            else:
                poller.poll(math.ceil(min(self.front_end.patience_s, plan.wait_s) * 1000))
            if self.inline_drafter is not None:
                self.inline_drafter.turn()
            self._receive()
            self._beat()
        self.front_end.close()
        self._flush()

    # The round, on one page.

    def _receive(self) -> None:
        self.drafter_link.receive()  # one that says Hello is told of each request once
        for arrival in self.front_end.received():
            if isinstance(arrival, Request):
                self.scheduler.waiting.append(arrival)
                self.drafter_link.introduce(arrival)
            elif isinstance(arrival, Cancel):
                if (request := self.scheduler.find(arrival.request)) is not None:
                    self._forget(request)
            else:
                self.stopping = True

    def _plan(self) -> Plan:
        return self.scheduler.plan(time.perf_counter_ns(), self.timer.costs, self.drafter_link.present)

    def _step(self, plan: Plan) -> None:
        """Run one forward over the trees and chunks of the plan: schedule, run, verify, tell, commit."""
        if self.drafter_link.peer is not None:
            self.timer.observe_wait(plan.decoding)
        steps = self._steps(plan.decoding)
        try:
            plan, steps = self._reserve(plan, steps)
        except OutOfBlocks as error:
            return self._fail(self.scheduler.running[0], error)
        trees = [Segment.of_tree(step.tree, step.request.cache) for step in steps]
        chunks = [request.chunk(count) for request, count in plan.reading]
        if not (trees or chunks):
            return
        started_ns = time.perf_counter_ns()
        self.front_end.send_progress(plan.reading, self.timer.costs, self.scheduler.prefill_chunk, started_ns)
        readers, wants = [request for request, _ in plan.reading], self.drafter_link.wants
        try:
            rows = self.ahead.run([*trees, *chunks], wants.feature_layers)
            output, draws = deferred_draws(
                steps, readers, chunks, *rows, wants.successors, self.target.pool, self.drafter_link.router.in_process
            )
            if not (chunks or any(map(self._may_draft, plan.decoding))):
                self.ahead.launch(plan.decoding, output, wants.feature_layers)
            behind = self._draft_behind(plan.decoding, output)
        except (torch.AcceleratorError, StateLost):
            raise  # the device's or the requests' state is lost: this worker ends, and the next one continues
        except Exception as error:  # exhausted memory, say
            return self._blame(plan, error)
        self.timer.end_forward(started_ns, [*trees, *chunks], output, self.ahead.queued, behind)
        if self.timer.costs.drafting_ahead:
            self.drafter_link.poll()  # drafts that arrived meanwhile
        results = self._draw_and_tell_drafter(plan, steps, draws)
        self.timer.observe_round(results, steps, [*trees, *chunks], self.drafter_link)
        self._tell_front_end(results)
        self._commit(plan.members)

    def _steps(self, decoding: list[Request]) -> list[Step]:
        """Take the trees of all requests, cut together to the nodes that pay."""
        steps = [self.drafter_link.step_of(request) for request in decoding]
        cuts = self.config.verifier.cut and self.drafter_link.wants.calibrated
        return cut(steps, self.timer.costs) if cuts else steps

    def _may_draft(self, request: Request) -> bool:
        """Return whether its next tree may be more than its root, as far as is known before this round is read."""
        drafted = self.drafter_link.peer is not None and request.wants_draft and not request.root_only
        return drafted or request.matcher is not None

    def _draft_behind(self, decoding: list[Request], output: Output) -> OnItsWay | None:
        """Let a drafter in this loop draft for what the round comes to before the host knows it: all is in one queue,
        and waited for once. Returns what it sends.
        """
        if self.inline_drafter is None or (verdicts := output.on_device) is None:
            return None
        trees = {
            request.number: tree
            for tree, request in enumerate(decoding)
            if self._may_draft(request) and request.left > 1
        }
        return self.inline_drafter.draft_behind(trees, verdicts)

    def _reserve(self, plan: Plan, steps: list[Step]) -> tuple[Plan, list[Step]]:
        """Return the part of the plan that there are blocks for. Roots and chunks get blocks first, so drafts never
        decide who takes part; trees are cut to the blocks that are left, the oldest request's first. Raises OutOfBlocks
        if one request is left and its root or chunk does not fit.
        """
        chunks = dict(plan.reading)
        plan = self.scheduler.reserve(plan, lambda request: chunks.get(request, 1))
        staying = [step for step in steps if step.request in plan.decoding]
        return plan, [step.best(self.scheduler.reserve_rows(step.request, len(step.kept))) for step in staying]

    def _draw_and_tell_drafter(
        self, plan: Plan, steps: Sequence[Step], draws: Sequence[DeferredDraw]
    ) -> list[StepResult]:
        """Draw each request's tokens, and send the verdict at once: retrieval drafts for one request while the next
        tree is walked down. But a model drafts for all of them in one forward, and gets all verdicts together.
        """
        together = self.method.has_model and not all(request.choice.rests for request in plan.members)
        missing = sum(request.wants_draft for request in plan.decoding)
        results = []
        for request, draw, step in zip_longest(plan.members, draws, steps):
            if (result := self._draw(request, draw)) is not None:
                results.append(result)
                if step is not None:  # a tree was verified, and not a prompt read
                    self.timer.observe_draft(step, result, self.drafter_link)
                if not together:
                    self._tell_drafter(result, len(plan.members), missing)
        if together:
            missing = sum(one.request.wants_draft and not one.request.hit for one in results)
            for result in results:
                self._tell_drafter(result, len(results), missing)
        return results

    def _draw(self, request: Request, draw: DeferredDraw) -> StepResult | None:
        """Return what the round came to for one request; None if it only read, or failed, which ends it alone."""
        try:
            return draw()
        except torch.AcceleratorError:
            raise  # as in `_step`
        except Exception as error:  # logits that are not numbers
            self._fail(request, error)
            return None

    def _tell_drafter(self, result: StepResult, requests: int, missing: int) -> None:
        """Decide which drafts the request gets, and send the verdict, if there is anyone to draft. missing: how many of
        the round's requests have no tree yet.
        """
        request, costs = result.request, self.timer.costs
        if not request.wants_draft or request.sampler.finish_reason is not None:
            return
        waiting = max(1, missing) if costs.drafting_ahead and not request.hit else 0
        request.choice.decide(self.drafter_link.kinds, costs, requests, len(result.tokens), request.left, waiting)
        request.choose_root_only(request.choice.root_only and self.drafter_link.present)
        if not (request.root_only and request.choice.rests and not self.method.merges):
            self.drafter_link.send_verdict(result, costs, requests)

    def _tell_front_end(self, results: list[StepResult]) -> None:
        now_ns = time.perf_counter_ns()
        self.front_end.send_tokens(results, self.timer.forward_ns, self.timer.busy_ns, now_ns)
        for result in results:
            result.request.end_round(now_ns)

    def _commit(self, requests: Sequence[Request]) -> None:
        """Keep the keys and values of what was read or accepted, also for an answer that ends here: whoever sends its
        text again finds them. Done last, while the drafter already works.
        """
        running = [request for request in requests if request in self.scheduler.running]  # the others have failed
        self.target.commit([(request.cache, request.rows_kept) for request in running])
        for request in running:
            request.share_blocks()
            request.trim_cache()
            if request.sampler.finish_reason is not None:
                self._forget(request)

    def _beat(self) -> None:
        if self.front_end.beat(self.scheduler):
            self.drafter_link.router.restore()
            self._flush()

    def _flush(self) -> None:
        self.trace.flush()
        if self.inline_drafter is not None:
            self.inline_drafter.trace.flush()

    # When a request ends, or something fails.

    def _blame(self, plan: Plan, error: Exception) -> None:
        """Find out whom a failed forward is to blame on: run each request's part alone, and end only the requests that
        fail.
        """
        members = plan.members
        if len(members) == 1:
            return self._fail(members[0], error)
        for request in members:
            if request in self.scheduler.running:  # not preempted or failed by the step of an earlier one
                self._step(plan.of(request))

    def _fail(self, request: Request, error: Exception) -> None:
        self.front_end.refuse(request.number, error)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.target.release(request.cache)
        self.drafter_link.finish(request)
