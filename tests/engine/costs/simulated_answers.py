"""Answers decoded by the verifier's own decisions, round by round, in simulated time.

A text says for each of its tokens who foresees it: retrieval, the draft model, or nobody. So every way of drafting
emits the same text, and only its rounds differ, as in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.costs.bandit import Experience
from engine.costs.cost_model import CostModel
from engine.costs.draft_choice import DraftChoice, DraftKinds
from engine.costs.forward_time import ForwardTime

Level = Literal["plain", "retrieval", "model"]


@dataclass(frozen=True)
class Machine:
    """forward_s: the target's, by rows. retrieval_s: of retrieval's draft; step_s: from one of the model's forwards to
    the next; read_s: of a position of the prompt, for the model. steps: forwards of a draft; tokens: of its chain.
    """

    forward_s: dict[int, float]
    retrieval_s: float
    step_s: float
    read_s: float
    steps: int
    tokens: int


@dataclass(frozen=True)
class Text:
    """retrieved, predicted: whether retrieval, and the model, foresee each token. prompt: positions before them."""

    retrieved: list[bool]
    predicted: list[bool]
    prompt: int = 60


def text(seed: int, retrieved: float, predicted: float, tokens: int = 96, prompt: int = 60) -> Text:
    """Return a text of which these shares are foreseen, each token on its own."""
    draw = random.Random(seed)
    return Text(
        [draw.random() < retrieved for _ in range(tokens)], [draw.random() < predicted for _ in range(tokens)], prompt
    )


class Simulation:
    """One engine that answers one request after the other."""

    def __init__(self, machine: Machine):
        self.machine, self.costs = machine, CostModel(ForwardTime(dict(machine.forward_s)))
        self.kinds = DraftKinds(Experience(), Experience(machine.steps * machine.step_s, machine.read_s))

    def seconds(self, text: Text, always: Level | None = None) -> float:
        """Return the time of an answer. always: what is drafted in every round, in place of the choice."""
        machine, costs, choice = self.machine, self.costs, DraftChoice(text.prompt)
        either = [a or b for a, b in zip(text.retrieved, text.predicted, strict=True)]
        at, passed_s, emitted, unread = 0, 0.0, 1, text.prompt
        while at < len(text.retrieved):
            choice.decide(self.kinds, costs, 1, emitted, len(text.retrieved) - at)
            level: Level = always or ("plain" if choice.root_only else "retrieval" if choice.rests else "model")
            unread += emitted
            by_retrieval = by_model = retrieval_rows = model_rows = 0
            waited_s = 0.0
            if level != "plain":
                waited_s += machine.retrieval_s
                retrieval_rows = self._paying(text.retrieved, 8)
                by_retrieval = _run(text.retrieved, at, retrieval_rows)
            if level == "model":
                waited_s += machine.steps * machine.step_s + machine.read_s * (unread if unread > 32 else 0)
                unread = 0
                model_rows = self._paying(either, machine.tokens)
                by_model = _run(either, at + by_retrieval, model_rows)
            rows = 1 + retrieval_rows + model_rows
            forward_s = costs.forward.seconds(rows)
            emitted = min(1 + by_retrieval + by_model, len(text.retrieved) - at)
            if level != "plain":
                choice.observe(
                    self.kinds,
                    costs,
                    1,
                    by_retrieval=by_retrieval,
                    by_model=by_model,
                    retrieval_rows_s=forward_s - costs.forward.seconds(rows - retrieval_rows),
                    model_rows_s=forward_s - costs.forward.seconds(rows - model_rows),
                    waited_s=waited_s,
                    model_drafted=level == "model",
                )
                costs.observe_wait(waited_s)
            costs.observe_round(1, rows, emitted, waited_s)
            passed_s += waited_s + forward_s
            at += emitted
        return passed_s

    def _paying(self, foreseen: Sequence[bool], tokens: int) -> int:
        """Return how many of a chain's tokens are verified; its confidence is what the text bears out."""
        share = sum(foreseen) / len(foreseen)
        return len(self.costs.paying_nodes([np.cumprod([1.0, *[share] * tokens]).astype(np.float32)])[0]) - 1


def _run(foreseen: Sequence[bool], start: int, most: int) -> int:
    """Return how many tokens from `start` on are foreseen in a row, at most so many."""
    length = 0
    while length < most and start + length < len(foreseen) and foreseen[start + length]:
        length += 1
    return length
