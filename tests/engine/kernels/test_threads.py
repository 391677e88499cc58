from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from engine.kernels.simd import float_at, put_float
from engine.kernels.threads import Program, address_of, int_fields, kernel, num_threads, thread_id

MOVE = np.dtype([("source", "i8"), ("goal", "i8"), ("count", "i8")])


@kernel(MOVE)
def reverse_kernel(address: Any) -> None:
    """goal = source backwards, plus 1: what a thread reads, another one has written."""
    work = carray(address, 1)[0]
    for i in range(thread_id(), work.count, num_threads()):
        put_float(work.goal + 4 * i, float_at(work.source + 4 * (work.count - 1 - i)) + np.float32(1))


@pytest.fixture(params=[1, 2, 5], autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


@pytest.fixture
def numbers() -> list[torch.Tensor]:
    return [torch.arange(1000.0), torch.zeros(1000)]


def to_and_fro(numbers: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    records = np.zeros(2, MOVE)
    for i in range(2):
        records[i] = numbers[i].data_ptr(), numbers[1 - i].data_ptr(), 1000
    return records


def test_every_step_sees_all_of_the_step_before_it(numbers: list[torch.Tensor]) -> None:
    records, program = to_and_fro(numbers), Program()
    for step in range(40):
        program.add(reverse_kernel(), address_of(records, step % 2), alone_below=8 * (step % 3))
    for turn in range(1, 20):
        program.run(turn, 0, len(program))
        assert torch.equal(numbers[0], torch.arange(1000.0) + 40 * turn)


def test_functions_are_called_between_kernels_and_a_run_may_be_of_some_steps(numbers: list[torch.Tensor]) -> None:
    records, program, seen = to_and_fro(numbers), Program(), []
    for step in range(4):
        program.add(reverse_kernel(), address_of(records, step % 2))
        program.call(lambda: seen.append((numbers[0][0].item(), numbers[1][0].item())))
    program.run(1, 0, 3)
    assert seen == [(0, 1000)]
    program.run(1, 3, len(program))
    assert seen == [(0, 1000), (2, 1000), (2, 1002), (4, 1002)]
    program.run(1, 4, 4)
    assert len(seen) == 4


def test_steps_may_be_added_after_a_run(numbers: list[torch.Tensor]) -> None:
    records, program = to_and_fro(numbers), Program()
    for step in range(2):
        program.add(reverse_kernel(), address_of(records, step % 2))
        program.run(1, 0, len(program))
    assert torch.equal(numbers[0], torch.arange(1000.0) + 2), "the second run does both, from the beginning"


@kernel(MOVE, "_count")
def count_kernel(address: Any) -> None:
    """goal = how many threads there are."""
    work = carray(address, 1)[0]
    if thread_id() == 0:
        put_float(work.goal, np.float32(num_threads()))


def test_threads_are_woken_only_for_rows_that_are_worth_it(numbers: list[torch.Tensor]) -> None:
    records, program = to_and_fro(numbers), Program()
    for at in range(2):
        program.add(count_kernel(), address_of(records), alone_below=8 - 4 * at)
    for rows, start, woken in ((3, 0, False), (4, 0, True), (4, 1, True), (3, 1, False)):
        program.run(rows, start, 2)
        assert numbers[1][0] == (torch.get_num_threads() if woken else 1)
    program.run(4, 0, 1)
    assert numbers[1][0] == 1, "the step that four rows are worth is not among these"


def test_neighbouring_integers_of_all_records_are_set_at_once() -> None:
    records = np.zeros(3, np.dtype([("a", "i8"), ("b", "i8"), ("c", "i8"), ("d", "f4")]))
    int_fields(records, "b", "c")[:] = 4, 5
    int_fields(records, "c", "c")[-1] = 6
    assert records.tolist() == [(0, 4, 5, 0.0), (0, 4, 5, 0.0), (0, 4, 6, 0.0)]
