"""The tensors and the metadata of a shape's GGUF file, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from .shape import Shape, every

_TAPS = 4  # rows that a convolution reads
Kind = Literal["matrix", "fine", "output", "experts", "numbers", "norm", "decay", "factors"]
_NORMS = {  # of a layer, where they are not those of most
    "gemma4": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    "granitehybrid": ("attn_norm", "ffn_norm"),
    "llama": ("attn_norm", "ffn_norm"),
}


class FileTensor(NamedTuple):
    """kind: a matrix in blocks, `fine` where a mix of types has more bits, `output` where it has most; or float32:
    `numbers` around 0, a norm's factors, a state's decay, or the factors of rotary frequencies.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind


def metadata_of(shape: Shape) -> dict[str, Any]:
    """Return a file's metadata, without the architecture that each name begins with."""
    attending = [shape.attends(layer) for layer in range(shape.layers)]
    by_layer = [shape.heads_of(layer)[0] * attends for layer, attends in enumerate(attending)]
    listed = shape.architecture == "granitehybrid" or shape.wide_head_dim
    found: dict[str, Any] = {
        "block_count": shape.layers + shape.mtp,
        "context_length": 32_768,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "vocab_size": shape.vocabulary,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": by_layer if listed else shape.kv_heads,
        "attention.key_length": shape.wide_head_dim or shape.head_dim,
        "attention.value_length": shape.wide_head_dim or shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_theta,
        "rope.dimension_count": (shape.wide_head_dim or shape.head_dim) // shape.rope_part,
    }
    if shape.wide_head_dim:
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            found[f"{name}_swa"] = shape.head_dim
        found["attention.sliding_window_pattern"] = [not shape.wide(layer) for layer in range(shape.layers)]
    if shape.state_heads:
        found |= {
            "ssm.conv_kernel": _TAPS,
            "ssm.state_size": shape.state_dim,
            "ssm.group_count": shape.groups,
            "ssm.time_step_rank": shape.state_heads,
            "ssm.inner_size": shape.state_inner,
        }
    if shape.experts:
        found |= {"expert_count": shape.experts, "expert_used_count": shape.used}
        found |= {"expert_feed_forward_length": shape.inner}
    if shape.mtp:
        found |= {"nextn_predict_layers": 1}
    if shape.shared:
        found |= {"expert_shared_feed_forward_length": shape.shared}
    return found | dict(shape.more)


