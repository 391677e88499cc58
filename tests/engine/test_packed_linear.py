from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.packed_linear import ROWS, PackedLinear, _has_packing, pack_linears

pytestmark = pytest.mark.skipif(not _has_packing(), reason="this build of torch has no packed product of MKL")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 33, 64, 65])
def test_it_gives_what_the_stock_layer_gives(rows: int, bias: bool) -> None:
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(1, rows, 24)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


def test_a_layout_is_made_once_for_each_number_of_rows() -> None:
    packed = PackedLinear(nn.Linear(24, 40))
    with torch.no_grad():
        for rows in (2, 8, 3, ROWS[-1] + 1, 9):
            packed(torch.randn(rows, 24))
    assert sorted(packed._packs) == [8, 16]


def test_only_plain_float32_layers_are_replaced() -> None:
    class Model(nn.Sequential):
        device, dtype = torch.device("cpu"), torch.float32

    class OwnLinear(nn.Linear):
        pass

    model = Model(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), OwnLinear(4, 4))
    pack_linears(model)
    assert [type(m).__name__ for m in model.modules() if not list(m.children())] == [
        "PackedLinear",
        "PackedLinear",
        "OwnLinear",
    ]
    half = Model(nn.Linear(4, 4))
    half.dtype = torch.bfloat16
    pack_linears(half)
    assert type(half[0]) is nn.Linear
