"""A gated delta net of a stock model, as lean layers run it (`engine.model.cuda.delta_kernels`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine.kernels.state.windows import taps_of
from engine.model.cuda.delta_kernels import DeltaNet, LayerStates, run_delta
from engine.model.reader.mixers import gated_delta_structure
from engine.model.state_pool import StatePool
from engine.model.structure import OtherStructure


class LeanDelta:
    """parts: the products by their names, several over the same input together. index: among the layers with a state.
    Raises OtherStructure for a net that the kernels do not run, and AttributeError if a part is missing.
    """

    def __init__(self, net: Any, index: int):
        found = gated_delta_structure(net, "", None)
        if not hasattr(net, "in_proj_qkv"):
            raise OtherStructure(f"{type(net).__name__}, whose q, k, v and z are one matrix")
        if any(size & (size - 1) for size in (found.key_dim, found.value_dim)):
            raise OtherStructure(f"a gated delta net with heads of {found.key_dim} and {found.value_dim}")
        self._index = index
        self.parts: dict[str, list[nn.Linear]] = {
            "inputs": [net.in_proj_qkv, net.in_proj_z], "gates": [net.in_proj_b, net.in_proj_a], "out": [net.out_proj],
        }  # fmt: skip
        self.net = DeltaNet(
            taps=taps_of(net.conv1d.weight),
            decay=-net.A_log.detach().float().exp(),
            dt_bias=net.dt_bias.detach().float(),
            norm=net.norm.weight.detach().float(),
            epsilon=found.norm.epsilon,
            key_heads=found.key_heads,
            value_heads=found.value_heads,
            key_dim=found.key_dim,
            value_dim=found.value_dim,
        )

    def __call__(self, x: Tensor, products: dict[str, nn.Linear], states: StatePool, walk: Tensor) -> Tensor:
        """Return what the layer's last product multiplies. walk: see `engine.model.cuda.device_walk.walk_tensor`."""
        shape = states.shape
        places = shape.state_offsets[self._index], shape.row_offsets[self._index]
        inputs, gates = products["inputs"](x), products["gates"](x)
        return run_delta(self.net, inputs, gates, LayerStates(states.states, states.store, *places), walk)
