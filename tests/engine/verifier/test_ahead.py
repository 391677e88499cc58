"""Forwards that are launched before the round before them is read, on a device that computes nothing until it is waited
for: what the host has not waited for, it cannot know.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.drafter_protocol import OnItsWay
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling.argmax import argmax
from engine.sampling.drawn_tree import DrawnTree
from engine.sampling.sampler import UNSETTLED, Sampler
from engine.verifier import ahead
from engine.verifier import step as step_module
from engine.verifier.ahead import Ahead
from engine.wire.messages import Cancel, Failed, Hello
from tests.engine.verifier.stage import CALIBRATED, HEAD, VOCABULARY, Counting, Stage, positions_sent

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.5, "seed": 3}
UNKNOWN = -1000  # what memory holds until the device has computed


def scores(seen: Sequence[int]) -> Tensor:
    """[vocab] logits that depend on every token that a row sees, and on their order."""
    rng = np.random.default_rng(abs(hash(tuple(seen))))
    return torch.from_numpy(rng.permutation(VOCABULARY).astype(np.float32) / 20)


class Device:
    """Does what was launched, in order, as far as somebody waits. log: what was launched, and the waits."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.log: list[str] = []

    def launch(self, name: str, work: Callable[[], None]) -> None:
        self.log.append(name)
        self.queue.append(work)

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Stand for `torch.cat` of what may not be computed yet."""
        joined = torch.cat([*parts])

        def join() -> None:
            joined.copy_(torch.cat([*parts]))

        self.queue.append(join)
        return joined

    def wait(self, end: int) -> None:
        self.log.append("wait")
        while self.done < end:
            self.queue[self.done]()
            self.done += 1


class QueuedTarget(Counting):
    """A target whose tokens follow from all tokens that its keys hold, which are kept in the pool's slots. broken:
    tokens whose logits are no numbers.
    """

    context = 512

    def __init__(self, device: Device, blocks: int):
        super().__init__(blocks)
        self.queue, self.memory, self.broken = device, np.full(blocks * BLOCK_SIZE, UNKNOWN), set[int]()

    def run(self, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        self.forwards.append(list(segments))
        for segment in segments:
            segment.cache.reserve(segment.past + len(segment))
        return self._launched("forward", segments, None, feature_layers)

    def run_roots(
        self, roots: Sequence[Segment], tokens: Tensor, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        for root in roots:
            root.cache.reserve(root.past + 1)
        return self._launched("ahead", roots, tokens, feature_layers)

    def _launched(
        self, name: str, segments: Sequence[Segment], tokens: Tensor | None, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        parts = [segment.rows for segment in segments]
        tables = [part.cache.block_table.tolist() for part in parts]
        rows = [
            (*given, segment.wanted)
            for *given, segment in zip(parts, [part.slots for part in parts], tables, segments, strict=True)
        ]
        logits = torch.full((sum(segment.wanted_rows for segment in segments), VOCABULARY), torch.nan)
        states = torch.full((sum(map(len, segments)), 1, 1), torch.nan)
        self.queue.launch(name, partial(self._compute, rows, tokens, logits, states))
        return logits, states if layers else None

    def _compute(self, parts: Any, given: Tensor | None, logits: Tensor, states: Tensor) -> None:
        at = wanted = 0
        for rows, slots, table, kind in parts:
            tokens = rows.tokens if given is None else [max(0, int(given[at]))]
            self.memory[slots] = tokens
            for i, (prefix, rest) in enumerate(zip(rows.prefix_lens, rows.ancestors, strict=True)):
                seen = [*range(prefix), *rest]
                places = [table[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in seen]
                if kind == "all" or (kind == "last" and i == len(rows) - 1):
                    logits[wanted] = torch.nan if tokens[i] in self.broken else scores(self.memory[places].tolist())
                    wanted += 1
                states[at] = tokens[i]
                at += 1


class QueuedOutput:
    """Draws on the device, as `engine.model.cuda.receipt.Receipt` does: greedy tokens; others are left to the host."""

    def __init__(self, device: Device, trees: Sequence[DrawnTree], logits: Tensor, states: Tensor | None, rows: int):
        self._trees, self._logits, self._states, self._rows, self._device = trees, logits, states, rows, device
        self._tokens = torch.full((len(logits),), UNKNOWN, dtype=torch.int32)
        device.launch("draws", self._draw)
        self._end = len(device.queue)
        self.read, self.on_device = False, None

    def _draw(self) -> None:
        self._tokens.copy_(torch.tensor(argmax(self._logits), dtype=torch.int32))
        for one in self._trees:
            if not one.sampler.params.greedy:
                self._tokens[one.first : one.first + len(one.tree)] = UNSETTLED

    @property
    def roots(self) -> Tensor | None:
        alone = all(len(one.tree) == 1 and one.sampler.is_plain for one in self._trees)
        return self._tokens if alone else None

    def wait(self, behind: OnItsWay | None = None) -> float:
        self._device.wait(self._end)
        self.read = True
        return 0.0

    def known(self, index: int) -> list[int] | None:
        assert self.read, "read before it was waited for"
        one = self._trees[index]
        found: list[int] = self._tokens[one.first : one.first + len(one.tree)].tolist()
        return found if one.sampler.is_plain else None

    def states_of(self, index: int, path: Sequence[int]) -> Any:
        return self._bits(self._trees[index].first + np.asarray(path))

    def read_states(self, first: int, count: int) -> Any:
        return self._bits(np.arange(first, first + count))

    def _bits(self, rows: Any) -> Any:
        assert self.read
        return None if self._states is None else self._states[rows].bfloat16().view(torch.uint16).numpy()

    def successors_of(self, first: int, count: int) -> None:
        return None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(ahead, "torch", SimpleNamespace(cat=made.cat, AcceleratorError=torch.AcceleratorError))
    monkeypatch.setattr(
        step_module,
        "output_of",
        lambda trees, logits, states, pool, rows, *_: QueuedOutput(made, trees, logits, states, rows),
    )
    return made


def stage_over(target: Any, hello: Hello | None = None, **options: Any) -> Stage:
    """A stage with another target."""
    made = Stage(None, **options)
    made.target = target
    verifier = made.verifier
    for part in (verifier, verifier.front_end, verifier.drafter_link, verifier.ahead, verifier.timer):
        part.target = target
    if hello is not None:
        join(made, hello)
    return made


def stage_on(device: Device, hello: Hello | None = None, blocks: int = 32, **options: Any) -> Stage:
    return stage_over(QueuedTarget(device, blocks), hello, **options)


def join(stage: Stage, hello: Hello) -> None:
    stage.drafts.inbox.append(("drafter-1", hello, []))
    stage.verifier._receive()


def plain_text(prompt: Sequence[int], count: int, **sampling: Any) -> list[int]:
    """What decoding the text alone, one token after the other, draws."""
    params = SamplingParams(**{"max_tokens": count} | sampling)
    sampler, answer = Sampler(params, prompt, [], VOCABULARY), list[int]()
    while sampler.finish_reason is None:
        answer.append(sampler.draw(sampler.choices(scores([*prompt, *answer])[None])[0]))
    return answer


def steps(stage: Stage, count: int) -> None:
    """Run that many rounds, fewer if all requests end before."""
    verifier = stage.verifier
    for _ in range(count):
        if [*verifier.scheduler]:
            verifier._step(verifier.scheduler.plan(10**18, verifier.timer.costs, verifier.drafter_link.present))


def finish(stage: Stage) -> None:
    steps(stage, 300)
    assert not [*stage.verifier.scheduler], "requests do not end"


def test_a_round_is_launched_before_the_one_before_it_is_read(device: Device) -> None:
    stage = stage_on(device)
    stage.submit(1, [10, 11], **GREEDY)
    stage.submit(2, [50], **GREEDY)
    steps(stage, 5)
    reading, first = ["forward", "draws", "wait"], ["forward", "draws", "ahead", "wait"]
    assert device.log == [*reading, *first, *(3 * ["draws", "ahead", "wait"])]
    assert device.done == len(device.queue) - 1, "the next one is under way"
    assert stage.tokens(1) == plain_text([10, 11], 5) and stage.tokens(2) == plain_text([50], 5)


def test_nothing_is_launched_that_is_sure_to_be_thrown_away_and_nothing_is_computed_twice(device: Device) -> None:
    """Both texts grow into new blocks in the same round."""
    stage = stage_on(device)
    one, other = [*range(13)], [*range(40, 53)]
    stage.submit(1, one, max_tokens=6, **GREEDY)
    stage.submit(2, other, max_tokens=8, **GREEDY)
    finish(stage)
    assert device.log.count("ahead") == 6 and device.done == len(device.queue)
    assert device.log.count("forward") == 2, "the prompts', and the first round's"
    assert stage.target.pool.free == stage.target.pool.blocks
    assert (stage.tokens(1), stage.tokens(2)) == (plain_text(one, 6), plain_text(other, 8))


@pytest.mark.parametrize("sampling", [SAMPLED, SAMPLED | {"top_p": 0.7}, GREEDY | {"presence_penalty": 1.0}])
def test_texts_are_those_of_plain_decoding(sampling: dict[str, Any], device: Device) -> None:
    """Where the host has to draw, the row launched is not the one asked for, or none is launched."""
    stage = stage_on(device)
    prompts = [[*range(length)] for length in (3, 15, 16, 17, 31)]
    for number, prompt in enumerate(prompts):
        stage.submit(number, prompt, max_tokens=40 + number, **sampling)
    finish(stage)
    for number, prompt in enumerate(prompts):
        assert stage.tokens(number) == plain_text(prompt, 40 + number, **sampling)
    assert (device.log.count("ahead") > 40) == ("top_p" not in sampling and "presence_penalty" not in sampling)


def test_a_request_that_a_stop_token_ends_leaves_nothing_behind(device: Device) -> None:
    stage = stage_on(device)
    prompt, other = [10, 11], [*range(20, 37)]
    expected = plain_text(prompt, 20)
    stage.submit(1, prompt, stop_token_ids=(expected[14],), **GREEDY)
    stage.submit(2, other, max_tokens=40, **GREEDY)
    while 1 in [request.number for request in stage.verifier.scheduler]:
        stage.step()
    assert stage.tokens(1) == expected[:15]
    used = 1 + (len(other) + len(stage.tokens(2)) - 1) // BLOCK_SIZE
    assert stage.target.pool.free == stage.target.pool.blocks - used, "its surplus row's block is free"
    stage.submit(3, [7] * 40, max_tokens=30, **GREEDY)
    finish(stage)
    assert stage.tokens(2) == plain_text(other, 40) and stage.tokens(3) == plain_text([7] * 40, 30)
    assert stage.target.pool.free == stage.target.pool.blocks


def test_a_row_is_computed_again_for_a_request_whose_blocks_were_given_away_meanwhile(device: Device) -> None:
    """After a preemption the prefix cache has all of its text, so it asks for the same token in the same place."""
    stage = stage_on(device)
    prompt = [*range(15)]
    request = stage.submit(1, prompt, **GREEDY)
    steps(stage, 2)
    written = int(request.cache.block_table[1])
    assert request.cache.ahead and request.cache.length == BLOCK_SIZE
    stage.verifier.scheduler._preempt_youngest()
    assert written in stage.target.pool.allocate(2)
    steps(stage, 1)
    assert request.cached == BLOCK_SIZE and device.log.count("forward") == 3
    finish(stage)
    assert stage.tokens(1) == plain_text(prompt, 20)


def test_layers_with_a_state_are_not_replayed_before_it_is_known_what_was_accepted() -> None:
    target: Any = SimpleNamespace(pool=SimpleNamespace(layer_states=object()))  # which can run nothing
    request: Any = SimpleNamespace(left=9, cache=SimpleNamespace(length=3))
    forwards = Ahead(target)
    forwards.launch([request], cast(Any, SimpleNamespace(roots=torch.zeros(1, dtype=torch.int32))), ())
    assert forwards._launched is None


def test_a_prompt_that_arrives_is_read_beside_the_rows_that_are_under_way(device: Device) -> None:
    stage = stage_on(device)
    stage.submit(1, [10, 11], **GREEDY)
    stage.submit(2, [50], **GREEDY)
    steps(stage, 3)
    stage.submit(3, [*range(30)], **GREEDY)
    stage.target.forwards.clear()
    stage.step()
    assert device.log[-3:] == ["forward", "draws", "wait"], "and none is launched that would part them from the prompt"
    [[chunk]] = stage.target.forwards
    assert chunk.tree is None and len(chunk) == 30, "the others' rows are not computed twice"
    finish(stage)
    for number, prompt in ((1, [10, 11]), (2, [50]), (3, [*range(30)])):
        assert stage.tokens(number) == plain_text(prompt, 20)


def test_where_no_block_is_left_for_a_row_ahead_nobody_is_preempted_for_it(device: Device) -> None:
    stage = stage_on(device, blocks=2)
    stage.submit(1, [*range(14)], max_tokens=6, **GREEDY)
    stage.submit(2, [*range(40, 54)], max_tokens=2, **GREEDY)
    stage.step()
    running = [*stage.verifier.scheduler.running]
    stage.step()
    assert len(running) == 2 and stage.verifier.scheduler.running == running[:1]
    finish(stage)
    assert stage.tokens(1) == plain_text([*range(14)], 6)
    assert stage.tokens(2) == plain_text([*range(40, 54)], 2)


def test_a_request_that_is_drafted_for_is_not_launched_before_its_draft_can_come(device: Device) -> None:
    stage = stage_on(device, CALIBRATED)
    request = stage.submit(1, [10, 11], **GREEDY)
    steps(stage, 4)
    assert "ahead" not in device.log
    request.root_only = True
    steps(stage, 1)
    assert device.log[-2:] == ["ahead", "wait"]
    request.root_only, request.matcher = True, cast(Any, object())  # a grammar may imply tokens
    assert stage.verifier._may_draft(request)


def test_a_row_without_the_hidden_states_that_a_new_drafter_wants_is_computed_again(device: Device) -> None:
    stage = stage_on(device)
    stage.submit(1, [10, 11], **GREEDY)
    steps(stage, 3)
    join(stage, HEAD)
    stage.verdicts()
    steps(stage, 1)
    assert positions_sent(stage.verdicts()) == plain_text([10, 11], 4)[2:3]


def test_a_draft_that_comes_after_all_takes_the_place_of_the_row_under_way(device: Device) -> None:
    stage = stage_over(QueuedTarget(device, 32), **{"verifier.cut": False})
    prompt = [*range(13)]
    request = stage.submit(1, prompt, max_tokens=30, **GREEDY)
    steps(stage, 16)
    join(stage, Hello(calibrated=True))
    expected = plain_text(prompt, 30)
    root = expected[15]
    stage.draft(request, TokenTree.chain(root, [*expected[16:19], *[root] * 4], [0.9] * 7))
    steps(stage, 1)
    assert stage.tokens(1) == expected[:20], "what was right of the draft was accepted"
    assert request.cache.length == 2 * BLOCK_SIZE and stage.target.pool.free == stage.target.pool.blocks - 2
    finish(stage)
    assert stage.tokens(1) == expected
    assert stage.target.pool.free == stage.target.pool.blocks


def test_a_request_that_fails_ends_alone_and_its_surplus_row_with_it(device: Device) -> None:
    target = QueuedTarget(device, 32)
    stage = stage_over(target)
    expected, other = plain_text([10, 11], 9), plain_text([50], 20)
    target.broken = {next(token for token in expected[3:] if token not in {*other, *expected[:3], 10, 11, 50})}
    stage.submit(1, [10, 11], **GREEDY)
    stage.submit(2, [50], **GREEDY)
    finish(stage)
    [failed] = [parts[0] for parts in stage.control.sent if isinstance(parts[0], Failed)]
    assert (failed.request, failed.kind) == (1, "NotANumber") and stage.tokens(2) == other
    assert stage.target.pool.free == stage.target.pool.blocks


def test_a_launch_that_fails_ends_no_request(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    target = QueuedTarget(device, 32)
    stage = stage_over(target)
    stage.submit(1, [10, 11], **GREEDY)
    stage.submit(2, [50], **GREEDY)
    steps(stage, 3)

    def full(*_: Any) -> tuple[Tensor, Tensor | None]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(target, "run_roots", full)
    finish(stage)
    assert (stage.tokens(1), stage.tokens(2)) == (plain_text([10, 11], 20), plain_text([50], 20))
    assert stage.target.pool.free == stage.target.pool.blocks


def test_texts_are_those_of_plain_decoding_whatever_happens_meanwhile(device: Device) -> None:
    rng = random.Random(5)
    stage = stage_over(QueuedTarget(device, 14), **{"verifier.max_running": 4})
    sent: dict[int, tuple[list[int], int]] = {}
    cancelled = set[int]()
    for number in range(40):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))]
        if rng.random() < 0.3 and sent:  # a text that begins as another
            prompt = [*sent[rng.choice([*sent])][0], *prompt[:3]]
        sent[number] = prompt, rng.randrange(1, 30)
        stage.submit(number, prompt, max_tokens=sent[number][1], **GREEDY)
        steps(stage, rng.randrange(6))
        if rng.random() < 0.2:
            gone = rng.choice([request.number for request in stage.verifier.scheduler] or [number])
            cancelled.add(gone)
            stage.control.inbox.append((Cancel(request=gone), []))
            stage.verifier._receive()
    finish(stage)
    assert device.log.count("ahead") > 60 and stage.target.pool.free == 14
    for number, (prompt, count) in sent.items():
        found, expected = stage.tokens(number), plain_text(prompt, count)
        assert found == (expected[: len(found)] if number in cancelled else expected)


def test_drafts_are_launched_behind_a_round_for_requests_that_go_on_and_are_drafted_for() -> None:
    """Only a drafter in the verifier's loop does that, and only where the device knows what the round comes to."""
    stage, asked = Stage(CALIBRATED), list[Any]()
    requests = [stage.submit(number, [10, 11], max_tokens=9 if number != 2 else 1) for number in (1, 2, 3, 4)]
    requests[2].root_only = True
    output, verdicts, sent = SimpleNamespace(on_device=None), object(), object()

    def draft_behind(*given: Any) -> Any:
        asked.append(given)
        return sent

    def drafted() -> Any:
        return stage.verifier._draft_behind(requests, cast(Any, output))

    assert drafted() is None
    stage.verifier.inline_drafter = cast(Any, SimpleNamespace(draft_behind=draft_behind))
    assert drafted() is None and not asked
    output.on_device = verdicts
    assert drafted() is sent and asked == [({1: 0, 4: 3}, verdicts)]
