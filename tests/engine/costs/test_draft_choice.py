"""Which drafts a request gets, in simulated time: what the choice loses where they never pay, and gains where they do.

The times are those of Qwen2.5-Coder-1.5B in Q4_K_M on two cores and of its drafters, the acceptance that of its texts.
"""

from __future__ import annotations

import pytest

from engine.costs.bandit import ConservativeBandit, Experience
from engine.costs.cost_model import CostModel
from engine.costs.draft_choice import DraftChoice, DraftKinds
from engine.costs.forward_time import ForwardTime
from tests.engine.costs.simulated_answers import Level, Machine, Simulation, Text, text

FORWARD_S = {1: 0.037, 4: 0.038, 8: 0.046, 16: 0.076, 32: 0.128}
SISTER = Machine(FORWARD_S, retrieval_s=0.0002, step_s=0.012, read_s=0.0, steps=4, tokens=4)
"""A draft model of 0.5 B parameters: 12 ms a token."""
READING_SISTER = Machine(FORWARD_S, retrieval_s=0.0002, step_s=0.012, read_s=0.0013, steps=4, tokens=4)
"""The same draft model, which has to read prompts first."""
HEAD = Machine(FORWARD_S, retrieval_s=0.0002, step_s=0.002, read_s=0.0001, steps=1, tokens=5)
"""A head that drafts a chain in one pass of 2 ms."""
ANSWERS = 25

# shares of the tokens that retrieval foresees, and of those that the model does
NEW, CHAT, HARD_CHAT, SURE, MATHS, CODE = (0.0, 0.0), (0.22, 0.45), (0.22, 0.1), (0.1, 0.9), (0.35, 0.75), (0.88, 0.8)


def texts(*shares: tuple[float, float], answers: int = ANSWERS) -> list[Text]:
    return [text(seed, *shares[seed % len(shares)]) for seed in range(answers)]


def seconds(machine: Machine, answers: list[Text], always: Level | None = None) -> list[float]:
    """Return the seconds of each answer of one engine."""
    simulation = Simulation(machine)
    return [simulation.seconds(one, always) for one in answers]


def losses(machine: Machine, answers: list[Text]) -> list[float]:
    """Return the share of time that each answer lost to the better of plain decoding and retrieval in every round."""
    without = zip(seconds(machine, answers, "plain"), seconds(machine, answers, "retrieval"), strict=True)
    return [took / min(ways) - 1 for took, ways in zip(seconds(machine, answers), without, strict=True)]


@pytest.mark.parametrize("machine", [SISTER, HEAD], ids=["sister", "head"])
@pytest.mark.parametrize("shares", [NEW, HARD_CHAT], ids=["new", "hard chat"])
def test_a_model_that_never_pays_loses_less_than_2_percent_from_the_first_answer_on(
    machine: Machine, shares: tuple[float, float]
) -> None:
    if machine is HEAD and shares == HARD_CHAT:
        shares = (0.22, 0.0)  # a tenth of the tokens would pay for it
    lost = losses(machine, texts(shares))
    assert lost[0] < 0.02 and sum(lost) / len(lost) < 0.015


def test_one_that_has_to_read_prompts_first_does_so_as_seldom_as_that_loses_a_hundredth() -> None:
    lost = losses(READING_SISTER, texts(CHAT))
    assert sum(lost) / len(lost) < 0.015 and lost[0] < 0.005


@pytest.mark.parametrize(("machine", "shares"), [(HEAD, CHAT), (SISTER, SURE)])
def test_a_model_that_pays_brings_nine_tenths_of_what_it_could(machine: Machine, shares: tuple[float, float]) -> None:
    answers = texts(shares, answers=60)
    plain, always, chosen = (sum(seconds(machine, answers, way)) for way in ("plain", "model", None))
    assert plain - chosen > 0.9 * (plain - always) > 0.1 * plain


@pytest.mark.parametrize("machine", [HEAD, READING_SISTER], ids=["head", "reading sister"])
def test_where_texts_differ_each_answer_gets_what_pays_for_it(machine: Machine) -> None:
    answers = texts(HARD_CHAT, CODE, MATHS, NEW, answers=60)
    ways = [seconds(machine, answers, way) for way in ("plain", "retrieval", "model")]
    plain, best, chosen = sum(ways[0]), sum(map(min, *ways)), sum(seconds(machine, answers))
    assert plain - chosen > 0.9 * (plain - best)
    assert chosen < 1.02 * sum(ways[1]), "it is no slower than retrieval alone"


def test_a_text_that_turns_predictable_is_drafted_for_in_time() -> None:
    for seed in range(5):
        first, then = text(seed, *NEW, tokens=96), text(seed, *SURE, tokens=192)
        turning = Text(first.retrieved + then.retrieved, first.predicted + then.predicted)
        ways: dict[Level | None, float] = {
            way: Simulation(HEAD).seconds(turning, way) for way in (None, "plain", "model")
        }
        assert ways["plain"] - ways[None] > 0.75 * (ways["plain"] - ways["model"])


def test_before_anything_was_seen_a_cheap_draft_is_made_and_a_costly_one_is_not() -> None:
    for cost, taken in ((0.07, True), (1.3, False)):
        assert ConservativeBandit().takes(Experience(), cost, emitted=1) == taken


def test_a_draft_that_gains_just_what_it_costs_does_not_pay() -> None:
    shared, bandit = Experience(), ConservativeBandit()
    assert not bandit.pays(shared, bandit.expected(shared)) and bandit.pays(shared, bandit.expected(shared) - 0.01)


def test_reading_a_long_text_has_to_pay_for_itself_over_the_rounds_that_are_left() -> None:
    assert ConservativeBandit().takes(Experience(), 0.1, 1, entry=3.0, rounds=60)
    assert not ConservativeBandit().takes(Experience(), 0.1, 1, entry=3.0, rounds=2)


