"""Which sizes of forwards give a row the same bits, with products that are made to differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from engine.model import cuda_products
from engine.model.cuda_products import allow_split_sums, exact_sizes, forbid_split_sums, hold_split_sums

SIZES = (2, 4, 8, 16)


@pytest.fixture(autouse=True)
def _by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of usually 4 rows; products that compute every row by itself; no other test's target."""
    monkeypatch.setattr(cuda_products, "_HOLDERS", WeakSet())
    monkeypatch.setattr(cuda_products, "SLICE", 4)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (x[..., None, :] * self.weight).sum(-1))


def model(hook: Callable[..., Tensor] | None = None) -> Any:
    """Two products; the second one's results go through the hook."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double().requires_grad_(False)
    if hook is not None:
        made[1].register_forward_hook(hook)
    return made


def differing(wrong: int, place: int | None = None) -> Callable[..., Tensor]:
    """A product that is wrong in so many rows, at one place or at all."""

    def hook(module: object, inputs: object, out: Tensor) -> Tensor:
        rows = out.shape[-2]
        at = torch.ones(rows, 1) if place is None else (torch.arange(rows) == place)[:, None]
        return out + 1e-9 * at * (rows == wrong)

    return hook


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (None, SIZES),
        (differing(16), (2, 4, 8)),
        (differing(2), (4, 8, 16)),
        (differing(8, place=7), (2, 4, 16)),
        (differing(4, place=2), ()),  # the size with which the others are compared
    ],
)
def test_a_size_whose_rows_differ_anywhere_is_left_out(hook: Any, found: tuple[int, ...]) -> None:
    assert exact_sizes(list(model(hook)), SIZES) == found


def test_a_size_for_which_there_is_no_memory_is_left_out() -> None:
    def full(module: object, inputs: object, out: Tensor) -> Tensor:
        if out.shape[-2] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    assert exact_sizes(list(model(full)), SIZES) == (2, 4, 8)


def test_split_sums_are_forbidden_only_through_a_library_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain cuBLAS the flag makes every product fail."""
    chosen: list[str] = []

    def prefer(library: str) -> None:
        chosen.append(library)
        if library == "cublaslt" and not there:
            raise RuntimeError("no cuBLASLt")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(os, "environ", environment := {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"})
    usual = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    there = False
    assert not forbid_split_sums()
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == usual
    assert len(environment) == 1
    there = True
    assert forbid_split_sums()
    assert chosen[-1] == "cublaslt" and torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is not True
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:2", "CUBLASLT_WORKSPACE_SIZE": "1"}
    cuda_products.allow_split_sums()
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == usual


def test_products_that_a_target_was_proved_with_stay_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else is loaded in its process: later graphs of its own are captured with the same products."""
    chosen: list[str] = []
    matmul: Any = torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    monkeypatch.setattr(os, "environ", {})

    class Forward:
        pass

    for split in (False, True):
        (allow_split_sums if split else forbid_split_sums)()
        target, before = Forward(), matmul.allow_bf16_reduced_precision_reduction
        hold_split_sums(target)
        chosen.clear()
        assert not allow_split_sums() and forbid_split_sums() is not split
        assert chosen == [] and matmul.allow_bf16_reduced_precision_reduction == before
        del target
    assert allow_split_sums() and chosen == ["default"]
