"""A gated delta net beside the formula, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.state.delta import GatedDelta
from engine.kernels.state.walk import StateRows
from tests.engine.kernels.state.layer_run import LayerRun, Matrix

HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 48, 2, 4, 32, 48, 4
CHANNELS, MADE = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUE_HEADS * VALUE_DIM
TYPES = [torch.float32, torch.bfloat16]


def new_layer(dtype: torch.dtype, key_head_of: Sequence[int] = (0, 0, 1, 1)) -> GatedDelta:
    torch.manual_seed(0)
    return GatedDelta(
        inputs=Matrix((torch.randn(CHANNELS + MADE, HIDDEN) * 0.3).to(dtype)),
        gates=Matrix((torch.randn(2 * VALUE_HEADS, HIDDEN) * 0.3).to(dtype)),
        out=Matrix(torch.randn(HIDDEN, MADE)),
        taps=torch.randn(TAPS, CHANNELS) * 0.5,
        decay=-torch.rand(VALUE_HEADS) * 4,
        dt_bias=torch.randn(VALUE_HEADS),
        norm=torch.rand(VALUE_DIM) + 0.5,
        epsilon=1e-6,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        key_head_of=torch.tensor(key_head_of, dtype=torch.int32),
        width=dtype.itemsize,
    )


def new_run(dtype: torch.dtype = torch.float32) -> LayerRun:
    return LayerRun(new_layer(dtype), HIDDEN, dtype)


def rows(count: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_formula(layer: GatedDelta, x: Tensor) -> Tensor:
    """[rows, MADE] float32: the definition, one row after the other."""
    inputs, gates = layer.inputs(x).float(), layer.gates(x).float()
    mixed, z = inputs[:, :CHANNELS], inputs[:, CHANNELS:].view(-1, VALUE_HEADS, VALUE_DIM)
    padded = torch.cat([torch.zeros(TAPS - 1, CHANNELS), mixed])
    mixed = F.silu(sum(layer.taps[tap] * padded[tap : tap + len(x)] for tap in range(TAPS)))
    q, k, v = mixed.split([KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, MADE], dim=1)
    q, k = (F.normalize(part.view(-1, KEY_HEADS, KEY_DIM), dim=-1)[:, layer.key_head_of.long()] for part in (q, k))
    v, q = v.view(-1, VALUE_HEADS, VALUE_DIM), q * KEY_DIM**-0.5
    beta, decay = (
        gates[:, :VALUE_HEADS].sigmoid(),
        (layer.decay * F.softplus(gates[:, VALUE_HEADS:] + layer.dt_bias)).exp(),
    )
    state, found = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM), []
    for row in range(len(x)):
        state = state * decay[row, :, None, None]
        delta = beta[row, :, None] * (v[row] - torch.einsum("hkv,hk->hv", state, k[row]))
        state = state + k[row, :, :, None] * delta[:, None]
        o = torch.einsum("hkv,hk->hv", state, q[row])
        found.append(F.rms_norm(o, (VALUE_DIM,), layer.norm, layer.epsilon) * F.silu(z[row]))
    return torch.stack(found).flatten(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("key_head_of", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_a_text_gives_what_the_formula_says(dtype: torch.dtype, key_head_of: Sequence[int]) -> None:
    layer, x = new_layer(dtype, key_head_of), rows(40, dtype)
    found = LayerRun(layer, HIDDEN, dtype).text(x, 0, 1)
    expected = by_formula(layer, x)
    assert (found.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_alone_and_in_chunks(dtype: torch.dtype) -> None:
    run, x = new_run(dtype), rows(20, dtype)
    alone = run.one_by_one(x, 1)
    first = run.text(x[:13], 0, 2)
    assert torch.equal(torch.cat([first, run.text(x[13:], 2, 3)]), alone)
    assert np.array_equal(run.states[3], run.states[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_node_has_the_bits_of_its_path_read_as_a_text(dtype: torch.dtype) -> None:
    run, x = new_run(dtype), rows(12, dtype)
    run.text(x[:5], 0, 1)
    before, parents = run.states[1].copy(), [-1, 0, 0, 1, 1, 3, 2]
    found = run(x[5:], [StateRows([], parents, range(7), 0, [1], [])])
    assert np.array_equal(run.states[1], before), "drafts change no state"
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert torch.equal(run.text(x[5:][path], 1, 2)[-1], found[node])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("goal", [1, 4])
def test_kept_rows_are_replayed_to_the_bits_of_a_text(dtype: torch.dtype, goal: int) -> None:
    run, x = new_run(dtype), rows(12, dtype)
    run.text(x[:5], 0, 1)
    run(x[5:11], [StateRows([], [-1, 0, 0, 1, 3, 3], range(10, 16), 0, [1], [])])
    path = [0, 1, 3, 5]
    found = run(x[11:], [StateRows([10 + node for node in path], range(-1, 4), [9], 4, [1, goal], [4])])
    text = torch.cat([x[:5], x[5:11][path], x[11:]])
    run.text(text[:-1], 0, 2)
    assert np.array_equal(run.states[goal], run.states[2])
    assert torch.equal(found[0], run.text(text, 0, 3)[-1])


def test_a_state_within_a_text_is_that_of_its_beginning() -> None:
    run, x = new_run(), rows(12)
    run(x, [StateRows([], range(-1, 11), [], 12, [0, 1, 2], [7, 12])])
    run.text(x[:7], 0, 3)
    assert np.array_equal(run.states[1], run.states[3])
    run.text(x, 0, 4)
    assert np.array_equal(run.states[2], run.states[4])


def test_a_state_is_replayed_over_itself_after_one_within_was_stored_elsewhere() -> None:
    run, x = new_run(), rows(12)
    run.text(x[:6], 0, 1)
    run(x[6:10], [StateRows([], range(-1, 3), range(4), 0, [1], [])])
    run(x[10:11], [StateRows(range(4), range(-1, 4), [4], 4, [1, 2, 1], [1, 4])])
    run.text(x[:7], 0, 3)
    run.text(x[:10], 0, 4)
    assert np.array_equal(run.states[2], run.states[3])
    assert np.array_equal(run.states[1], run.states[4])


def test_requests_do_not_see_each_other() -> None:
    run, x, y = new_run(), rows(9), rows(5, seed=2)
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
