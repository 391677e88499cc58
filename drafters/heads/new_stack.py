"""A head's layers as a program of its device, that computes the rows of all requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from drafters.heads.layers import Linear, RMSNorm
from drafters.heads.stack import Enters, Stack, StackLayer, fits

if TYPE_CHECKING:
    from drafters.heads.cuda_stack import CudaStack

AnyStack: TypeAlias = "Stack | CudaStack"


def new_stack(
    layers: Sequence[StackLayer],
    dtype: torch.dtype,
    head: Linear,
    enters: Enters,
    norm: RMSNorm | None = None,
    of_token: Tensor | None = None,
    entry: Linear | None = None,
    keeps: bool = False,
) -> AnyStack | None:
    """See `Stack`. None where there is none for such layers: sessions then compute request by request."""
    decoder = layers[0].decoder
    if decoder.device.type != "cpu":
        try:
            from drafters.heads.cuda_stack import CudaStack
        except ImportError:  # no Triton
            return None
        return CudaStack(layers, dtype, head, enters, norm, of_token, entry, keeps)
    if not fits(decoder):
        return None
    return Stack(layers, dtype, head, enters, norm, of_token, entry, keeps)
