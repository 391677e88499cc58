"""Rotary positions that are a function of the position alone.

With LongRoPE and dynamic NTK, `transformers` chooses the frequencies of all positions in a forward by the largest of
them. Keys that were cached before keep the old rotation, and requests beside it in the batch get the new one. So the
frequencies are held at those of texts up to the limit that is served (`engine.model.loading.steady_context`).
"""

from __future__ import annotations

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


def cosines_sines(rotary: Any, first: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `first` to `end`, [positions, rotated / 2] float32 each."""
    of_chunks = []
    for start in range(first, end, _CHUNK):  # both halves of a chunk are the same
        positions = torch.arange(start, min(start + _CHUNK, end), device=device)[None]
        whole = rotary(torch.zeros(1, device=device), positions)
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
