"""`python -m tests.engine.model.capture_work`: runs what CUDA graphs capture on a device that has no memory.

Its tensors have shapes, types and a device, but no values. So reading one on the host fails, as it does under capture,
and so does mixing devices. A process of its own, since torch registers the device for good. A JSON line for each work:
name, and error ("" if there is none).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from engine.core.batch import Batch, Segment
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Rule
from engine.kernels.layer.weights import Norm
from engine.model import stock
from engine.model.cuda import delta_kernels, layer_kernels
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.cuda.delta_kernels import DeltaNet
from engine.model.cuda.device_walk import walk_tensor
from engine.model.cuda.lean_layers import LeanLayers
from engine.model.cuda.padded_rows import PaddedRows
from engine.model.cuda.triton_attention import TritonAttention
from engine.model.decoder_layer import state_shape
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.masked import MaskedForward
from engine.model.masked_cache import MaskedCache
from engine.model.reader.decoder import describe
from engine.model.state_pool import StatePool
from tests.engine.tiny_families import build

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {}, "llama 3.1": {"rope_parameters": LLAMA3_ROPE}, "llama with yarn": {"rope_parameters": YARN},
    "qwen2": {}, "qwen3": {}, "mistral with a window": {}, "gemma2": {}, "gemma3": {}, "phi3": {}, "gpt_neox": {},
    "olmo2": {}, "granite": {}, "gpt-oss": {}, "qwen3 with experts": {},
}  # fmt: skip
"""What a name adds to its family of `tests.engine.tiny_families`."""
ROWS = 4
_setup_privateuseone_for_python_backend("gpux")
DEVICE = torch.device("gpux:0")
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def on_device(of: Tensor) -> Tensor:
    """A tensor of that shape and type on the device."""
    return FakeTensor(MODE, torch.empty(of.shape, dtype=of.dtype, device="meta"), DEVICE)


def move(owner: Any) -> Any:
    """`owner` on the device, with all tensors that are reached from it."""
    if isinstance(owner, Tensor):
        return on_device(owner)
    if isinstance(owner, list | tuple):
        return type(owner)(move(part) for part in owner)
    if isinstance(owner, dict):
        return {name: move(part) for name, part in owner.items()}
    if isinstance(owner, nn.Module):
        for module in owner.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(on_device(weight), requires_grad=False)
            module._buffers.update({name: on_device(held) for name, held in module._buffers.items()})
    return owner


def model_of(name: str) -> Any:
    family = "llama" if name.startswith("llama") else name
    return build(family, "bfloat16", **TARGETS.get(name, {}))


def target_forward(name: str, features: tuple[int, ...]) -> None:
    """Run what `CudaForward` captures, but for the kernels."""
    model = model_of(name)
    model.set_attn_implementation(stock.NAME)
    move(model)
    config = model.config
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = KVShape(config.num_hidden_layers, kv_heads or heads, head_dim, torch.bfloat16)
    with MODE, torch.inference_mode():
        forward = CudaForward(model, KVPool(shape, 60, DEVICE), heads // shape.kv_heads)
        cache = KVCache(forward.pool)
        cache.reserve(40)
        batch = Batch.of([Segment.of_text([*range(30)], cache, "all")])
        rows = PaddedRows.of(batch, 0, 30, 64, forward.attention)
        assert_on_device(forward._run(features, *map(on_device, rows)))


def moved(norm: Norm) -> Norm:
    return Norm(on_device(norm.weight), norm.epsilon)


def lean_layers_forward(name: str) -> None:
    """Run what `CudaForward` captures with lean layers, but for the kernels."""
    model = model_of(name)
    heads, kv_heads, structure = model.config.num_attention_heads, model.config.num_key_value_heads, describe(model)
    shape, states = KVShape(*structure.key_sizes[0], torch.bfloat16), state_shape(structure, torch.bfloat16)
    rules = dict.fromkeys(range(3), Rule(0.1))

    def pool_on(device: torch.device) -> KVPool:
        return KVPool(shape, 60, device, None if states is None else StatePool(states, 8, device))

    with torch.inference_mode():
        lean = LeanLayers(model, pool_on(torch.device("cpu")), heads // kv_heads, rules, 64)
    move(model)
    with MODE, torch.inference_mode():
        forward = CudaForward(model, pool_on(DEVICE), heads // kv_heads)
        lean.pool, lean._cos_sin, lean._norm = forward.pool, on_device(lean._cos_sin), moved(lean._norm)
        for layer in lean._layers:
            layer.input_norm, layer.inner_norm = moved(layer.input_norm), moved(layer.inner_norm)
            layer.norms = None if layer.norms is None else on_device(layer.norms)
            move(nn.ModuleDict(layer.products))
            if layer.delta_net is not None:
                layer.delta_net.net = DeltaNet(*map(move, layer.delta_net.net))
        forward.lean, cache = lean, KVCache(forward.pool)
        cache.reserve(40)
        text = Segment.of_text([*range(30)], cache, "all")
        rows = PaddedRows.of(Batch.of([text]), 0, 30, 64, forward.attention)
        walk = [] if cache.state is None else [walk_tensor([cache.state.rows(text)], 64)]
        assert_on_device(forward._run((0, 2), *map(on_device, [*walk, *rows])))


def masked_forward(name: str) -> None:
    """What `MaskedForward` captures."""
    model = move(model_of(name))
    with MODE, torch.inference_mode():
        forward, cache = MaskedForward(model, "any"), MaskedCache(3, 256, fixed=True)
        ids, places = (torch.zeros(1, ROWS, dtype=torch.int64, device=DEVICE) for _ in range(2))
        mask = torch.zeros(1, 1, ROWS, 256, dtype=torch.bfloat16, device=DEVICE)
        assert_on_device(forward._forward_into(cache, (0, 2), ids, places, mask, places[0]))


def assert_on_device(found: tuple[Tensor, ...]) -> None:
    assert {tensor.device for tensor in found} == {DEVICE}


def attempt(name: str, work: Callable[..., None], *given: Any) -> None:
    try:
        work(*given)
        error = ""
    except Exception as failure:
        error = "".join(traceback.format_exception(failure)[-3:])
    print(json.dumps({"name": name, "error": error}))


class NotLaunched:
    """A Triton kernel where there is nothing to launch it on."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: None


