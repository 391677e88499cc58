from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.gemm import onednn
from engine.kernels.gemm import product as product_module
from engine.kernels.gemm.onednn import _can_pack, cancelling, packed_product
from engine.kernels.gemm.product import PackedLinear, Product, pack_linears

pytestmark = pytest.mark.skipif(not _can_pack(torch.float32), reason="this build of torch has no packed product")


@pytest.fixture(autouse=True)
def _without_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_module, "multiplies", lambda dtype: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 65])
def test_it_gives_what_the_stock_layer_gives(rows: int, bias: bool, dtype: torch.dtype) -> None:
    if not _can_pack(dtype):
        pytest.skip(f"no packed product for {dtype} here")
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    x = torch.randn(1, rows, 24, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear, Product(linear.weight, linear.bias))(x), linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (40, 24)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    """With products whose true value is 0, so that all of the result is rounding."""
    torch.set_num_threads(threads)
    if not _can_pack(dtype):
        pytest.skip(f"no packed product for {dtype} here")
    x, weight = cancelling(*shape, dtype)
    product = Product(weight)
    if product.rows is None:
        pytest.skip("no number of rows gives the same bits here")
    expected = torch.cat([product(row[None]) for row in x])
    for rows in (2, 3, 15, 16, 17, 31, 33, 34, 47, 65, 130, 513, 700):
        order = torch.randperm(rows) % len(x)
        assert torch.equal(product(x[order]), expected[order])


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


@pytest.mark.parametrize("exact", [True, False])
def test_few_numbers_of_rows_are_multiplied_all_of_them_measured_at_load(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps half a megabyte for each, up to 1,024 of them."""
    tried, multiplied = set(), set()

    def counting(seen: set[int]) -> Callable[..., Tensor]:
        def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
            seen.add(len(x))
            return packed_product(x, packed, bias)

        return multiply

    linear = nn.Linear(48, 56, bias=False)  # of a shape that no other test has measured
    onednn._measure.cache_clear()
    with torch.no_grad():
        monkeypatch.setattr(onednn, "packed_product", counting(tried))
        layer = Product(linear.weight)
        monkeypatch.setattr(product_module, "packed_product", counting(multiplied))
        if not exact:
            layer.rows = None
        for rows in range(1, 513):
            assert len(layer(torch.zeros(rows, 48))) == rows
    assert multiplied and multiplied <= tried
    assert len(multiplied) < 60
