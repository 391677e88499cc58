"""Notes what depends on torch's default type, which belongs to the whole process and changes while another thread makes
a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_CASTS = {"float", "double", "half", "bfloat16"}


class DefaultTyped(TorchFunctionMode):
    """Notes, while active, the functions that made floats of neither floats nor a named type."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), getattr(func, "__name__", str(func))
        floats = isinstance(made, Tensor) and made.is_floating_point()
        if floats and name not in _CASTS and not any(map(_settles, tree_leaves((args, kwargs)))):
            self.seen.add(name)
        return made


def _settles(value: Any) -> bool:
    """Whether an argument settles the type of the result."""
    return isinstance(value, torch.dtype) or (isinstance(value, Tensor) and value.is_floating_point())