def host_window(marker: Tensor | None) -> int:
    """As `stock._window`: it may read its marker, which is on the host, but there are no values here."""
    assert marker is None or marker.device.type == "cpu"
    return 0


def host_sync() -> None:
    """Not captured: shows that reading a result is an error here."""
    with MODE:
        torch.zeros(2, device=DEVICE).sum().item()


def mixed_devices() -> None:
    with MODE:
        torch.zeros(2, device=DEVICE) + torch.zeros(2)


def replace(module: ModuleType, **names: Any) -> None:
    for name, value in names.items():
        setattr(module, name, value)


def main() -> None:
    TritonAttention.__call__ = lambda self, rows, layer, rule, query: torch.empty_like(query)
    kernels = {name: NotLaunched() for name in ("norm", "enter", "gate", "open_gates")}
    replace(layer_kernels, **kernels)
    walked = {name: NotLaunched() for name in ("enter_rows", "walk_states", "leave_rows", "keep_windows")}
    replace(delta_kernels, **walked)
    replace(stock, _window=host_window)
    attempt("host sync", host_sync)
    attempt("mixed devices", mixed_devices)
    for name in TARGETS:
        attempt(f"target {name}", target_forward, name, (0, 2))
    for name in ("llama", "qwen3", "qwen3.5"):  # which lean layers alone run
        attempt(f"lean {name}", lean_layers_forward, name)
    attempt("target without features", target_forward, "llama", ())
    for name in ("llama", "gpt_neox"):
        attempt(f"masked {name}", masked_forward, name)


if __name__ == "__main__":
    main()
