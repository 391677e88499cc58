"""One request's part of a round: what it remembers, and how it ends where something fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.core.batch import Segment
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.verifier import step as step_module
from engine.verifier.loop import Verifier
from engine.verifier.step import DeferredDraw, Step, deferred_draws


def lose_the_device(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def conclude(draws: Sequence[DeferredDraw]) -> None:
    verifier: Any = SimpleNamespace(_fail=lambda request, error: pytest.fail("the request fails alone"))
    request: Any = None
    for draw in draws:
        Verifier._draw(verifier, request, draw)


def conclude_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "verify", lose_the_device)
    params = SamplingParams(temperature=1.0)
    request = SimpleNamespace(sampling=params, sampler=SimpleNamespace(params=params, is_plain=True))
    root, of_request = TokenTree.root_only(1), cast(Any, request)
    step = Step(of_request, root, True, [], root, np.zeros(1, int))
    conclude(deferred_draws([step], [], [], torch.zeros(1, 8), None, 0)[1])


def conclude_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Any = SimpleNamespace(length=0)
    request: Any = SimpleNamespace(
        reads_all=False,
        read=lambda chunk, logprobs, states: True,
        has_answer=False,
        sampler=SimpleNamespace(choices=lose_the_device, draw=None),
    )
    chunk = Segment.of_text([1], cache)
    conclude(deferred_draws([], [request], [chunk], torch.zeros(1, 8), None, 0)[1])


@pytest.mark.parametrize("conclude", [conclude_a_tree, conclude_a_chunk])
def test_an_error_of_the_device_is_no_requests_own(conclude: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run late: what went wrong in a forward may show when its logits are read."""
    with pytest.raises(torch.AcceleratorError):
        conclude(monkeypatch)


@pytest.mark.parametrize(
    ("drafted", "alone", "wanted"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_round_remembers_whether_a_drafter_was_asked_even_when_the_next_one_is_decided(
    drafted: bool, alone: bool, wanted: bool
) -> None:
    request: Any = SimpleNamespace(wants_draft=drafted, root_only=alone, forced_tokens=lambda tree: [])
    request.admitted = lambda tree: np.arange(len(tree))
    step = Step.of(request, TokenTree.root_only(7))
    request.root_only = not alone
    assert step.wanted == wanted