def tensors_of(shape: Shape) -> Iterator[FileTensor]:
    """Yield all tensors, in the order of a file."""
    table = shape.vocabulary, shape.hidden
    yield FileTensor("token_embd.weight", table, "output" if shape.tied else "matrix")
    if not shape.tied:
        yield FileTensor("output.weight", table, "output")
    yield FileTensor("output_norm.weight", (shape.hidden,), "norm")
    if shape.wide_head_dim:
        yield FileTensor("rope_freqs.weight", (shape.wide_head_dim // 2,), "factors")
    for layer in range(shape.layers):
        eighth = shape.layers // 8  # llama.cpp gives more bits to the first and last layers, and to a third of the rest
        fine = layer < eighth or layer >= shape.layers - eighth or (layer - eighth) % 3 == 2
        for name, size, kind in _layer(shape, layer):
            yield FileTensor(f"blk.{layer}.{name}", size, "matrix" if kind == "fine" and not fine else kind)
    if shape.mtp:
        for name, size, kind in _draft_head(shape):
            yield FileTensor(f"blk.{shape.layers}.{name}", size, kind)


def _layer(shape: Shape, layer: int) -> Iterator[FileTensor]:
    for norm in _NORMS.get(shape.architecture, ("attn_norm", "post_attention_norm")):
        yield FileTensor(f"{norm}.weight", (shape.hidden,), "norm")
    if shape.architecture == "gemma4":
        yield FileTensor("layer_output_scale.weight", (1,), "norm")
    if shape.attends(layer):
        yield from _attention(shape, layer)
    elif shape.architecture == "granitehybrid":
        yield from _mamba(shape)
    else:
        yield from _delta_net(shape)
    yield from _experts(shape) if shape.experts else _mlp(shape.hidden, shape.inner)


def _draft_head(shape: Shape) -> Iterator[FileTensor]:
    yield from _layer(replace(shape, attends=every), shape.layers)
    yield FileTensor("nextn.eh_proj.weight", (shape.hidden, 2 * shape.hidden), "matrix")
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        yield FileTensor(f"nextn.{norm}.weight", (shape.hidden,), "norm")


def _mlp(hidden: int, inner: int, ending: str = "") -> Iterator[FileTensor]:
    yield FileTensor(f"ffn_gate{ending}.weight", (inner, hidden), "matrix")
    yield FileTensor(f"ffn_up{ending}.weight", (inner, hidden), "matrix")
    yield FileTensor(f"ffn_down{ending}.weight", (hidden, inner), "fine")


def _attention(shape: Shape, layer: int) -> Iterator[FileTensor]:
    kv_heads, head_dim = shape.heads_of(layer)
    rows, kv_rows = shape.heads * head_dim, kv_heads * head_dim
    gated = shape.architecture.startswith("qwen35")
    yield FileTensor("attn_q.weight", (rows * (1 + gated), shape.hidden), "matrix")
    yield FileTensor("attn_k.weight", (kv_rows, shape.hidden), "matrix")
    if not shape.wide(layer):  # whose keys are its values
        yield FileTensor("attn_v.weight", (kv_rows, shape.hidden), "fine")
    yield FileTensor("attn_output.weight", (shape.hidden, rows), "matrix")
    if gated or shape.wide_head_dim:  # Gemma 4 does not scale scores: large ones would leave a key each, and chaos
        yield FileTensor("attn_q_norm.weight", (head_dim,), "numbers" if shape.wide_head_dim else "norm")
        yield FileTensor("attn_k_norm.weight", (head_dim,), "norm")
    if shape.architecture == "gpt-oss":
        yield FileTensor("attn_sinks.weight", (shape.heads,), "numbers")
        for name, size in {"q": rows, "k": kv_rows, "v": kv_rows, "output": shape.hidden}.items():
            yield FileTensor(f"attn_{name}.bias", (size,), "numbers")


def _delta_net(shape: Shape) -> Iterator[FileTensor]:
    channels = 2 * shape.groups * shape.state_dim + shape.state_inner
    yield FileTensor("attn_qkv.weight", (channels, shape.hidden), "matrix")
    yield FileTensor("attn_gate.weight", (shape.state_inner, shape.hidden), "matrix")
    for name in ("ssm_beta", "ssm_alpha"):
        yield FileTensor(f"{name}.weight", (shape.state_heads, shape.hidden), "matrix")
    yield FileTensor("ssm_out.weight", (shape.hidden, shape.state_inner), "matrix")
    yield FileTensor("ssm_conv1d.weight", (channels, _TAPS), "numbers")
    yield FileTensor("ssm_dt.bias", (shape.state_heads,), "numbers")
    yield FileTensor("ssm_a", (shape.state_heads,), "decay")
    yield FileTensor("ssm_norm.weight", (shape.state_head_dim,), "norm")


def _mamba(shape: Shape) -> Iterator[FileTensor]:
    channels = shape.state_inner + 2 * shape.groups * shape.state_dim
    yield FileTensor("ssm_in.weight", (shape.state_inner + channels + shape.state_heads, shape.hidden), "matrix")
    yield FileTensor("ssm_out.weight", (shape.hidden, shape.state_inner), "matrix")
    yield FileTensor("ssm_conv1d.weight", (channels, _TAPS), "numbers")
    yield FileTensor("ssm_conv1d.bias", (channels,), "numbers")
    yield FileTensor("ssm_dt.bias", (shape.state_heads,), "numbers")
    yield FileTensor("ssm_a", (shape.state_heads, 1), "decay")
    yield FileTensor("ssm_d", (shape.state_heads, 1), "norm")
    yield FileTensor("ssm_norm.weight", (shape.state_inner,), "norm")


def _experts(shape: Shape) -> Iterator[FileTensor]:
    yield FileTensor("ffn_gate_inp.weight", (shape.experts, shape.hidden), "numbers")
    own = shape.architecture == "gpt-oss"
    for name, size, kind in _mlp(shape.hidden, shape.inner, "_exps"):
        yield FileTensor(name, (shape.experts, *size), "experts" if own else kind)
        if own:
            yield FileTensor(name.replace("weight", "bias"), (shape.experts, size[0]), "numbers")
    if own:
        yield FileTensor("ffn_gate_inp.bias", (shape.experts,), "numbers")
    if shape.shared:
        yield FileTensor("ffn_gate_inp_shexp.weight", (shape.hidden,), "numbers")
        yield from _mlp(shape.hidden, shape.shared, "_shexp")
