"""A matrix in memory, in the tiles that kernels read: packed from a file's blocks, and held once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.kernels.quant.embedding import read_rows
from engine.kernels.quant.layouts import CodeLayout, QuantLayout
from engine.kernels.quant.pack import Panel, packed


class TiledMatrix:
    """Panels of 16 outputs of matrices of one layout. tiles: [panels, tiles, bytes] uint8."""

    def __init__(self, panels: Sequence[Panel], code_layout: CodeLayout = CodeLayout.PAIRS):
        self.layout: QuantLayout = panels[0].matrix.layout
        self.inputs = panels[0].matrix.shape[1]
        self.code_layout = code_layout
        self.tiles: Tensor = packed(panels, code_layout)

    @property
    def panel_bytes(self) -> int:
        size: int = self.tiles[0].nbytes
        return size

    def rows(self, indices: Tensor) -> Tensor:
        """Return [indices, inputs] bfloat16: the rows of these outputs. Raises IndexError for any that
        does not exist.
        """
        return read_rows(self.layout, self.code_layout, self.tiles, self.inputs, indices)
