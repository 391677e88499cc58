"""Decides which requests take part in the next forward: no I/O, no tensors, no clock of its own.

All decoding requests share each forward: eight rows cost little more than one, so leaving a request out saves nothing.
The only question is how long to wait for a missing tree. Prompts are read in chunks that join these forwards: half of
the rows go to the prompt that came first, which is therefore never starved, and half to those with the least left to
read, which therefore do not wait for a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.core.batch import BLOCK_SIZE
from engine.core.errors import OutOfBlocks
from engine.costs.cost_model import CostModel
from engine.model.kv_pool import BlockKey
from engine.verifier.request import Request


@dataclass(frozen=True)
class Plan:
    """What the next forward does. decoding: requests whose trees are verified; reading: requests and how many of their
    tokens are read.

    wait_s: if there is nothing to do, how long only a message can change that.
    """

    decoding: list[Request] = field(default_factory=list)
    reading: list[tuple[Request, int]] = field(default_factory=list)
    wait_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.decoding or self.reading)

    @property
    def members(self) -> list[Request]:
        """All requests that take part."""
        return [*self.decoding, *(request for request, _ in self.reading)]

    def of(self, request: Request) -> Plan:
        """Return the part of the plan that concerns one request."""
        return Plan([r for r in self.decoding if r is request], [part for part in self.reading if part[0] is request])


class Scheduler:
    """Holds the requests, and plans forwards.

    waiting: requests not admitted yet; running: the others, the oldest first.

    max_running: maximum requests that run at once; prefill_chunk: maximum prompt tokens read in one forward.
    needs_hidden_states: whether requests that are drafted for need the hidden states of blocks that they share.
    """

    def __init__(self, max_running: int, prefill_chunk: int, draft_timeout_s: float):
        self.max_running, self.prefill_chunk, self.draft_timeout_s = max_running, prefill_chunk, draft_timeout_s
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.needs_hidden_states = False
        # the prompt that came first gets half of an odd number of rows, so half a row may be owed to it
        self._half_row = 1

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def find(self, number: int) -> Request | None:
        """Return the request of that number."""
        return next((request for request in self if request.number == number), None)

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def plan(self, now_ns: int, costs: CostModel, drafter_ready: bool) -> Plan:
        """Return what to do now. drafter_ready: a drafter is present and responding."""
        self._admit(now_ns)
        self._match_prefixes(now_ns)
        decoding = [request for request in self.running if not request.reading]
        missing = [r for r in decoding if drafter_ready and r.wants_draft and not r.root_only and not r.has_draft]
        read = sum(request.cache.length for request in decoding)
        past = max((request.cache.length for request in self.running if request.reading), default=0)
        if missing:
            lonely = len(decoding) == 1 and not costs.drafting_ahead
            patience_s = self.draft_timeout_s if lonely else min(self.draft_timeout_s, costs.patience_s())
            left_s = max(patience_s - (now_ns - request.waiting_since_ns) / 1e9 for request in missing)
            if left_s > 0:
                meanwhile = costs.rows_while_waiting(patience_s - left_s, self.prefill_chunk, past)
                if len(missing) == len(decoding) and (reading := self._chunks(meanwhile)):
                    return Plan(reading=reading)
                return Plan(wait_s=left_s)
        readers = len(self.running) - len(decoding)
        reading = self._chunks(costs.chunk_rows(len(decoding), self.prefill_chunk, read, past)) if readers else []
        return Plan(decoding, reading) if decoding or reading else Plan(wait_s=self.draft_timeout_s)

    def reserve(self, plan: Plan, rows: Callable[[Request], int]) -> Plan:
        """Return the plan with blocks reserved for it. If there are too few, the youngest request is preempted and
        waits.

        rows: of a request in this forward. Raises OutOfBlocks if one request alone does not fit.
        """
        members = plan.members
        if members[0].target.pool is None:  # a cache of its own for each request
            return plan
        for request in sorted(members, key=self.running.index):
            while request in self.running:
                try:
                    request.cache.reserve(request.cache.length + rows(request))
                    break
                except OutOfBlocks:
                    if len(self.running) == 1:
                        raise
                    self._preempt_youngest()
        return Plan(
            [request for request in plan.decoding if request in self.running],
            [(request, count) for request, count in plan.reading if request in self.running],
        )

    def reserve_rows(self, request: Request, rows: int) -> int:
        """Reserve blocks for `rows` more rows of a request, as far as its own and the free ones go. Returns how many
        rows fit.
        """
        if (pool := request.target.pool) is None:
            return rows
        cache = request.cache
        fitting: int = min(rows, cache.capacity + pool.free * BLOCK_SIZE - cache.length)
        cache.reserve(cache.length + fitting)
        return fitting

    def _preempt_youngest(self) -> None:
        youngest = self.running.pop()
        youngest.preempt()
        self.waiting.appendleft(youngest)

    def _admit(self, now_ns: int) -> None:
        """Admit requests whose texts fit, in addition to what the running requests have yet to read."""
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            pool = request.target.pool
            if pool is not None and self.running:
                promised = sum(max(0, other.read_to - other.cache.capacity) for other in self.running)
                if pool.free * BLOCK_SIZE - promised < request.read_to:
                    return
                if not pool.has_state_beside([other.cache.state for other in self.running]):
                    return
            request.admit(now_ns)
            self.running.append(self.waiting.popleft())

    def _match_prefixes(self, now_ns: int) -> None:
        """Reuse what others have read of the same text."""
        for request in self.running:
            if request.reading and request.shares:
                request.match_prefix(self.needs_hidden_states, now_ns)

    def _chunks(self, rows: int) -> list[tuple[Request, int]]:
        """Return which requests read how much. A request waits if another is reading its next block in this forward."""
        left = {request: request.read_to - request.cache.length for request in self.running if request.reading}
        under_way: dict[BlockKey, Request] = {}
        counts: dict[Request, int] = dict.fromkeys(left, 0)
        half, self._half_row = divmod(rows + self._half_row, 2)
        shares = [(request, half) for request in [*left][:1]]
        shares += [(request, rows) for request in sorted(left, key=left.__getitem__)]  # the earlier one first on ties
        for request, most in shares:
            if rows <= 0:
                break
            if request.shares:
                block_key = request.cache.next_block_key(request.to_share)
                if block_key is not None and under_way.setdefault(block_key, request) is not request:
                    continue
            count = min(most, rows, left[request] - counts[request])
            counts[request] += count
            rows -= count
        return [(request, count) for request, count in counts.items() if count]
