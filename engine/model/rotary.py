"""Rotary positions that are a function of the position alone.

With LongRoPE and dynamic NTK, `transformers` chooses the frequencies of all positions in a forward by the largest of
them. Keys that were cached before keep the old rotation, and requests beside it in the batch get the new one. So the
frequencies are held at those of texts up to the limit that is served (`engine.model.loading.steady_context`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 2048


def hold_frequencies(model: nn.Module) -> None:
    """Keep every rotary module of the model at the frequencies that it has for texts up to the served length."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            for layer_type in [name for name, one in kind.items() if _moves(one)]:
                _hold(module, f"{layer_type}_")
                kind[layer_type] = "default"
        elif isinstance(kind, str) and _moves(kind):
            _hold(module, "")
            module.rope_type = "default"


class RotaryTables:
    """Cosines and sines of all positions so far, a table for each kind of layer that the rotary module tells apart.

    tables: [positions, width] float32 each, first cosines, then sines.
    """

    def __init__(self, rotary: Any, layer_types: Sequence[str] | None):
        self._rotary, self._types = rotary, layer_types
        told_apart = isinstance(getattr(rotary, "rope_type", None), dict)
        self._kinds: list[str | None] = [*rotary.rope_type] if told_apart else [None]
        self.tables = [self._of(kind, 0, rounded_up(1)) for kind in self._kinds]
        self.width = self.tables[0].shape[1]

    def of_layer(self, layer: int) -> int:
        """The number of the layer's table."""
        return self._kinds.index(self._types[layer]) if len(self._kinds) > 1 and self._types else 0

    def reserve(self, positions: int) -> None:
        """Append positions; those that are there keep their values, because cached keys were rotated by them."""
        if positions > (held := len(self.tables[0])):
            more = [self._of(kind, held, rounded_up(positions)) for kind in self._kinds]
            self.tables = [torch.cat(parts) for parts in zip(self.tables, more, strict=True)]

    def shrink(self) -> None:
        """Release all but the first positions."""
        self.tables = [table[: rounded_up(1)].clone() for table in self.tables]

    def _of(self, kind: str | None, first: int, end: int) -> Tensor:
        return torch.cat(cosines_sines(self._rotary, first, end, torch.device("cpu"), kind), dim=1)


def cosines_sines(
    rotary: Any, first: int, end: int, device: torch.device, kind: str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `first` to `end`, [positions, rotated / 2] float32 each. kind: of layers."""
    kinds = () if kind is None else (kind,)
    of_chunks = []
    for start in range(first, end, _CHUNK):  # both halves of a chunk are the same
        positions = torch.arange(start, min(start + _CHUNK, end), device=device)[None]
        whole = rotary(torch.zeros(1, device=device), positions, *kinds)
        of_chunks.append([part[0, :, : part.shape[-1] // 2].float() for part in whole])
    cosines, sines = zip(*of_chunks, strict=True)
    return torch.cat(cosines), torch.cat(sines)


def rounded_up(positions: int) -> int:
    """The size of a table that holds `positions` positions."""
    return -(-positions // _CHUNK) * _CHUNK


def _moves(kind: str) -> bool:
    """Whether `transformers` updates the frequencies of this kind in its forward (`dynamic_rope_update`)."""
    return kind == "longrope" or "dynamic" in kind


def _hold(module: Any, prefix: str) -> None:
    """Undo what a forward may have changed."""
    getattr(module, f"{prefix}inv_freq").copy_(getattr(module, f"{prefix}original_inv_freq"))
