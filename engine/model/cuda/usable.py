"""Whether Triton's kernels run on a device: a Triton that can be imported may have no compiler, or one that fails."""

from __future__ import annotations

import sys
from functools import cache

import torch

from engine.core.errors import first_line


@cache
def runs_kernels(device: torch.device) -> bool:
    """Return whether one of our kernels compiles and runs there. If not, one line says why, once for each device."""
    try:
        from engine.model.cuda.noise_kernels import likeliest

        ids = torch.arange(4, device=device)
        likeliest(ids.float()[None], ids, 2)
    except Exception as error:  # a compiler may raise anything
        print(
            f"talon: Triton does not run on {device} ({first_line(error)}): heads are computed without its kernels, "
            "which takes longer; pip install --upgrade triton",
            file=sys.stderr,
        )
        return False
    return True
