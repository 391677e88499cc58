"""Triton's interpreter, without what it does again at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _language_is_replaced_once() -> Iterator[None]:
    """Replace the language once for each module. Before each launch, and each call of a function within one, the
    interpreter would go through the whole language and replace its functions by interpreted ones, which takes most of
    its time.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    interpreter = import_module("triton.runtime.interpreter")
    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: dict[str, Any] = {}

    def replace_once(function: Any) -> SimpleNamespace:
        module = function.__globals__["__name__"]
        if module not in replaced:
            replaced[module] = replace(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
    for scope in reversed(replaced.values()):
        scope.restore()
