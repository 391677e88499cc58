from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import OutOfBlocks
from engine.core.params import SamplingParams, Speculation
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime
from engine.verifier.request import Request
from engine.verifier.scheduler import Plan, Scheduler
from tests.engine.verifier.stage import Counting

FORWARDS = {1: 0.010, 8: 0.012, 16: 0.014, 32: 0.018, 64: 0.030}
COSTS, AHEAD = CostModel(ForwardTime(FORWARDS)), CostModel(ForwardTime(FORWARDS), "async")


def request(stage: Any, number: int, prompt: list[int], answer: list[int] | None = None) -> Request:
    return Request(number, prompt, answer or [], SamplingParams(), stage, 0)


def scheduler(**options: Any) -> Scheduler:
    return Scheduler(options.pop("most", 8), options.pop("chunk", 32), 1.0)


def read(plan: Plan) -> None:
    """Do what the plan reads."""
    for reader, count in plan.reading:
        reader.cache.commit(range(count))
        reader.cache.cache_blocks(reader.text)


def decode(*requests: Request) -> None:
    """Make requests ready to decode."""
    for one in requests:
        one.cache.reserve(one.read_to)
        one.cache.length = one.read_to
        one.has_answer = True


def after_reading(prompt: list[int]) -> tuple[Counting, Scheduler]:
    """Somebody has read that prompt."""
    stage, requests = Counting(64), scheduler(chunk=64)
    requests.waiting.append(request(stage, 1, prompt))
    read(requests.reserve(plan(requests), lambda r: len(prompt)))
    return stage, requests


def plan(of: Scheduler, now_ns: int = 0, drafter_ready: bool = False, ahead: bool = False) -> Plan:
    return of.plan(now_ns, AHEAD if ahead else COSTS, drafter_ready)


def test_prompts_are_read_in_chunks_in_the_order_in_which_they_came() -> None:
    stage, requests = Counting(64), scheduler()
    first, second = request(stage, 1, list(range(20))), request(stage, 2, list(range(100, 140)))
    requests.waiting += [first, second]
    assert plan(requests).reading == [(first, 20), (second, 12)]


@pytest.mark.parametrize(("length", "most", "admitted"), [(48, 8, True), (49, 8, False), (48, 1, False)])
def test_a_request_is_let_in_if_its_prompt_just_fits_beside_the_others_and_not_too_many_run(
    length: int, most: int, admitted: bool
) -> None:
    stage, requests = Counting(4), scheduler(most=most)
    running, new = request(stage, 1, [1] * 16), request(stage, 2, [2] * length)
    requests.waiting += [running, new]
    requests.reserve(plan(requests), lambda r: 16)
    plan(requests)
    assert requests.running == [running, new][: 1 + admitted] and [*requests] == [running, new]


def test_what_a_running_request_has_room_for_is_not_promised_to_it_again() -> None:
    stage, requests = Counting(4), scheduler()
    running, new = request(stage, 1, [1] * 16), request(stage, 2, [2] * 48)
    requests.running.append(running)
    decode(running)
    requests.waiting.append(new)
    plan(requests)
    assert requests.running == [running, new]


def test_the_youngest_gives_its_blocks_to_the_oldest() -> None:
    stage, requests = Counting(6), scheduler()
    old, young = request(stage, 1, [1] * 40), request(stage, 2, [2] * 40)
    requests.running += [old, young]
    decode(old, young)
    found = requests.reserve(Plan(decoding=[old, young]), lambda r: 12)
    assert found.decoding == [old]
    assert list(requests.waiting) == [young] and young.cache.length == 0
    assert young.reading and young.read_to == len(young.text) - 1


def test_a_request_that_does_not_fit_alone_is_out_of_blocks() -> None:
    stage, requests = Counting(2), scheduler()
    requests.running.append(request(stage, 1, [1] * 40))
    with pytest.raises(OutOfBlocks, match="kv_memory"):
        requests.reserve(Plan(reading=[(requests.running[0], 40)]), lambda r: 40)


def test_a_prompt_known_to_the_last_token_still_has_one_to_read() -> None:
    """Its logits are those that the first token is drawn from."""
    prompt = list(range(32))
    stage, requests = after_reading(prompt)
    again = request(stage, 2, prompt)
    requests.waiting.append(again)
    assert (again, 16) in plan(requests).reading


