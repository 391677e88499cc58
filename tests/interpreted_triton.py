"""Triton's interpreter, without what it does again at every call and every operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch


@cache
def replace_language_once() -> None:
    """Replace the language once for each module, for as long as this process lives. Before each launch, and each call
    of a function within one, the interpreter would go through the whole language and replace its functions by
    interpreted ones, which takes most of its time.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    interpreter = import_module("triton.runtime.interpreter")
    change: Callable[[Any], Any] = interpreter._patch_lang
    numpy_type: Callable[[Any], Any] = interpreter._get_np_dtype
    replaced, types = set[str](), dict[str, Any]()

    def replace_once(function: Any) -> SimpleNamespace:
        module = function.__globals__["__name__"]
        if module not in replaced:
            replaced.add(module)
            change(function)
        return SimpleNamespace(restore=lambda: None)

    def numpy_type_once(of: Any) -> Any:
        if (name := of.scalar.name) not in types:
            types[name] = numpy_type(of)
        return types[name]

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    dot: Callable[..., Any] = builder.create_dot

    def dot_by_rows(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Multiply each row by itself, as a GPU does: on some processors numpy gives a row other bits beside others. So
        numpy gets a stack of matrices of one row each.
        """
        rows, sums = (handle(of.data.reshape(len(of.data), 1, -1), of.dtype) for of in (a, d))
        return handle(dot(self, rows, b, sums, *options).data[:, 0], d.dtype.scalar)

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = numpy_type_once
    builder.create_dot = dot_by_rows
    # Each sum of integers is computed again in 64 bits, for an assertion that is made in debug mode alone.
    made = interpreter.interpreter_builder
    if not made.options.debug:
        made.options = replace(made.options, sanitize_overflow=False)
    _make_types_once()


def _make_types_once() -> None:
    """Make each shape and each common type once: each operation gives its result a type of its own."""
    core, semantic = import_module("triton.language.core"), import_module("triton.language.semantic").TritonSemantic
    interpreted = import_module("triton.runtime.interpreter").interpreter_semantic
    constexpr, block, scalar, tensor = core.constexpr, core.block_type, core.dtype, core.tensor
    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    validate: Callable[[Any], int] = core.validate_block_shape
    equal: Callable[[Any, Any], bool] = scalar.__eq__
    broadcast: Callable[[Any, Any, Any], Any] = semantic.broadcast_impl_value
    check: Callable[..., Any] = semantic.binary_op_type_checking_impl
    containers = (list, tuple, core.tuple)

    def unwrapped(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return unwrap(value) if isinstance(value, containers) else value

    @cache
    def sized(sizes: tuple[int, ...]) -> tuple[Any, Any, int, Any]:
        """Return the shapes of a type and of its tensors, and how many numbers there are."""
        count = validate(sizes)
        return core.tuple(sizes), core.tuple([constexpr(size) for size in sizes]), count, constexpr(count)

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if type(shape) is constexpr else shape
        self.element_ty = element_ty
        self.sizes = tuple([size.value if type(size) is constexpr else size for size in sizes])
        if not self.sizes:
            raise TypeError("0d block_type is forbidden")
        self.shape, _, self.numel, _ = sized(self.sizes)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, _, self.numel = sized(type.sizes if type.is_block() else ())

    def are_alike(a: Any, b: Any) -> bool:
        """Return whether both are blocks of one shape, or both numbers."""
        if a.type.is_block():
            return b.type.is_block() and bool(a.type.sizes == b.type.sizes)
        return not b.type.is_block()

    @wraps(broadcast)
    def broadcast_others(self: Any, a: Any, b: Any) -> Any:
        return (a, b) if are_alike(a, b) else broadcast(self, a, b)

    @lru_cache(4096)
    def constant(value: float, of: Any, sizes: tuple[int, ...]) -> Any:
        """Return a number as the check makes it of that type and shape."""
        like = tensor(None, block(of, sizes) if sizes else of)
        return broadcast(interpreted, interpreted.scalar_constant(value, of), like)[0]

    def as_constant(value: Any, like: Any) -> Any:
        """Return a number as the check makes it beside that tensor; None if it takes another type, or is refused."""
        kind, of = type(value), like.dtype
        if of.name in floats:
            fits = kind is int or kind is float
        else:
            fits = of.name in whole and kind is int and -(2**31) <= value < 2**31
        return constant(value, of, like.type.sizes if like.type.is_block() else ()) if fits else None

    @wraps(check)
    def check_others(self: Any, a: Any, b: Any, *options: Any, **named: Any) -> Any:
        """Operands of one shape and one of these types are what is computed with, whatever the operation; and a number
        takes the type and shape of a tensor beside it, if it is of the same kind.
        """
        if type(a) is tensor and type(b) is tensor:
            if a.dtype is b.dtype and a.dtype.name in alike and are_alike(a, b):
                return a, b
        elif type(a) is tensor and (made := as_constant(b, a)) is not None:
            return a, made
        elif type(b) is tensor and (made := as_constant(a, b)) is not None:
            return made, b
        return check(self, a, b, *options, **named)

    floats, whole = {"fp32", "fp64"}, {"int32", "int64"}
    alike = floats | whole | {"int1"}
    core._unwrap_if_constexpr = unwrapped
    block.__init__ = make_block
    block.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tensor.__init__ = make_tensor
    scalar.__eq__ = lambda self, other: self is other or equal(self, other)
    integers = frozenset(scalar.SINT_TYPES + scalar.UINT_TYPES)
    scalar.is_int = lambda self: self.name in integers
    semantic.broadcast_impl_value = broadcast_others
    semantic.binary_op_type_checking_impl = check_others
    semantic.computation_type_impl = cache(semantic.computation_type_impl)
