"""Triton's interpreter, without what it does again at every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    replace: Callable[[Any], Any] = interpreter._patch_lang
    numpy_type: Callable[[Any], Any] = interpreter._get_np_dtype
    replaced, types = set[str](), dict[str, Any]()

    def replace_once(function: Any) -> SimpleNamespace:
        module = function.__globals__["__name__"]
        if module not in replaced:
            replaced.add(module)
            replace(function)
        return SimpleNamespace(restore=lambda: None)

    def numpy_type_once(of: Any) -> Any:
        if (name := of.scalar.name) not in types:
            types[name] = numpy_type(of)
        return types[name]

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    dot: Callable[..., Any] = builder.create_dot

    def dot_by_rows(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Multiply each row by itself, as a GPU does: on some processors numpy gives a row other bits beside others."""
        parts = zip(*(np.split(of.data, len(of.data)) for of in (a, d)), strict=True)
        made = [dot(self, handle(row, a.dtype), b, handle(sums, d.dtype), *options).data for row, sums in parts]
        return handle(np.concatenate(made), d.dtype.scalar)

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = numpy_type_once
    builder.create_dot = dot_by_rows