def test_the_draft_of_a_request_that_need_not_read_again_is_waited_for_from_now_on() -> None:
    """As long ago as it was preempted its drafter was not asked."""
    stage, requests = after_reading(list(range(40)))
    requests.running.clear()
    resumed, now_ns = request(stage, 2, list(range(30)), [30, 31, 32]), 10**18
    requests.waiting.append(resumed)
    assert plan(requests, now_ns, drafter_ready=True) == Plan(wait_s=1.0)
    assert resumed.waiting_since_ns == now_ns
    assert plan(requests, now_ns) == Plan(decoding=[resumed]), "without a drafter it decodes at once"


def test_what_was_read_by_others_is_counted_as_it_is_found() -> None:
    stage, requests = Counting(64), scheduler(chunk=16)
    passage = list(range(48))
    first, second = request(stage, 1, [*passage, 7]), request(stage, 2, [*passage, 8])
    requests.running += [first, second]
    found = []
    for _ in range(3):
        read(requests.reserve(plan(requests), lambda r: 16))
        found.append(second.cached)
    plan(requests)
    assert [*found, second.cached] == [0, 16, 32, 48]


def test_a_prompt_that_is_found_again_after_a_preemption_is_counted_once() -> None:
    prompt = list(range(40))
    stage, requests = after_reading(prompt)
    again = request(stage, 2, prompt)
    requests.running.append(again)
    for _ in range(2):
        plan(requests)
        assert again.cached == 32
        again.preempt()


def test_a_requests_part_of_a_plan_is_its_tree_or_its_chunk() -> None:
    stage = Counting(64)
    one, other = request(stage, 1, [1]), request(stage, 2, [2])
    both = Plan([one, other], [(one, 3), (other, 4)])
    assert both.of(one) == Plan([one], [(one, 3)]) and both.of(other) == Plan([other], [(other, 4)])


def test_a_round_waits_for_a_draft_that_will_soon_be_there() -> None:
    stage, requests = Counting(64), scheduler()
    one, other = request(stage, 1, [1] * 4), request(stage, 2, [2] * 4)
    requests.running += [one, other]
    decode(one, other)
    one.drafts[one.outcome] = object()  # type: ignore[assignment]
    asked = other.waiting_since_ns
    found = plan(requests, asked, drafter_ready=True)
    assert not found and 0 < found.wait_s <= 1.0
    assert plan(requests, asked + int(1e9), drafter_ready=True).decoding == [one, other]
    assert plan(requests, asked, drafter_ready=False).decoding == [one, other], "without a drafter nobody waits"


def test_an_answer_that_an_earlier_verifier_began_is_read_and_not_drawn_again() -> None:
    resumed = request(Counting(64), 1, [1, 2, 3], [4, 5])
    assert resumed.read_to == 4 and resumed.has_answer
    assert resumed.sampler.drawn == 2


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=12), st.integers(5, 40), st.data())
def test_no_block_is_lost_or_held_twice_whoever_comes_and_goes(
    arrivals: list[tuple[int, bool]], blocks: int, data: st.DataObject
) -> None:
    stage, requests = Counting(blocks), scheduler(most=4, chunk=24)
    for number, (length, alike) in enumerate(arrivals):
        requests.waiting.append(request(stage, number, [0 if alike else number] * length))
    for _ in range(60):
        found = plan(requests)
        if not found:
            break
        counts = dict(found.reading)
        try:
            found = requests.reserve(found, lambda r, counts=counts: counts.get(r, 1))
        except OutOfBlocks:
            victim = requests.running[0]
            requests.remove(victim)
            victim.cache.release()
            continue
        read(found)
        for reader, _ in found.reading:
            reader.has_answer = not reader.reading
        for one in found.decoding:
            one.text.append(data.draw(st.integers(0, 3)))
            one.cache.commit([0])
            one.cache.cache_blocks(one.text)
            if len(one.text) > 70 or data.draw(st.booleans()):
                requests.remove(one)
                one.cache.release()
        held = [block for one in requests for block in set(one.cache.block_table.tolist())]
        for block, references in enumerate(stage.pool._references):
            assert references == held.count(block)
    for one in [*requests]:
        requests.remove(one)
        one.cache.release()
    assert stage.pool.free == blocks


def test_with_nobody_there_nothing_is_done_until_a_message_comes() -> None:
    assert plan(scheduler()) == Plan(wait_s=1.0)


def test_requests_are_found_and_removed_wherever_they_stand() -> None:
    stage, requests = Counting(64), scheduler()
    one, two, three = (request(stage, n, [n]) for n in (1, 2, 3))
    requests.running.append(one)
    requests.waiting += [two, three]
    assert [requests.find(n) for n in (1, 2, 3, 4)] == [one, two, three, None]
    for gone in (two, one, two):
        requests.remove(gone)
    assert [*requests] == [three]


