"""Gated delta nets on CUDA beside those on a CPU: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.core.state_shape import StateShape
from engine.kernels.state.delta import GatedDelta
from engine.kernels.state.walk import StateRows, steps_of
from engine.model.cuda import device_walk
from engine.model.cuda.delta_kernels import DeltaNet, LayerStates, run_delta
from engine.model.cuda.device_walk import HELD, NOWHERE, cut, held_steps, most_levels, walk_tensor
from tests.engine.kernels.state.delta_layer import delta_layer
from tests.engine.kernels.state.layer_run import HIDDEN, LayerRun, rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 1, 2, 16, 32, 3
CHANNELS, MADE = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUE_HEADS * VALUE_DIM
SIZE = 32  # rows of a forward


@pytest.fixture(autouse=True)
def _few_kept_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_walk, "MOST_KEPT", 16)


def new_layer(dtype: torch.dtype) -> GatedDelta:
    return delta_layer(dtype, [0] * VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS)


class DeviceRun:
    """As `LayerRun`, by the Triton kernels. States, kept rows and what a forward does not write are NaN at first, but
    for slot 0.
    """

    def __init__(self, layer: GatedDelta, dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        shape = StateShape((layer.state_bytes,), (layer.row_bytes,))
        self.states = torch.full((6, shape.slot_bytes), 255, dtype=torch.uint8, device=DEVICE)
        self.states[0] = 0
        self.rows = torch.full((64, shape.row_bytes), 255, dtype=torch.uint8, device=DEVICE)
        parts = (layer.taps, layer.decay, layer.dt_bias, layer.norm)
        sizes = layer.epsilon, layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
        self.net = DeltaNet(*(part.to(DEVICE) for part in parts), *sizes)

    def __call__(self, x: Tensor, requests: Sequence[StateRows]) -> Tensor:
        inputs, gates = (
            torch.full((SIZE, width), torch.nan, dtype=self.dtype) for width in (CHANNELS + MADE, 2 * VALUE_HEADS)
        )
        for row in range(len(x)):
            inputs[row] = self.layer.inputs(x[row : row + 1])[0]
            gates[row] = self.layer.gates(x[row : row + 1])[0]
        walk = walk_tensor(requests, SIZE).to(DEVICE)
        places = LayerStates(self.states, self.rows, 0, 0)
        out = run_delta(self.net, inputs.to(DEVICE), gates.to(DEVICE), places, walk)
        assert not out[len(x) :].any(), "rows that fill up are zeros"
        return out[: len(x)]

    def text(self, x: Tensor, source: int, goal: int) -> Tensor:
        n = len(x)
        return self(x, [StateRows([], range(-1, n - 1), [], n, [source, goal], [n])])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_text_and_a_tree_give_what_they_give_on_a_cpu(dtype: torch.dtype) -> None:
    layer, x = new_layer(dtype), rows(20, dtype)
    device, cpu = DeviceRun(layer, dtype), LayerRun(layer, HIDDEN, dtype)
    tree = [StateRows([], [-1, 0, 0, 1, 1], range(5), 0, [1], [])]
    next_tree = [StateRows([0, 1, 4], [-1, 0, 1, 2, 3, 3], [5, 6, 7], 3, [1, 1], [3])]
    for take in (
        lambda run: run.text(x[:12], 0, 1),
        lambda run: run(x[12:17], tree),
        lambda run: run(x[17:], next_tree),
    ):
        expected, found = take(cpu).float(), take(device).float().cpu()
        assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max()
    window = layer.state_bytes - 4 * VALUE_HEADS * KEY_DIM * VALUE_DIM
    assert np.array_equal(device.states[1, :window].cpu(), cpu.states[1, :window])
    states = [torch.as_tensor(run.states[1, window : layer.state_bytes]).cpu() for run in (device, cpu)]
    torch.testing.assert_close(states[0].view(torch.float32), states[1].view(torch.float32))


def test_a_row_has_the_same_bits_alone_in_chunks_and_replayed_from_a_tree_beside_others() -> None:
    dtype = torch.bfloat16
    run, x, y = DeviceRun(new_layer(dtype), dtype), rows(9, dtype), rows(2, dtype, seed=2)
    whole = run.text(x, 0, 1)
    assert torch.equal(torch.cat([run.text(row[None], int(at > 0) * 2, 2) for at, row in enumerate(x)]), whole)
    assert torch.equal(run.states[2], run.states[1])
    run.text(x[:3], 0, 3)
    before, parents, spine = run.states[3].clone(), [-1, 0, 0, 2, 2, 4, 4, 5], [0, 2, 4, 5]
    drafted = y[[0] * 8]
    drafted[spine] = x[3:7]
    other = StateRows([], range(-1, 1), [], 2, [0, 4], [2])
    found = run(torch.cat([y, drafted]), [other, StateRows([], parents, range(8), 0, [3], [])])
    assert torch.equal(found[2:][spine], whole[3:7])
    assert torch.equal(run.states[3], before), "drafts change no state"
    kept = StateRows(spine, range(-1, 5), [], 6, [3, 5, 3], [5, 6])
    assert torch.equal(run(torch.cat([x[7:], y]), [kept, other])[:2], whole[7:])
    assert torch.equal(run.states[3], run.states[1])
    run.text(x[:8], 0, 2)
    assert torch.equal(run.states[5], run.states[2])


def test_a_forward_that_runs_in_slices_gives_the_same_bits_and_states() -> None:
    run, x = DeviceRun(new_layer(torch.float32), torch.float32), rows(14)
    run.text(x[:4], 0, 1)
    parents = [-1, 0, 0, 1, 1, 3, 2]
    run(x[4:7], [StateRows([], parents[:3], range(3), 0, [1], [])])
    text = StateRows([0, 2], range(-1, 8), [], 9, [1, 2, 3], [5, 9])
    tree = StateRows([0, 2], [-1, 0, *(parent + 2 for parent in parents)], range(3, 10), 2, [1, 4], [2])
    for request, goals in ((text, [2, 3]), (tree, [4])):
        whole = run(x[7:], [request])
        states = run.states[goals]
        run.states[goals] = 255
        slices = [cut(request, begin, end) for begin, end in ((0, 2), (2, 3), (3, 7))]
        found = [run(x[7:][at], [part]) for at, part in zip(([0, 1], [2], range(3, 7)), slices, strict=True)]
        assert torch.equal(torch.cat(found), whole)
        assert torch.equal(run.states[goals], states)


def test_states_are_loaded_and_stored_where_a_tree_branches_alone() -> None:
    text = StateRows([], range(-1, 4), [], 5, [3, 8, 9], [2, 5])
    stays = (HELD, HELD)
    assert held_steps(text) == [(0, ~3, HELD), (1, HELD, ~8), (2, *stays), (3, *stays), (4, HELD, ~9)]
    chain = StateRows([], [-1, 0, 1, 2], [], 1, [5, 7], [1])
    assert held_steps(chain) == [(0, ~5, ~7), (1, *stays), (2, *stays), (3, HELD, NOWHERE)]
    branches = StateRows([], [-1, 0, 0, 1, 2], [], 0, [5], [])
    leaf = (HELD, NOWHERE)
    assert held_steps(branches) == [(0, ~5, 0), (1, *stays), (3, *leaf), (2, 0, HELD), (4, *leaf)]


def test_a_program_that_holds_the_latest_state_takes_every_node_with_that_of_its_parent() -> None:
    chance = random.Random(3)
    for nodes in [1, 2, 5, 20, 60] * 10:
        parents = [-1] + [chance.randrange(max(0, node - 6), node) for node in range(1, nodes)]
        request = StateRows([], parents, [], nodes > 5, [5, 7][: 1 + (nodes > 5)], [1][: nodes > 5])
        states, held = {~5: -1}, None
        for row, source, goal in held_steps(request):
            held = held if source == HELD else states[source]
            assert held == parents[row]
            if goal != NOWHERE:
                held = row
            if goal not in (HELD, NOWHERE):
                states[goal] = row
        assert steps_of(request)[1] <= most_levels(nodes)
        assert states.get(~7, 0) == 0, "what is committed is stored"


def test_a_comb_needs_few_states_in_scratch() -> None:
    """At each node of its spine, the branch that is not the largest comes first."""
    parents, spine = [-1], 0
    for _ in range(50):
        row = len(parents)
        parents += [spine, spine, row + 1]
        spine = row
    assert steps_of(StateRows([], parents, [], 0, [1], []))[1] <= 3
