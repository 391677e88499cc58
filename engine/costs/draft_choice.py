"""Chooses which drafts the next round of a request gets: none, retrieval's, or a draft model's too."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.costs.bandit import ConservativeBandit, Experience
from engine.costs.constants import LONG_READING, ROUNDS_OF_READING
from engine.costs.cost_model import CostModel


@dataclass(frozen=True)
class DraftKinds:
    """What all requests have learned of each kind of drafts, None for a kind that is made whatever it costs, or not at
    all. waits: of rounds that waited for a draft, whatever its kind.
    """

    retrieval: Experience | None = None
    model: Experience | None = None
    waits: Experience = field(default_factory=Experience)


class DraftChoice:
    """One request's choice. rests: its draft model does. root_only: the next round verifies the root alone, since no
    draft is worth its time.
    """

    def __init__(self, prompt: int):
        """Begin a request. prompt: positions of the text to begin with."""
        self.rests = self.root_only = False
        self._retrieval, self._model, self._waits = (ConservativeBandit() for _ in range(3))
        self._unread = prompt  # positions that the model has yet to read
        self._reading = 0  # of these, the positions that the latest draft has to read

    def decide(
        self, kinds: DraftKinds, costs: CostModel, requests: int, emitted: int, left: int, waiting: int = 0
    ) -> None:
        """Decide after a round of `requests` requests that emitted `emitted` tokens of this one; `left` may follow.
        waiting: how many requests the next round would wait for although drafts are made ahead.
        """
        rate = _rate(costs, requests)
        pays = kinds.model is None and kinds.retrieval is None
        self._unread += emitted
        self.rests = False
        if (shared := kinds.model) is not None:
            reading, rounds = self._long(self._unread), max(1.0, min(ROUNDS_OF_READING, left / max(1.0, costs.tokens)))
            pays = self._model.takes(shared, rate * shared.draft_s, emitted, rate * shared.read_s * reading, rounds)
            self.rests = not pays
        if not self.rests:
            self._reading, self._unread = self._long(self._unread), 0
        if (shared := kinds.retrieval) is not None and not pays:
            pays = self._retrieval.takes(shared, rate * shared.draft_s, emitted)
        if waiting and pays:
            pays = self._waits.takes(kinds.waits, rate * costs.wait_s / waiting, emitted)
        self.root_only = not pays

    @staticmethod
    def _long(unread: int) -> int:
        return unread if unread >= LONG_READING else 0

    def observe(
        self,
        kinds: DraftKinds,
        costs: CostModel,
        requests: int,
        *,
        by_retrieval: float,
        by_model: float,
        retrieval_rows_s: float = 0.0,
        model_rows_s: float = 0.0,
        waited_s: float = 0.0,
        model_drafted: bool = False,
    ) -> None:
        """Learn from a round of `requests` requests that verified a draft of this one.

        by_retrieval: tokens that retrieval's draft has accepted, or would have had accepted without the model;
        by_model: those of the round less these. retrieval_rows_s, model_rows_s: time that their nodes take in the
        forward, likewise: where the model keeps retrieval's from being verified, its own are negative. waited_s: for
        the draft, 0 if it was there, as a share of the requests that waited together. model_drafted: whether the model
        computed for it.
        """
        rate = _rate(costs, requests)
        plain = costs.plain_rate(requests) / rate
        by_retrieval -= rate * retrieval_rows_s
        by_model -= rate * model_rows_s
        self._waits.observe(kinds.waits, by_retrieval + by_model, plain * (by_retrieval + by_model - rate * waited_s))
        if (shared := kinds.model) is not None and model_drafted:
            model_s = waited_s - min(waited_s, 0.0 if kinds.retrieval is None else kinds.retrieval.draft_s)
            waited_s -= model_s
            if (other := kinds.retrieval) is not None and not self._retrieval.pays(other, rate * other.draft_s):
                by_model += by_retrieval - rate * other.draft_s  # without the model nothing would be drafted
            shared.observe(by_model, model_s, self._reading)
            lost = rate * max(0.0, model_s - self._reading * shared.read_s)
            self._model.observe(shared, by_model, plain * (by_model - lost))
            self._reading = 0
        if (shared := kinds.retrieval) is not None:
            shared.observe(by_retrieval, waited_s)
            self._retrieval.observe(shared, by_retrieval, plain * (by_retrieval - rate * waited_s))


def _rate(costs: CostModel, requests: int) -> float:
    """Return the tokens that a second is worth: no fewer than plain decoding's, however slow the latest rounds were."""
    return max(costs.rate(requests), costs.plain_rate(requests))
