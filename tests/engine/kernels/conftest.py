"""The threads that kernels run on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def threads() -> int:
    """Return the number of threads for `use_threads`, which a test's parameter of that name replaces."""
    return 2


@pytest.fixture
def use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
