"""Counters over all requests."""

from __future__ import annotations

from engine.frontend.totals import Totals
from engine.wire.messages import Heartbeat, Tokens


def tokens(round_: int, count: int, nodes: int, busy_us: int, hit: bool = False) -> Tokens:
    return Tokens(
        request=1, round=round_, tokens=(5,) * count, finish_reason=None, nodes=nodes, hit=hit, round_us=1,
        forward_us=1, draft_us=0, busy_us=busy_us, at_us=0,
    )  # fmt: skip


def test_rounds_are_counted_with_their_drafts_and_places() -> None:
    totals = Totals()
    for arrival in (tokens(0, 1, 30, 100), tokens(1, 3, 8, 200, True), tokens(2, 1, 5, 300), tokens(3, 1, 1, 400)):
        totals.add(arrival)
    assert (totals.tokens, totals.rounds, totals.hits, totals.nodes) == (6, 3, 1, 14)  # the prefill is no round
    assert (totals.drafts, totals.draft_tokens, totals.accepted, totals.accepted_at) == (2, 11, 2, [1, 1])
    assert totals.busy_s == 400e-6


def test_a_new_verifier_counts_from_nothing() -> None:
    totals = Totals()
    totals.add(tokens(0, 1, 1, 500))
    totals.state = Heartbeat(running=3)
    totals.new_verifier()
    totals.add(tokens(1, 1, 1, 200))
    assert totals.busy_s == 700e-6 and totals.state == Heartbeat()


def test_what_the_prefix_cache_holds_of_prompts_is_counted() -> None:
    totals = Totals()
    totals.look_up(40, 0)
    totals.look_up(40, 32)
    assert (totals.prefix_queries, totals.prefix_hits) == (80, 32)
