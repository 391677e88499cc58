"""A tensor that the verifier's thread gives to the drafter's, which works in a stream of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.wire.aside import OnDevice


class HandedOver(OnDevice):
    """A tensor that is ready once what was launched before it was handed over is done."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._made: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record()

    def take(self) -> Tensor:
        """Return the tensor. On a GPU this thread's stream waits for what made it, and nobody else does; its memory is
        given to no other tensor before what this stream has launched is done.
        """
        if self._made is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._made)
            self._tensor.record_stream(stream)
        return self._tensor
