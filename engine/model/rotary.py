"""Rotary positions that are a function of the position alone.

With LongRoPE and dynamic NTK, `transformers` chooses the frequencies of all positions in a forward by the largest of
them. Keys that were cached before keep the old rotation, and requests beside it in the batch get the new one. So the
frequencies are held at those of texts up to the limit that is served (`engine.model.loading.steady_context`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

_CHUNK = 2048
_LAST_BIT = 2.0**-23


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


class Frequencies(msgspec.Struct, frozen=True):
    """Angles of positions. of_position: radians for each, of every pair of dimensions, float32. scaling: of cosines and
    sines.
    """

    of_position: tuple[float, ...]
    scaling: float

    @property
    def dims(self) -> int:
        """How many dimensions of a head are rotated."""
        return 2 * len(self.of_position)


def frequencies_of(rotary: Any) -> dict[str, Frequencies] | None:
    """Return the frequencies of a stock rotary module, keyed by layer type; "" if there is only one. None if its
    cosines and sines are not those of `RotaryTables`, to the bit; complex numbers have them from another function, and
    may differ in the last. A model without such a module rotates nothing.
    """
    if rotary is None:
        return {"": Frequencies((), 1.0)}
    kinds: list[str] = [*rotary.rope_type] if isinstance(getattr(rotary, "rope_type", None), dict) else [""]
    found = {}
    for kind in kinds:
        prefix = f"{kind}_" if kind else ""
        angles = getattr(rotary, f"{prefix}inv_freq").float().tolist()
        found[kind] = Frequencies(tuple(angles), float(getattr(rotary, f"{prefix}attention_scaling", 1.0)))
        stock = torch.cat(cosines_sines(rotary, 0, _CHUNK, torch.device("cpu"), kind or None), dim=1)
        allowed = _LAST_BIT * found[kind].scaling if _is_complex(rotary, *filter(None, [kind])) else 0.0
        if not bool((_table(found[kind], 0, _CHUNK) - stock).abs().max() <= allowed):
            return None
    return found


class RotaryTables:
    """Cosines and sines of all positions so far, a table for each of `kinds`.

    tables: [positions, width] float32 each, first cosines, then sines.
    """

    def __init__(self, kinds: Sequence[Frequencies]):
        self._kinds = kinds
        self.tables = [_table(kind, 0, rounded_up(1)) for kind in kinds]

    def reserve(self, positions: int) -> None:
        """Append positions; those that are there keep their values, because cached keys were rotated by them."""
        if positions > (held := len(self.tables[0])):
            more = [_table(kind, held, rounded_up(positions)) for kind in self._kinds]
            self.tables = [torch.cat(parts) for parts in zip(self.tables, more, strict=True)]

    def shrink(self) -> None:
        """Release all but the first positions."""
        self.tables = [table[: rounded_up(1)].clone() for table in self.tables]


def _table(kind: Frequencies, first: int, end: int) -> Tensor:
    """Return [positions, width] float32, of whole chunks."""
    of_position, chunks = torch.tensor(kind.of_position, dtype=torch.float32), []
    for start in range(first, end, _CHUNK):
        angles = torch.arange(start, start + _CHUNK).float()[:, None] * of_position
        chunks.append(torch.cat([angles.cos() * kind.scaling, angles.sin() * kind.scaling], dim=1))
    return torch.cat(chunks)


def cosines_sines(
    rotary: Any, first: int, end: int, device: torch.device, kind: str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `first` to `end`, [positions, rotated / 2] float32 each. kind: of layers."""
    kinds = () if kind is None else (kind,)
    of_chunks, pairs = [], len(getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq"))
    two = _angles(rotary, torch.arange(1, 3, device=device), *kinds)
    step = 2 if _repeats(two[0][0]) else 1
    for start in range(first, end, _CHUNK):  # where a row has every number twice, in halves or in turn, one is taken
        whole = _angles(rotary, torch.arange(start, min(start + _CHUNK, end), device=device), *kinds)
        of_chunks.append([part[0, :, : pairs * step : step].float() for part in whole])
    cosines, sines = zip(*of_chunks, strict=True)
    return torch.cat(cosines), torch.cat(sines)


def _angles(rotary: Any, positions: Tensor, *kinds: str) -> tuple[Tensor, Tensor]:
    """Return what a stock module makes of positions: two tensors, or one of complex numbers."""
    made = rotary(torch.zeros(1, dtype=torch.float32, device=positions.device), positions[None], *kinds)
    return (made.real, made.imag) if isinstance(made, Tensor) else made


def _is_complex(rotary: Any, *kinds: str) -> bool:
    """Return whether a stock module makes complex numbers."""
    return isinstance(rotary(torch.zeros(1), torch.arange(1)[None], *kinds), Tensor)


def _repeats(cosines: Tensor) -> bool:
    """Return whether neighbouring columns are equal, as where neighbouring dimensions are rotated. cosines: [positions,
    width].
    """
    return cosines.shape[1] % 2 == 0 and bool(torch.equal(cosines[:, ::2], cosines[:, 1::2]))


def rounded_up(positions: int) -> int:
    """Return the size of a table that holds `positions` positions."""
    return -(-positions // _CHUNK) * _CHUNK


def _moves(kind: str) -> bool:
    """Return whether `transformers` updates the frequencies of this kind in its forward (`dynamic_rope_update`)."""
    return kind == "longrope" or "dynamic" in kind


def _hold(module: Any, prefix: str) -> None:
    """Undo what a forward may have changed."""
    getattr(module, f"{prefix}inv_freq").copy_(getattr(module, f"{prefix}original_inv_freq"))
