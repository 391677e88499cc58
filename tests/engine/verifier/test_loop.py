"""The verifier's step, with a target whose every answer is known and lines that only note what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from torch import Tensor

from drafters.lookup.prompt_lookup import PromptLookup
from engine.core.batch import Segment
from engine.core.kv_shape import KVShape
from engine.core.methods import source_of
from engine.core.tree import TokenTree
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime
from engine.drafting.worker import FROM_VERIFIER, DrafterWorker
from engine.model.kv_pool import KVPool
from engine.verifier.drafter_link import FROM_DRAFTER
from engine.verifier.request import Request
from engine.wire.messages import Cancel, Draft, Failed, Finish, Hello, Rejoin
from engine.wire.transport import Dealer, Router
from tests.engine.verifier.stage import (
    BLOCKS,
    CALIBRATED,
    CONTEXT,
    DRAFTER,
    HEAD,
    VOCABULARY,
    Stage,
    Wire,
    bushy,
    positions_sent,
)

FOUR_ROWS = CostModel(ForwardTime({1: 0.01, 4: 0.01, 8: 1.0}))  # a fifth row costs more than it can bring


def test_of_all_requests_trees_the_most_confident_nodes_are_verified() -> None:
    stage = Stage(Hello(feature_layers=(1,), calibrated=True))
    one, other = stage.submit(1, [10]), stage.submit(2, [50])
    stage.step()
    stage.verdicts()
    stage.draft(one, bushy(11, 0.2, 0.1, 0.9))
    stage.draft(other, bushy(51, 0.3, 0.05, 0.8))
    stage.verifier.timer.costs = FOUR_ROWS
    assert [segment.tokens.tolist() for segment in stage.step()] == [[11, 12], [51, 52]]
    assert stage.tokens(1) == [11, 12, 13] and stage.tokens(2) == [51, 52, 53]
    told = stage.verdicts()
    assert [positions_sent(told, number) for number in (1, 2)] == [[11, 12], [51, 52]], "each gets its own"


def test_trees_of_a_drafter_that_promises_nothing_are_verified_whole() -> None:
    stage = Stage(Hello())
    request = stage.submit(1, [10])
    stage.step()
    stage.draft(request, bushy(11, 0.2, 0.1, 0.9, 0.8, 0.7))
    stage.verifier.timer.costs = FOUR_ROWS
    assert len(stage.step()[0]) == 6


@pytest.mark.parametrize(("depth", "nodes"), [(CONTEXT - 11, CONTEXT - 10), (CONTEXT - 10, 1)])
def test_a_tree_that_does_not_fit_into_the_context_is_left_out(depth: int, nodes: int) -> None:
    """Ten tokens were read and one was drawn; no row may stand behind the last position."""
    stage = Stage(Hello())
    request = stage.submit(1, list(range(10)), max_tokens=CONTEXT - 10)
    stage.step()
    stage.draft(request, TokenTree.chain(10, [i + 11 for i in range(depth)], [0.9] * depth))
    assert [len(segment) for segment in stage.step()] == [nodes]


def test_a_verdict_speaks_of_the_tree_as_it_was_drafted_though_only_a_part_was_verified() -> None:
    stage = Stage(Hello(feature_layers=(1,), successors=2, calibrated=True))
    request = stage.submit(1, [10])
    stage.step()
    stage.verdicts()
    tree = TokenTree.from_lists([11, 40, 12, 41, 13], [-1, 0, 0, 1, 2], [1.0, 0.2, 0.9, 0.1, 0.8])
    stage.draft(request, tree, number=7)
    stage.verifier.timer.costs = CostModel(ForwardTime({1: 0.01, 3: 0.01, 8: 1.0}))
    assert stage.step()[0].tokens.tolist() == [11, 12, 13]
    [(verdict, (path, tokens, successors, *_, features))] = stage.verdicts()
    assert verdict.draft == 7
    assert (list(path), list(tokens)) == ([0, 2, 4], [12, 13, 14])
    assert successors.tolist() == [[12, 13], [-1, -1], [13, 14], [-1, -1], [14, 15]]
    assert features.shape == (3, 1, 1)
    assert request.outcome == (2, 7, 4, 14)


def test_a_head_that_rests_gets_the_features_of_all_its_rounds_when_it_is_woken() -> None:
    stage = Stage(Hello(feature_layers=(1,), rests=True), method="hybrid")
    request = stage.submit(1, [10, 11])
    stage.price_model(1000.0)
    stage.step()
    stage.draft(request, bushy(12, 0.5))
    stage.step()
    told = stage.verdicts()
    assert [(verdict.rest, arrays[-1].size) for verdict, arrays in told] == [(True, 0), (True, 0)]
    stage.price_model(0.0)
    stage.step()
    [(verdict, _)] = told = stage.verdicts()
    assert not verdict.rest and positions_sent(told) == [10, 11, 12, 13, 14]


def after_a_block(stage: Stage) -> Request:
    """A request of which trees have filled a block: 12 tokens of prompt, four of two rounds."""
    request = stage.submit(1, [*range(10, 22)])
    stage.step()
    for number in (1, 2):
        stage.draft(request, bushy(request.text[-1], 0.5, 0.5), number)
        stage.step()
    assert request.cache.length == 16 and request.text == [*range(10, 27)]
    stage.verdicts()
    return request


def test_a_head_gets_the_hidden_states_of_what_others_have_read_and_written() -> None:
    stage = Stage(HEAD)
    after_a_block(stage)
    other = stage.submit(2, [*range(10, 27)])
    stage.step()
    assert other.cached == 16 and positions_sent(stage.verdicts(), 2) == [*range(10, 27)]


@pytest.mark.parametrize(("hello", "tokens"), [(None, 1), (None, 2), (HEAD, 1)])
def test_what_was_read_of_a_prompt_is_kept_however_short_its_answer(hello: Hello | None, tokens: int) -> None:
    stage = Stage(hello)
    stage.submit(1, [*range(10, 27)], max_tokens=tokens)
    while len(stage.tokens(1)) < tokens:
        stage.step()
    again = stage.submit(2, [*range(10, 27)])
    stage.step()
    assert again.cached == 16 and stage.target.pool.free == BLOCKS - 2, "and the first holds no block"
    assert hello is None or positions_sent(stage.verdicts(), 2) == [*range(10, 27)]


def test_the_last_tree_of_an_answer_is_kept_too() -> None:
    stage = Stage(Hello())
    request = stage.submit(1, [*range(10, 22)], max_tokens=6)
    stage.step()
    stage.draft(request, TokenTree.chain(22, [23, 24, 25, 26], [0.9] * 4))
    stage.step()
    assert stage.emitted()[-1].finish_reason == "length"
    again = stage.submit(2, [*range(10, 28)])
    stage.step()
    assert again.cached == 16


def test_what_was_read_of_a_prompt_is_kept_when_the_client_leaves() -> None:
    stage = Stage()
    stage.verifier.scheduler.prefill_chunk = 16
    stage.submit(1, [*range(10, 30)])
    stage.step()
    stage.control.inbox.append((Cancel(request=1), []))
    stage.verifier._receive()
    again = stage.submit(2, [*range(10, 30)])
    stage.step()
    assert again.cached == 16


def test_a_head_gets_no_hidden_states_again_after_a_preemption() -> None:
    stage = Stage(HEAD)
    request = after_a_block(stage)
    stage.draft(request, TokenTree.root_only(26), 3)
    stage.verifier.scheduler._preempt_youngest()
    stage.step()
    assert request.cached == 16 and positions_sent(stage.verdicts()) == [26]


def test_what_is_read_again_after_a_preemption_is_not_sent_again() -> None:
    stage = Stage(HEAD)
    request = stage.submit(1, [*range(10, 22)])
    stage.step()
    stage.verdicts()
    stage.draft(request, TokenTree.root_only(22))
    stage.verifier.scheduler._preempt_youngest()
    while not (told := stage.verdicts()):
        stage.step()
    assert request.cached == 0 and positions_sent(told) == [22]


def test_a_prompt_that_was_interrupted_is_sent_once() -> None:
    stage = Stage(HEAD)
    stage.verifier.scheduler.prefill_chunk = 5
    stage.submit(1, [*range(10, 22)])
    stage.step()
    stage.verifier.scheduler._preempt_youngest()
    while not (told := stage.verdicts()):
        stage.step()
    assert positions_sent(told) == [*range(10, 22)]


def test_a_drafter_that_wants_other_layers_gets_none_of_the_hidden_states_kept_for_another() -> None:
    stage = Stage(HEAD)
    after_a_block(stage)
    stage.drafts.inbox.append((DRAFTER, Hello(feature_layers=(2,)), []))
    stage.verifier._receive()
    other, told = stage.submit(2, [*range(10, 27)]), stage.verdicts()
    while not other.has_answer:
        stage.step()
        told += stage.verdicts()
    assert other.cached == 0 and positions_sent(told, 2) == [*range(10, 27)]
    assert stage.target.captured == [(1,), (2,)], "graphs are captured with the layers that are wanted"


def test_a_head_that_rests_alone_is_told_of_all_its_rounds_when_it_is_woken() -> None:
    stage = Stage(Hello(feature_layers=(1,), rests=True), method="eagle3")
    request = stage.submit(1, [10, 11])
    stage.step()
    stage.verdicts()
    stage.price_model(1000.0)
    stage.step()
    stage.step()
    assert request.root_only and not stage.verdicts(), "nobody waits for it"
    stage.price_model(0.0)
    stage.step()
    [(verdict, (path, tokens, _, _, missed, _))] = told = stage.verdicts()
    assert (verdict.round, verdict.draft, [*path], [*tokens], [*missed]) == (3, 0, [0], [15], [13, 14])
    assert positions_sent(told) == [12, 13, 14]


def test_a_drafter_that_joins_knows_what_was_not_told_to_another() -> None:
    stage = Stage(Hello(feature_layers=(1,), rests=True), method="eagle3")
    stage.submit(1, [10, 11])
    stage.price_model(1000.0)
    stage.step()
    stage.step()
    stage.drafts.inbox.append((b"another", Hello(feature_layers=(1,), rests=True), []))
    stage.verifier._receive()
    stage.price_model(0.0)
    stage.step()
    [(_, (_, tokens, _, _, missed, _))] = stage.verdicts()
    assert [*tokens] == [14] and not len(missed)


@pytest.mark.parametrize(("rests", "cut"), [(True, False), (False, True)])
def test_a_model_whose_drafts_need_not_pay_or_that_cannot_rest_does_not(rests: bool, cut: bool) -> None:
    hello = Hello(feature_layers=(1,), rests=rests, draft_s=1000.0)
    stage = Stage(hello, method="eagle3", **{"verifier.cut": cut})
    request = stage.submit(1, [10, 11])
    stage.step()
    [(verdict, (*_, features))] = stage.verdicts()
    assert not verdict.rest and not request.root_only and len(features) == 2


def test_a_model_that_is_slow_by_its_own_account_rests_from_the_first_token_on() -> None:
    stage = Stage(Hello(rests=True, draft_s=1000.0), method="hybrid")
    request = stage.submit(1, [10, 11])
    stage.step()
    [(verdict, _)] = stage.verdicts()
    assert verdict.rest and not request.root_only, "retrieval drafts"


def test_a_request_whose_drafts_gain_nothing_goes_on_without_and_others_with() -> None:
    stage = Stage(CALIBRATED)
    stage.verifier.timer.costs = CostModel(ForwardTime({1: 1.0, 64: 6.0}))  # rows cost something
    poor, rich = stage.submit(1, [10]), stage.submit(2, [50])
    for number in range(1, 20):
        stage.step()
        assert not rich.root_only
        stage.draft(
            rich, TokenTree.chain(rich.text[-1], [(rich.text[-1] + 1) % VOCABULARY], [0.9], source_of("pld")), number
        )
        if poor.root_only:
            return
        stage.draft(poor, TokenTree.chain(poor.text[-1], [9], [0.9], source_of("pld")), number)
    pytest.fail("it is drafted for still")


def test_a_cancelled_request_gives_its_blocks_back_and_nobody_hears_of_it_again() -> None:
    stage = Stage(Hello())
    running, other = stage.submit(1, [10] * 20), stage.submit(2, [50])
    stage.step()
    waiting = stage.submit(3, [70])
    stage.control.inbox += [(Cancel(request=number), []) for number in (running.number, waiting.number, 99)]
    stage.verifier._receive()
    assert [*stage.verifier.scheduler] == [other]
    assert stage.target.pool.free == BLOCKS - 1
    finished = [parts[1].request for parts in stage.drafts.sent if isinstance(parts[1], Finish)]
    assert finished == [1, 3]
    emitted = stage.tokens(1)
    assert len(stage.step()) == 1
    assert stage.tokens(1) == emitted and stage.tokens(2) == [51, 52]


@pytest.mark.parametrize(("method", "heard_before"), [("pld", 1), ("sps", 0)])
def test_what_drafts_for_one_after_the_other_hears_of_one_before_the_next_tree_is_walked_down(
    method: str, heard_before: int
) -> None:
    stage = Stage(Hello(), method=method)
    requests = [stage.submit(number, [10 * number]) for number in (1, 2)]
    stage.step()
    for request in requests:
        stage.draft(request, TokenTree.root_only(request.text[-1]))
    stage.verdicts()  # of the prompts
    sampler, heard = requests[1].sampler, []

    def draw(choice: Any, own: Any = sampler.draw) -> int:
        heard.append(len(stage.drafts.sent))
        return own(choice)

    sampler.draw = draw  # type: ignore[method-assign]
    stage.step()
    assert heard == [heard_before] and len(stage.verdicts()) == 2


def test_a_tree_that_was_there_before_its_verdict_is_a_hit_and_no_other_is() -> None:
    stage = Stage(Hello())
    request = stage.submit(1, [10])
    stage.step()
    stage.draft(request, TokenTree.chain(11, [12], [0.9]), number=1)
    ahead = Draft(request=1, round=2, draft=2, parent=1, node=1, token=13, draft_us=0)  # for what is about to come true
    tree = TokenTree.root_only(13)
    stage.drafts.inbox.append((DRAFTER, ahead, [tree.tokens, tree.parents, tree.confidence, tree.source]))
    stage.verifier._receive()
    for _ in range(3):
        stage.step()
    assert [round_.hit for round_ in stage.emitted()] == [False, False, True, False]
    assert stage.tokens(1) == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("blocks", [2, 3])
def test_trees_are_cut_before_a_neighbour_is_evicted(blocks: int) -> None:
    """Each request has room for its root in a block of its own; a tree of 12 rows needs a second one."""
    stage = Stage(CALIBRATED, **{"drafter.budget": 20, "verifier.cut": False})
    stage.target.pool = KVPool(KVShape(1, 1, 16, torch.float32), blocks)
    one, other = stage.submit(1, [10] * 9), stage.submit(2, [50] * 9)
    stage.step()
    for number, request in enumerate((one, other), 1):
        stage.draft(request, bushy(request.text[-1], *[0.05 * i for i in range(1, 12)]), number)
    rows = [len(segment) for segment in stage.step()]
    assert [*stage.verifier.scheduler.running] == [one, other]
    assert rows == ([7, 7] if blocks == 2 else [12, 7]), "the best nodes, as far as there are blocks"
    assert stage.tokens(1)[-2:] == [12, 13] and stage.tokens(2)[-2:] == [52, 53]


def test_drafts_that_were_not_accepted_hold_no_blocks() -> None:
    stage = Stage(CALIBRATED, **{"verifier.cut": False})
    one = stage.submit(1, [10] * 9)
    stage.step()
    stage.draft(one, bushy(one.text[-1], *[0.05 * i for i in range(1, 12)]))
    stage.step()
    assert one.cache.length == 11 and stage.target.pool.free == BLOCKS - 1


def test_a_drafter_that_leaves_too_much_unread_is_dropped_and_asked_to_rejoin_once_it_reads_again() -> None:
    stage = Stage(HEAD)
    request = stage.submit(1, [10, 11])
    stage.step()
    stage.drafts.full = True
    stage.step()
    assert not stage.verifier.drafter_link.present
    stage.step()
    stage.verifier._receive()
    stage.drafts.sent.clear()
    stage.drafts.full = False
    stage.step()
    assert not stage.drafts.sent, "nothing is sent that it could not follow"
    stage.verifier._receive()
    stage.verifier._receive()
    assert stage.drafts.sent == [(DRAFTER, Rejoin())]
    stage.drafts.inbox.append((DRAFTER, HEAD, []))
    stage.verifier._receive()
    peer, start, (text,) = stage.drafts.sent[-1]
    assert (peer, start.round, [*text]) == (DRAFTER, 4, [10, 11, 12, 13, 14, 15])
    stage.draft(request, bushy(15, 0.5))
    stage.step()
    assert positions_sent(stage.verdicts()) == [13, 14, 15, 16]
    assert stage.tokens(1) == [12, 13, 14, 15, 16, 17]


def test_a_drafter_that_slept_comes_back_by_itself() -> None:
    """Behind real sockets, each of which holds four messages."""
    with zmq.Context() as context:
        router = Router(context, "inproc://drafts", FROM_DRAFTER, unread=4)
        line = Dealer(context, "inproc://drafts", DRAFTER, FROM_VERIFIER, unread=4)
        control: Any = Wire()
        drafter = DrafterWorker(PromptLookup(), control, line)
        stage = Stage(router=router)
        request = stage.submit(1, [10, 11, 12, 10], max_tokens=20)
        drafter.turn()
        stage.verifier._receive()
        assert stage.verifier.drafter_link.present
        while stage.verifier.drafter_link.peer is not None:  # it sleeps, and more than it may leave unread is sent
            stage.step()
            assert request.round < 12
        for _ in range(4):  # it reads what was sent, is asked to rejoin, says Hello, is told of the request and drafts
            drafter.turn()
            stage.verifier._receive()
        assert stage.verifier.drafter_link.present and request.has_draft
        router.close()
        line.close()


def test_the_front_end_hears_how_far_a_long_prompt_is_before_each_of_its_forwards_but_the_last() -> None:
    stage = Stage()
    stage.verifier.scheduler.prefill_chunk = 8
    stage.submit(1, [*range(10, 27)], max_tokens=1)
    while not stage.tokens(1):
        stage.step()
    told = [(one.request, one.read, one.total, one.cached) for one in stage.progress()]
    assert told == [(1, 0, 17, 0), (1, 8, 17, 0)]
    assert [round(one.left_us / 1e6) for one in stage.progress()] == [3, 2], "a second for each forward"
    stage.verifier.scheduler.prefill_chunk = 4
    stage.submit(2, [*range(10, 32)], max_tokens=1)
    stage.step()
    assert [(one.read, one.cached) for one in stage.progress()[2:]] == [(16, 16)], "it begins with what was found"


def test_a_prompt_of_one_forward_and_an_answer_that_is_read_again_are_no_news() -> None:
    stage = Stage()
    request = stage.submit(1, [*range(10, 22)])
    stage.step()
    stage.verifier.scheduler._preempt_youngest()
    stage.verifier.scheduler.prefill_chunk = 4
    stage.step()
    assert request.has_answer and stage.progress() == []


@pytest.mark.parametrize("hello", [CALIBRATED, HEAD])
def test_a_drafted_token_behind_which_nothing_can_be_drawn_is_emitted_and_the_next_round_fails(
    hello: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(hello)
    run = stage.target.run

    def broken(segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        logits, states = run(segments, feature_layers)
        wanted = [segment.tokens if segment.wanted == "all" else segment.tokens[-1:] for segment in segments]
        logits[np.concatenate(wanted) == 13] = torch.nan
        return logits, states

    monkeypatch.setattr(stage.target, "run", broken)
    request = stage.submit(1, [10])
    stage.step()
    stage.verdicts()
    stage.draft(request, TokenTree.chain(11, [12, 13, 14], [0.9] * 3), number=7)
    stage.step()
    assert stage.tokens(1) == [11, 12, 13] and request.text == [10, 11, 12, 13]
    assert request.cache.length == 3 and request.outcome == (2, 7, 1, 13)
    [(verdict, (path, tokens, *_))] = told = stage.verdicts()
    assert (verdict.round, list(path), list(tokens)) == (1, [0, 1], [12, 13])
    assert hello is not HEAD or positions_sent(told) == [11, 12]
    stage.step()
    [failed] = [message for message, *_ in stage.control.sent if isinstance(message, Failed)]
    assert failed.kind == "NotANumber" and "at position 4" in failed.text
    assert stage.tokens(1) == [11, 12, 13] and stage.target.pool.free == BLOCKS
