"""The shapes of published models, from their configurations: what a file of random weights needs to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

_GRANITE = {
    "attention.scale": 1 / 64,
    "residual_scale": 0.246,
    "logit_scale": 3.0,
    "embedding_scale": 12.0,
    "rope.scaling.finetuned": False,
}
_GEMMA4 = {
    "attention.sliding_window": 1024,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope.freq_base_swa": 10_000.0,
}
_GPT_OSS = {
    "context_length": 131_072,
    "attention.sliding_window": 128,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}


def every_fourth(layer: int) -> bool:
    return layer % 4 == 3


def every(layer: int) -> bool:
    return layer >= 0


@dataclass(frozen=True)
class Shape:
    """The numbers of a model. inner: rows of an MLP's first matrix, or of an expert's; experts, used: 0 without them;
    shared: rows of the expert that every token uses. groups, state_heads, state_dim, state_head_dim: of the layers with
    a state, which are those that do not attend. wide_kv_heads, wide_head_dim: of the layers without a window, where
    they have others and no values. tied: embeddings and output are one matrix. mtp: a draft head comes in the file, one
    more layer that attends. more: metadata of its own.
    """

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    attends: Callable[[int], bool] = every
    groups: int = 0
    state_heads: int = 0
    state_dim: int = 128
    state_head_dim: int = 128
    experts: int = 0
    used: int = 0
    shared: int = 0
    wide_kv_heads: int = 0
    wide_head_dim: int = 0
    tied: bool = True
    mtp: bool = False
    rope_theta: float = 1e7
    rope_part: int = 1
    more: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def wide(self, layer: int) -> bool:
        """Return whether a layer of Gemma 4 has no window: every sixth one, and the last."""
        return bool(self.wide_head_dim) and (layer % 6 == 5 or layer == self.layers - 1)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the number of a layer's heads of keys, and the numbers in each."""
        return (self.wide_kv_heads, self.wide_head_dim) if self.wide(layer) else (self.kv_heads, self.head_dim)

    @property
    def state_inner(self) -> int:
        """The values that a layer with a state passes on."""
        return self.state_heads * self.state_head_dim


def _qwen(architecture: str = "qwen35", **numbers: Any) -> Shape:
    """Return a shape of Qwen3.5: every fourth layer attends, the others are gated delta nets."""
    more = {"full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]}
    common: dict[str, Any] = {
        "head_dim": 256,
        "vocabulary": 248_320,
        "attends": every_fourth,
        "groups": 16,
        "rope_part": 4,
        "mtp": True,
    }
    return Shape(architecture, more=MappingProxyType(more), **common | numbers)


SHAPES = {
    "qwen3.5-0.8b": _qwen(layers=24, hidden=1024, inner=3584, heads=8, kv_heads=2, state_heads=16),
    "qwen3.5-4b": _qwen(layers=32, hidden=2560, inner=9216, heads=16, kv_heads=4, state_heads=32),
    "qwen3.5-9b": _qwen(layers=32, hidden=4096, inner=12_288, heads=16, kv_heads=4, state_heads=32, tied=False),
    "qwen3.5-35b-a3b": _qwen(
        "qwen35moe", layers=40, hidden=2048, inner=512, heads=16, kv_heads=2, state_heads=32, experts=256, used=8,
        shared=512, tied=False,
    ),
    "granite-4.0-h-350m": Shape(
        "granitehybrid", layers=32, hidden=768, inner=2048, heads=12, kv_heads=4, head_dim=64, vocabulary=100_352,
        attends={10, 13, 17, 27}.__contains__, groups=1, state_heads=48, state_head_dim=32, rope_theta=1e4,
        more=MappingProxyType(_GRANITE),
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", layers=24, hidden=2880, inner=2880, heads=64, kv_heads=8, head_dim=64, vocabulary=201_088,
        experts=32, used=4, tied=False, rope_theta=150_000.0, more=MappingProxyType(_GPT_OSS),
    ),
    "gemma-4-12b": Shape(
        "gemma4", layers=48, hidden=3840, inner=15_360, heads=16, kv_heads=8, head_dim=256, vocabulary=262_144,
        wide_kv_heads=1, wide_head_dim=512, rope_theta=1e6, more=MappingProxyType(_GEMMA4),
    ),
    "llama-3.1-8b": Shape(
        "llama", layers=32, hidden=4096, inner=14_336, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256,
        tied=False, rope_theta=500_000.0,
    ),
}  # fmt: skip


def shape_of(name: str, layers: int | None) -> Shape:
    """Return the shape of that name, with only its first layers if a number is given."""
    return SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
