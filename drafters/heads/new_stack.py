"""Makes a head's layers a program of its device, that computes the rows of all requests at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from drafters.heads.stack import Stack, StackSpec, fits
from engine.model.cuda.usable import runs_kernels

if TYPE_CHECKING:
    from drafters.heads.cuda_stack import CudaStack

AnyStack: TypeAlias = "Stack | CudaStack"


def new_stack(spec: StackSpec) -> AnyStack | None:
    """Return the stack, or None where there is none for such layers: sessions then compute request by request."""
    if spec.first.device.type != "cpu":
        if not runs_kernels(spec.first.device) or spec.around or any(spec.windows):
            return None
        from drafters.heads.cuda_stack import CudaStack

        return CudaStack(spec)
    return Stack(spec) if fits(spec.first) and all(around.fits for around in spec.around) else None