def test_requests_whose_drafts_are_there_are_not_held_up() -> None:
    stage, requests = Counting(64), scheduler()
    one, other, alone = (request(stage, n, [n] * 4) for n in range(3))
    requests.running += [one, other, alone]
    decode(one, other, alone)
    one.drafts[one.outcome] = other.drafts[other.outcome] = object()  # type: ignore[assignment]
    alone.root_only = True  # its root is to be verified without a draft
    assert plan(requests, one.waiting_since_ns, drafter_ready=True, ahead=True).decoding == [one, other, alone]


def lonely() -> tuple[Scheduler, Request]:
    """One request that decodes."""
    requests, one = scheduler(), request(Counting(64), 1, [1] * 4)
    requests.running.append(one)
    decode(one)
    return requests, one


def test_only_a_lonely_request_that_is_drafted_for_in_turns_waits_longer_than_usual() -> None:
    requests, one = lonely()
    asked = one.waiting_since_ns
    assert plan(requests, asked, drafter_ready=True).wait_s == 1.0, "it has nothing else to do"
    assert plan(requests, asked + 250_000_000, drafter_ready=True) == Plan(wait_s=0.75)
    assert plan(requests, asked + 1_000_000_000, drafter_ready=True).decoding == [one]
    assert plan(requests, asked, drafter_ready=True, ahead=True).wait_s == COSTS.patience_s() == 0.002
    other = request(Counting(64), 2, [2] * 4)
    requests.running.append(other)
    decode(other)
    other.waiting_since_ns = asked
    assert plan(requests, asked, drafter_ready=True).wait_s == 0.002


def waited(seconds: float, seen_s: float = 0.0) -> CostModel:
    """Costs of rounds that usually wait so long for their drafts."""
    costs = CostModel(ForwardTime(FORWARDS, seen_s=seen_s))
    for _ in range(200):
        costs.observe_wait(seconds)
    return costs


def test_while_all_wait_for_drafts_a_prompt_is_read() -> None:
    requests, one = lonely()
    new = request(Counting(64), 2, [2] * 90)
    requests.waiting.append(new)
    found = requests.plan(one.waiting_since_ns, waited(0.0145), True)
    assert found.decoding == [] and found.reading == [(new, 17)]
    found = requests.plan(one.waiting_since_ns + 2_000_000, waited(0.0145), True)
    assert found.reading == [(new, 9)], "the rest of the usual wait"


def chunks_behind(lengths: tuple[int, ...], costs: CostModel, drafter_ready: bool) -> list[int]:
    """How much of a prompt is read in one forward so far into it, while another request decodes."""
    stage, requests = Counting(128), scheduler(chunk=64)
    one, long = request(stage, 1, [1] * 4), request(stage, 2, [2] * 1900)
    requests.running += [one, long]
    decode(one)
    counts = []
    for length in lengths:
        long.cache.reserve(length)
        long.cache.length = length
        found = requests.plan(one.waiting_since_ns, costs, drafter_ready)
        assert found.decoding == [one][drafter_ready:], "chunks ride along with those who decode"
        counts += [count for _, count in found.reading]
    return counts


def test_far_into_a_prompt_less_of_it_is_read_while_others_decode_and_while_they_wait() -> None:
    first, later = chunks_behind((0, 400), waited(0.018, seen_s=1e-6), drafter_ready=True)
    assert later < first
    counts = chunks_behind((0, 400, 1600), CostModel(ForwardTime(FORWARDS, seen_s=1e-6)), drafter_ready=False)
    assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0] / 4


def test_drafts_that_are_there_in_a_moment_are_waited_for_before_a_prompt_is_read() -> None:
    """Or those who decode would be held up by two chunks in a row."""
    requests, one = lonely()
    requests.waiting.append(request(Counting(64), 2, [2] * 9))
    assert not requests.plan(one.waiting_since_ns, waited(0.0002), True)


def test_while_some_wait_for_drafts_no_chunk_goes_without_the_others() -> None:
    requests, one = lonely()
    stage = Counting(64)
    other, new = request(stage, 2, [2] * 4), request(stage, 3, [3] * 9)
    requests.running.append(other)
    decode(other)
    other.waiting_since_ns = one.waiting_since_ns
    one.drafts[one.outcome] = object()  # type: ignore[assignment]
    requests.waiting.append(new)
    assert plan(requests, one.waiting_since_ns, drafter_ready=True) == Plan(wait_s=COSTS.patience_s())