def test_a_trial_waits_until_emitted_tokens_have_paid_for_it_and_gains_pay_for_the_next() -> None:
    shared, bandit = Experience(), ConservativeBandit()
    rested = 1
    while not bandit.takes(shared, 1.5, emitted=1):
        rested += 1
    assert rested == pytest.approx(1.5 / 0.01, abs=3)
    bandit.observe(shared, 4.0, 2.5)
    assert bandit.takes(shared, 1.5, emitted=1)
    for _ in range(20):
        bandit.observe(shared, 0.0, -1.5)
    assert not bandit.takes(shared, 1.5, emitted=1)


def test_an_answer_stops_at_its_own_losses_whatever_others_gained() -> None:
    shared = Experience()
    for _ in range(500):
        shared.observe(5.0, 0.01)
    bandit, drafts = ConservativeBandit(), 0
    while bandit.takes(shared, 0.2, emitted=1):
        bandit.observe(shared, 0.0, -0.2)
        drafts += 1
    assert drafts <= 5


def test_a_request_begins_with_what_others_have_seen() -> None:
    shared = Experience()
    for _ in range(50):
        shared.observe(0.0, 0.01)
    assert not ConservativeBandit().takes(shared, 0.07, emitted=1)


def test_times_are_learned_a_draft_s_and_a_position_s_apart() -> None:
    shared = Experience(draft_s=0.05, read_s=0.001)
    for _ in range(500):
        shared.observe(1.0, 0.08)
    assert shared.draft_s == pytest.approx(0.08, rel=1e-3) and shared.read_s == 0.001
    for _ in range(500):
        shared.observe(1.0, 0.08 + 100 * 0.002, reading=100)
    assert shared.draft_s == pytest.approx(0.08, rel=1e-3) and shared.read_s == pytest.approx(0.002, rel=1e-3)


def test_a_draft_that_its_model_did_not_compute_for_tells_nothing_of_the_model() -> None:
    kinds, costs = DraftKinds(Experience(), Experience()), CostModel(ForwardTime({1: 0.01}))
    DraftChoice(10).observe(kinds, costs, 1, by_retrieval=0, by_model=0)
    assert kinds.model is not None and kinds.model.gained == Experience().gained
    assert kinds.retrieval is not None and kinds.retrieval.gained.mean() < Experience().gained.mean()


@pytest.mark.parametrize("retrieval_pays", [False, True])
def test_where_nothing_else_would_be_drafted_the_model_is_credited_with_all_that_its_draft_brings(
    retrieval_pays: bool,
) -> None:
    kinds, costs, choice = DraftKinds(Experience(), Experience()), CostModel(ForwardTime({1: 0.01})), DraftChoice(10)
    assert kinds.retrieval is not None and kinds.model is not None
    kinds.retrieval.gained.total = kinds.retrieval.gained.count * (1.0 if retrieval_pays else -1.0)
    before = kinds.model.gained.mean()
    choice.observe(kinds, costs, 1, by_retrieval=2, by_model=0, model_drafted=True)
    assert (kinds.model.gained.mean() > before) != retrieval_pays


def test_what_retrievals_draft_would_have_taken_is_the_models_to_pay_where_it_alone_is_why_that_is_made() -> None:
    kinds, costs = DraftKinds(Experience(draft_s=0.05), Experience()), CostModel(ForwardTime({1: 0.01}))
    assert kinds.retrieval is not None and kinds.model is not None
    kinds.retrieval.gained.total = 0.0
    before = kinds.model.gained.mean()
    DraftChoice(10).observe(kinds, costs, 1, by_retrieval=2, by_model=0, model_drafted=True)
    assert kinds.model.gained.mean() < before, "five tokens' time for two tokens"


def test_the_time_of_a_draft_that_reads_is_that_of_its_positions_and_of_the_next_one_its_own() -> None:
    kinds, costs, choice = DraftKinds(model=Experience()), CostModel(ForwardTime({1: 0.01})), DraftChoice(100)
    choice.decide(kinds, costs, 1, emitted=1, left=500)
    assert kinds.model is not None and not choice.rests
    choice.observe(kinds, costs, 1, by_retrieval=0, by_model=1, waited_s=0.2, model_drafted=True)
    read_s = kinds.model.read_s
    assert read_s > 0 and kinds.model.draft_s == 0
    choice.observe(kinds, costs, 1, by_retrieval=0, by_model=1, waited_s=0.2, model_drafted=True)
    assert kinds.model.read_s == read_s and kinds.model.draft_s > 0


def test_drafts_that_need_not_pay_are_made_whatever_they_cost() -> None:
    choice, kinds, costs = DraftChoice(10), DraftKinds(), CostModel(ForwardTime({1: 0.01}))
    for _ in range(50):
        choice.decide(kinds, costs, 1, emitted=1, left=100)
        assert not choice.root_only and not choice.rests
        choice.observe(kinds, costs, 1, by_retrieval=0, by_model=0)


def test_where_drafts_are_made_ahead_a_round_waits_for_one_only_if_that_pays() -> None:
    costs = CostModel(ForwardTime({1: 0.01}))
    for _ in range(100):
        costs.observe_wait(0.02)
    kinds, rich, poor = DraftKinds(), DraftChoice(10), DraftChoice(10)
    for _ in range(30):
        rich.observe(kinds, costs, 1, by_retrieval=6, by_model=0, waited_s=0.02)
        poor.observe(kinds, costs, 1, by_retrieval=0, by_model=0)
    for choice, root_only in ((rich, False), (poor, True)):
        choice.decide(kinds, costs, 1, emitted=1, left=100, waiting=1)
        assert choice.root_only == root_only
