from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.packed_linear import PackedLinear, _can_pack, pack, pack_linears

pytestmark = pytest.mark.skipif(not _can_pack(torch.float32), reason="this build of torch has no packed product")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 65])
def test_it_gives_what_the_stock_layer_gives(rows: int, bias: bool, dtype: torch.dtype) -> None:
    if (packed := pack(torch.empty(40, 24, dtype=dtype))) is None:
        pytest.skip(f"no packed product for {dtype} here")
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    packed = pack(linear.weight)
    assert packed is not None
    x = torch.randn(1, rows, 24, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear, packed)(x), linear(x))


def test_only_plain_layers_of_types_it_can_multiply_are_replaced() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), OwnLinear(4, 4), nn.Linear(4, 4).half())
    pack_linears(model)
    assert [type(m).__name__ for m in model.modules() if not list(m.children())] == [
        "PackedLinear",
        "PackedLinear",
        "OwnLinear",
        "Linear",
    ]
