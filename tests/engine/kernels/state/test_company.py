"""Layers with a state: a row's bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.state.short_convolution import ShortConvolution
from engine.kernels.state.walk import StateLayer, StateRows
from tests.engine.kernels.state import test_delta, test_mamba
from tests.engine.kernels.state.layer_run import HIDDEN, LayerRun, Matrix, rows

TYPES = [torch.float32, torch.bfloat16]


def new_convolution(dtype: torch.dtype) -> ShortConvolution:
    torch.manual_seed(0)
    inputs = Matrix((torch.randn(3 * HIDDEN, HIDDEN) * 0.3).to(dtype))
    taps, bias = torch.randn(4, HIDDEN), torch.randn(HIDDEN)
    return ShortConvolution(inputs, Matrix(torch.randn(HIDDEN, HIDDEN)), taps, bias, dtype.itemsize)


KINDS = {
    "delta": test_delta.new_layer,
    "delta by channel": test_delta.new_channel_layer,
    "mamba": test_mamba.new_layer,
    "short convolution": new_convolution,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def new_run(kind: str, dtype: torch.dtype = torch.float32) -> LayerRun:
    layer: StateLayer = KINDS[kind](dtype)
    return LayerRun(layer, HIDDEN, dtype)


@every_kind
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_alone_and_in_chunks(kind: str, dtype: torch.dtype) -> None:
    run, x = new_run(kind, dtype), rows(20, dtype)
    alone = run.one_by_one(x, 1)
    first = run.text(x[:13], 0, 2)
    assert torch.equal(torch.cat([first, run.text(x[13:], 2, 3)]), alone)
    assert np.array_equal(run.states[3], run.states[1])


@every_kind
@pytest.mark.parametrize("dtype", TYPES)
def test_a_node_has_the_bits_of_its_path_read_as_a_text(kind: str, dtype: torch.dtype) -> None:
    run, x = new_run(kind, dtype), rows(12, dtype)
    run.text(x[:5], 0, 1)
    before, parents = run.states[1].copy(), [-1, 0, 0, 1, 1, 3, 2]
    found = run(x[5:], [StateRows([], parents, range(7), 0, [1], [])])
    assert np.array_equal(run.states[1], before), "drafts change no state"
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert torch.equal(run.text(x[5:][path], 1, 2)[-1], found[node])


@every_kind
@pytest.mark.parametrize("dtype", TYPES)
def test_nodes_below_kept_ones_have_the_bits_of_their_paths(kind: str, dtype: torch.dtype) -> None:
    """A tree grows level by level, and some of its kept nodes have no children."""
    run, x = new_run(kind, dtype), rows(12, dtype)
    run.text(x[:5], 0, 1)
    run(x[5:8], [StateRows([], [-1, 0, 0], range(3), 0, [1], [])])
    found = run(x[8:10], [StateRows(range(3), [-1, 0, 0, 1, 1], [3, 4], 0, [1], [])])
    for node in range(2):
        assert torch.equal(run.text(x[[5, 6, 8 + node]], 1, 2)[-1], found[node])


@every_kind
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("goal", [1, 4])
def test_kept_rows_are_replayed_to_the_bits_of_a_text(kind: str, dtype: torch.dtype, goal: int) -> None:
    run, x = new_run(kind, dtype), rows(12, dtype)
    run.text(x[:5], 0, 1)
    run(x[5:11], [StateRows([], [-1, 0, 0, 1, 3, 3], range(10, 16), 0, [1], [])])
    path = [0, 1, 3, 5]
    found = run(x[11:], [StateRows([10 + node for node in path], range(-1, 4), [9], 4, [1, goal], [4])])
    text = torch.cat([x[:5], x[5:11][path], x[11:]])
    run.text(text[:-1], 0, 2)
    assert np.array_equal(run.states[goal], run.states[2])
    assert torch.equal(found[0], run.text(text, 0, 3)[-1])


@every_kind
def test_a_state_within_a_text_is_that_of_its_beginning(kind: str) -> None:
    run, x = new_run(kind), rows(12)
    run(x, [StateRows([], range(-1, 11), [], 12, [0, 1, 2], [7, 12])])
    run.text(x[:7], 0, 3)
    assert np.array_equal(run.states[1], run.states[3])
    run.text(x, 0, 4)
    assert np.array_equal(run.states[2], run.states[4])


@every_kind
def test_a_state_is_replayed_over_itself_after_one_within_was_stored_elsewhere(kind: str) -> None:
    run, x = new_run(kind), rows(12)
    run.text(x[:6], 0, 1)
    run(x[6:10], [StateRows([], range(-1, 3), range(4), 0, [1], [])])
    run(x[10:11], [StateRows(range(4), range(-1, 4), [4], 4, [1, 2, 1], [1, 4])])
    run.text(x[:7], 0, 3)
    run.text(x[:10], 0, 4)
    assert np.array_equal(run.states[2], run.states[3])
    assert np.array_equal(run.states[1], run.states[4])


@every_kind
def test_requests_do_not_see_each_other(kind: str) -> None:
    run, x, y = new_run(kind), rows(9), rows(5, seed=2)
    run.text(x[:4], 0, 1)
    run(x[4:6], [StateRows([], [-1, 0], [3, 4], 0, [1], [])])
    both = [
        StateRows([3, 4], [-1, 0, 1, 2, 2], [5, 6, 7], 2, [1, 1], [2]),
        StateRows([], range(-1, 4), [], 5, [0, 2], [5]),
    ]
    found = run(torch.cat([x[6:], y]), both)
    run.text(x[:6], 0, 3)
    assert torch.equal(found[0], run.text(x[6:7], 3, 4)[0])
    assert torch.equal(found[2], run.text(x[[6, 8]], 3, 4)[1])
    assert torch.equal(found[3:], run.text(y, 0, 5))
