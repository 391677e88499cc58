"""How rounds and chunks end where something fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.batch import Segment
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.verifier import step_result
from engine.verifier.loop import Verifier
from engine.verifier.step_result import ChunkRows, TreeRows, chunk_rows, tree_rows

LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def fails(error: Exception) -> Any:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


def conclude(parts: Sequence[TreeRows | ChunkRows], failed: list[Exception]) -> None:
    verifier: Any = SimpleNamespace(_fail=lambda request, error: failed.append(error))
    for part in parts:
        assert Verifier._verify(verifier, part) is None


def conclude_a_tree(monkeypatch: pytest.MonkeyPatch, error: Exception, failed: list[Exception]) -> None:
    monkeypatch.setattr(step_result, "verify", fails(error))
    params = SamplingParams(temperature=1.0)
    request = SimpleNamespace(sampling=params, sampler=SimpleNamespace(params=params, is_plain=True))
    round_: Any = SimpleNamespace(request=request, tree=TokenTree.root_only(1), kept=np.zeros(1, int))
    conclude(tree_rows([round_], torch.zeros(1, 8), None, 0), failed)


def conclude_a_chunk(monkeypatch: pytest.MonkeyPatch, error: Exception, failed: list[Exception]) -> None:
    cache: Any = SimpleNamespace(length=0)
    request: Any = SimpleNamespace(
        reads_all=False,
        read=lambda chunk, logprobs, states: True,
        has_answer=False,
        sampler=SimpleNamespace(choices=fails(error), draw=None),
    )
    chunk = Segment.of_text([1], cache)
    conclude(chunk_rows([request], [chunk], torch.zeros(1, 8), None), failed)


@pytest.mark.parametrize("conclude", [conclude_a_tree, conclude_a_chunk])
def test_a_request_that_cannot_be_drawn_for_fails_alone(conclude: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []
    conclude(monkeypatch, ValueError("logits that are not numbers"), failed)
    assert list(map(str, failed)) == ["logits that are not numbers"]


@pytest.mark.parametrize("conclude", [conclude_a_tree, conclude_a_chunk])
def test_an_error_of_the_device_is_no_requests_own(conclude: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run late: what went wrong in a forward may show when its logits are read."""
    failed: list[Exception] = []
    with pytest.raises(torch.AcceleratorError):
        conclude(monkeypatch, LOST, failed)
    assert not failed