def test_caches_of_their_own_are_neither_shared_nor_reserved() -> None:
    requests = scheduler(chunk=64)
    own: Any = SimpleNamespace(pool=None, eos_tokens=frozenset(), vocab_size=1000)
    own.open_cache = lambda most, tenant="": SimpleNamespace(length=0)
    one, other = request(own, 1, [1] * 20), request(own, 2, [1] * 20)
    requests.waiting += [one, other]
    found = plan(requests)
    assert found.reading == [(one, 20), (other, 20)]
    assert requests.reserve(found, lambda r: 20) is found


PASSAGE = list(range(32))


def test_what_others_have_read_is_read_again_where_its_hidden_states_are_missing() -> None:
    """A head needs those of every position."""
    stage, requests = after_reading(PASSAGE)
    requests.needs_hidden_states = True
    second = request(stage, 2, [*PASSAGE, 8])
    requests.running = [second]
    assert plan(requests).reading == [(second, 33)]


def test_a_request_without_drafts_shares_what_has_no_hidden_states() -> None:
    stage, requests = after_reading(PASSAGE)
    requests.needs_hidden_states = True
    plain = Request(2, [*PASSAGE, 8], [], SamplingParams(speculation=Speculation(off=True)), stage, 0)
    requests.running = [plain]
    assert plan(requests).reading == [(plain, 1)]


def test_rows_are_handed_out_to_the_last_one_and_to_no_one_after_that() -> None:
    stage, first, second = Counting(64), [1] * 20, [2] * 20
    for chunk, expected in ((20, [20]), (21, [20, 1])):
        requests = scheduler(chunk=chunk)
        requests.waiting += [request(stage, 1, first), request(stage, 2, second)]
        assert [count for _, count in plan(requests).reading] == expected


def test_who_waits_for_a_passage_does_not_hold_up_those_behind() -> None:
    stage, requests = Counting(64), scheduler(chunk=64)
    passage = list(range(32))
    first, second, third = (request(stage, n, text) for n, text in enumerate(([*passage, 7], [*passage, 8], [500] * 9)))
    requests.waiting += [first, second, third]
    assert plan(requests).reading == [(first, 33), (third, 9)]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    stage, requests = Counting(300), scheduler(chunk=64)
    long, *short = (request(stage, n, [n] * length) for n, length in enumerate((4000, 5, 5, 5)))
    requests.waiting += [long, *short]
    assert plan(requests).reading == [(long, 49), *((one, 5) for one in short)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.lists(st.integers(1, 9), max_size=120),
    st.integers(1, 40),
)
def test_every_prompt_is_read_in_twice_the_time_of_those_before_it_and_a_short_one_before_the_rest_of_a_long_one(
    lengths: list[int], stream: list[int], chunk: int
) -> None:
    """However many short prompts keep arriving."""
    stage, requests = Counting(2000), scheduler(most=1000, chunk=chunk)
    prompts = [request(stage, n, [n] * length) for n, length in enumerate(lengths)]
    requests.waiting += prompts
    arriving = iter([request(stage, 100 + n, [100 + n] * length) for n, length in enumerate(stream)])
    ended: dict[Request, int] = {}
    for round_ in range(1, 2 * (sum(lengths) + sum(stream)) + 3):
        if (new := next(arriving, None)) is not None:
            requests.waiting.append(new)
        left = {one: one.read_to - one.cache.length for one in requests if one.reading}
        reading = requests.reserve(found, lambda r: dict(found.reading)[r]).reading if (found := plan(requests)) else []
        counts = dict(reading)
        assert sum(counts.values()) == min(chunk, sum(left.values())), "no row is left unused"
        shorter = [one for one in left if left[one] <= chunk // 2 // len(left)]
        assert all(counts[one] == left[one] for one in shorter), "there is room for them beside the oldest one's half"
        for one, count in reading:
            one.cache.commit(range(count))
            if not one.reading:
                ended[one] = round_
                requests.remove(one)
                one.cache.release()
        if len(ended) == len(prompts) + len(stream):
            break
    for n, one in enumerate(prompts):
        assert ended[one] <= 2 * sum(lengths[: n + 1]) / chunk + n + 2


def test_a_request_knows_how_long_it_waited_until_it_first_ran() -> None:
    stage, requests = Counting(64), scheduler(most=1)
    first, second = request(stage, 1, [1, 2, 3]), request(stage, 2, [4, 5, 6])
    first.since_ns = second.since_ns = 0
    requests.waiting.extend([first, second])
    requests.plan(5_000, COSTS, drafter_ready=False)
    assert (first.queued_us, second.queued_us) == (5, None)
    requests.remove(first)
    requests.plan(9_000, COSTS, drafter_ready=False)
    requests._preempt_youngest()
    requests.plan(20_000, COSTS, drafter_ready=False)
    assert second.queued_us == 9
