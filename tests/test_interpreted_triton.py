"""What is made once for Triton's interpreter is what the interpreter would make each time."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.model.cuda import triton_attention
from tests.interpreted_triton import replace_language_once

pytestmark = pytest.mark.skipif(not triton_attention._INTERPRETED, reason="nothing is interpreted here")
NUMBERS = (0, 1, -3, 2**31, -(2**40), True, 0.0, -0.0, 0.5, 1e300, float("nan"), float("-inf"))
TYPES = ("int1", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")


def semantic() -> Any:
    """Return what checks operands."""
    replace_language_once()
    return import_module("triton.runtime.interpreter").interpreter_semantic


def tensors() -> list[Any]:
    """Return numbers and blocks of all types, and a pointer and a block of pointers."""
    core, interpreter = import_module("triton.language.core"), import_module("triton.runtime.interpreter")
    types = [getattr(core, name) for name in TYPES] + [core.pointer_type(core.float32)]
    found = []
    for of, shape in product(types, ((), (4,), (1, 4), (2, 4))):
        data = np.ones(shape or (1,), interpreter._get_np_dtype(of))
        found.append(core.tensor(interpreter.TensorHandle(data, of), core.block_type(of, shape) if shape else of))
    return found


def outcome(function: Callable[..., Any], *given: Any, **options: Any) -> object:
    """Return types, shapes and bits of what a function returns; or its error."""
    try:
        with np.errstate(all="ignore"):
            made = function(semantic(), *given, **options)
    except Exception as error:
        return type(error), str(error)
    return [
        (str(one.type), [size.value for size in one.shape], one.numel.value, one.handle.data.dtype.name,
         one.handle.data.shape, one.handle.data.tobytes())
        for one in made
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"div_or_mod": True}, {"allow_lhs_ptr": True, "allow_rhs_ptr": True}], ids=str)
def test_operands_are_those_that_triton_makes(options: dict[str, bool]) -> None:
    check, operands = type(semantic()).binary_op_type_checking_impl, tensors()
    for one, other in [*product(operands, [*operands, *NUMBERS]), *product(NUMBERS, operands)]:
        for _ in range(2):  # the second is remembered
            found = outcome(check, one, other, **options)
        assert found == outcome(check.__wrapped__, one, other, **options), (one, other)


def test_shapes_are_broadcast_as_triton_does() -> None:
    broadcast = type(semantic()).broadcast_impl_value
    for one, other in product(tensors(), repeat=2):
        assert outcome(broadcast, one, other) == outcome(broadcast.__wrapped__, one, other)
