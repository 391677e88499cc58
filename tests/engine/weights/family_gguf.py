"""GGUF files of random models of many families, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from engine.weights.gguf.ternary import I2_S
from tests.engine.weights.family_table import COMMON, FAMILIES, LONG_FACTORS
from tests.engine.weights.tiny_gguf import add_tokenizer, add_values, write_all

NEIGHBOURS = ("llama", "granite", "olmo", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures whose heads are stored with neighbouring dimensions rotated."""


def random_model(family: str, **changes: Any) -> Any:
    """A random model of that family, in float32, whose parameters are numbers of bfloat16. Norms are random too, so
    that one in a wrong place is seen. Routers are as sure as trained ones: a near tie that rounding turns is another
    expert's output.
    """
    about = FAMILIES[family]
    torch.manual_seed(0)
    options = COMMON | about.options | changes
    model = AutoModelForCausalLM.from_config(getattr(transformers, about.config)(**options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.proj.weight", "router.scale")):
                parameter *= 8
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer += 0.1 * torch.randn(buffer.shape)
            if name.endswith("layer_scalar"):
                buffer.copy_((0.5 + torch.rand(1)).to(torch.bfloat16))
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


def write_family(
    path: Path,
    family: str,
    model: Any,
    kind: Kind = Kind.F32,
    head: Mapping[str, torch.Tensor] = MappingProxyType({}),
    changes: Mapping[str, Any] = MappingProxyType({}),
    head_alone: bool = False,
    i2_s: bool = False,
) -> None:
    """kind: of the matrices. head: of a draft head (`draft_head`), stored as one more block. changes: of the metadata,
    None leaves out. head_alone: without the model's blocks. i2_s: whether matrices of layers are stored so, which are
    a number times -1, 0 and 1.
    """
    about, config = FAMILIES[family], model.config
    writer = gguf.GGUFWriter(path, about.architecture)
    writer.add_name("random")
    writer.add_block_count(config.num_hidden_layers + bool(head))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in about.metadata:
        writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = about.metadata.get("attention.key_length") or (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    epsilons = (getattr(config, name, None) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    writer.add_layer_norm_rms_eps(next((epsilon for epsilon in epsilons if epsilon), 1e-5))
    writer.add_rope_freq_base(_theta(config))
    if "rope.dimension_count" not in about.metadata:
        writer.add_rope_dimension_count(head_dim)
    metadata = about.metadata | ({"nextn_predict_layers": 1} if head else {}) | changes
    add_values(writer, {f"{about.architecture}.{key}": value for key, value in metadata.items()})
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    for name, array in (stored_tensors(family, model) | _stored_head(head, config.num_hidden_layers)).items():
        if head_alone and name.startswith("blk.") and not name.startswith(f"blk.{config.num_hidden_layers}."):
            continue
        of_kind = kind if array.ndim > 1 and array.shape[-1] % 32 == 0 else Kind.F32
        of_kind = Kind.F32 if "ffn_gate_inp" in name or "norm" in name else of_kind
        if i2_s and array.ndim == 2 and name.startswith("blk."):
            writer.add_tensor(name, stored_as_i2_s(array).view(np.int8), raw_shape=array.shape, raw_dtype=I2_S)
            continue
        writer.add_tensor(name, gguf.quantize(array, of_kind), raw_dtype=of_kind)
    write_all(writer)


def stored_as_i2_s(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of a matrix as `quantize_to_i2_s` of bitnet.cpp writes them."""
    scale = np.abs(weight).max()
    codes = np.round(weight / scale).astype(np.int8).reshape(-1, 4, 32) + 1
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    tail = np.zeros(32, np.uint8)
    tail[:4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    return np.concatenate([packed.astype(np.uint8).reshape(-1), tail])


def stored_tensors(family: str, model: Any) -> dict[str, NDArray[np.float32]]:
    """The model's weights under the names, and in the order of rows, that llama.cpp has for them."""
    about, config = FAMILIES[family], model.config
    known = "bitnet" if about.architecture.startswith("bitnet") else about.architecture
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tied, whole = config.tie_word_embeddings, about.metadata.get("full_attention_interval") is None
    made: dict[str, NDArray[np.float32]] = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if ".experts." in name:
            made |= _experts(name, array, about.architecture)
            continue
        if name.endswith("kv_b_proj.weight") and about.metadata.get("attention.key_length_mla"):
            keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split([32, 16], dim=1)
            block = f"blk.{name.split('.')[2]}."
            made[f"{block}attn_k_b.weight"] = keys.transpose(1, 2).contiguous().numpy()
            made[f"{block}attn_v_b.weight"] = values.contiguous().numpy()
            continue
        if "forget_gate." in name or name.endswith("self_attn.conv1d.weight"):
            made |= _channel_delta(name, tensor)
            continue
        if ".linear_attn." in name and (held := _delta(name, tensor, config, about.architecture, whole)):
            made |= {key: part.contiguous().numpy() for key, part in held.items()}
            continue
        if re.search(r"\.(mamba|shared_mlp)\.|mixer\.(in_proj|out_proj|conv1d|norm|A_log|D|dt_bias)", name):
            made |= {key: part.contiguous().numpy() for key, part in _mamba(name, tensor, config).items()}
            continue
        module, _, suffix = name.rpartition(".")
        if suffix in ("scale", "per_expert_scale"):
            module, suffix = module + ".proj" if suffix == "scale" else f"{module[:-6]}experts.down_proj", "scale"
        if suffix == "expert_bias":
            module, suffix = name, "bias"
        if suffix == "e_score_correction_bias":
            module, suffix = name.removesuffix("_bias"), "bias"
        if suffix == "layer_scalar":
            module, suffix = name, "weight"
        if name.endswith(("conv.conv.weight", "shared_expert_gate.weight")):
            array = array.squeeze()
        if module.endswith("self_attn") and suffix == "sinks":
            module, suffix = name, "weight"
        module = re.sub(r"(mlp|block_sparse_moe)\.router", "mlp.gate", module)
        module = module.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
        found = names.get_name(module) or names.get_name(module.replace("model.", "backbone.", 1))
        if whole := names.get_name(name) if found is None else None:
            made[whole] = array
            continue
        if found is None:
            raise ValueError(f"gguf has no name for {name} of {about.architecture}")
        if about.architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next") and "norm" in found:
            array = array + 1
        if about.architecture in NEIGHBOURS and (".attn_q." in f"{found}." or ".attn_k." in f"{found}."):
            heads = config.num_attention_heads if ".attn_q" in found else config.num_key_value_heads
            halves = array.reshape(heads, 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        made[f"{found}.{suffix}"] = array
    if about.architecture == "gemma4":  # a quarter of the frequencies of layers that see everything
        made["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    if about.architecture == "minicpm3":
        made |= {
            f"rope_factors_{kind}.weight": np.array(LONG_FACTORS[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    return made


def draft_head(model: Any) -> dict[str, torch.Tensor]:
    """Random tensors of a draft head for a model whose last layer attends, by their names in safetensors."""
    torch.manual_seed(1)
    last, hidden = f"model.layers.{model.config.num_hidden_layers - 1}.", model.config.hidden_size
    shapes = {
        f"mtp.layers.0.{name.removeprefix(last)}": one.shape for name, one in model.state_dict().items() if last in name
    }
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
    return {name: (0.2 * torch.randn(shape)).to(torch.bfloat16).float() for name, shape in shapes.items()}


_HEAD_NAMES = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
}


def _stored_head(head: Mapping[str, torch.Tensor], block: int) -> dict[str, NDArray[np.float32]]:
    made: dict[str, NDArray[np.float32]] = {}
    for name, tensor in head.items():
        if ".experts." in name:
            made |= _experts(name.replace("mtp.layers.0", f"model.layers.{block}"), tensor.numpy(), "")
            continue
        stored = _HEAD_NAMES[name.split(".")[-2]] + ("_shexp" if ".shared_expert." in name else "")
        made[f"blk.{block}.{stored}.weight"] = (tensor + 1 if "norm" in stored else tensor.squeeze()).numpy()
    return made


def _delta(name: str, tensor: torch.Tensor, config: Any, architecture: str, whole: bool) -> dict[str, torch.Tensor]:
    """A parameter of a gated delta net as stored: Qwen3.5's value heads in turn, one of every key head after another;
    Qwen3-Next's one matrix in two, or whole.
    """
    block, part = f"blk.{name.split('.')[2]}.", name.split(".linear_attn.")[1].removesuffix(".weight")
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    channels, size = 2 * keys * config.linear_key_head_dim, config.linear_value_head_dim

    def turned(heads: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The value heads along a dimension, which may have several numbers each."""
        if architecture == "qwen3next":
            return heads
        grouped = heads.unflatten(dim, (keys, values // keys, -1))
        return grouped.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if part == "in_proj_qkvz" and whole:
        return {f"{block}ssm_in.weight": tensor}
    if part == "in_proj_qkvz":
        each = values // keys * size
        of_heads = tensor.unflatten(0, (keys, -1))
        q, k, v, z = of_heads.split([config.linear_key_head_dim] * 2 + [each] * 2, dim=1)
        qkv = torch.cat([rows.flatten(0, 1) for rows in (q, k, v)])
        return {f"{block}attn_qkv.weight": qkv, f"{block}attn_gate.weight": z.flatten(0, 1)}
    if part == "in_proj_qkv":
        return {f"{block}attn_qkv.weight": torch.cat([tensor[:channels], turned(tensor[channels:])])}
    if part == "conv1d":
        window = tensor[:, 0]
        return {f"{block}ssm_conv1d.weight": torch.cat([window[:channels], turned(window[channels:])])}
    if part == "out_proj":
        return {f"{block}ssm_out.weight": turned(tensor, 1)}
    if part == "A_log":
        return {f"{block}ssm_a": turned(-tensor.exp())}
    if part == "norm":
        return {f"{block}ssm_norm.weight": tensor}
    rows = {"in_proj_z": "attn_gate.weight", "in_proj_b": "ssm_beta.weight", "in_proj_a": "ssm_alpha.weight"}
    if part in ("in_proj_ba", "dt_bias"):
        rows |= {"in_proj_ba": "ssm_ba.weight", "dt_bias": "ssm_dt.bias"}
    return {f"{block}{rows[part]}": turned(tensor)}


def _channel_delta(name: str, tensor: torch.Tensor) -> dict[str, NDArray[np.float32]]:
    """A parameter of Kimi Linear's layers with a state as stored."""
    block, part = f"blk.{name.split('.')[2]}.", name.removesuffix(".weight").rpartition(".")[2]
    if part == "conv1d":
        return {f"{block}ssm_conv1d_{of}.weight": one.numpy() for of, one in zip("qkv", tensor.chunk(3), strict=True)}
    stored = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "f_a_proj": "ssm_f_a.weight", "f_b_proj": "ssm_f_b.weight"}
    values = -tensor.exp().reshape(-1, 1) if part == "A_log" else tensor
    return {block + stored[part]: values.numpy()}


def _mamba(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """A parameter of a Mamba-2 layer, or of Granite's MLP, as stored."""
    block, part = f"blk.{name.split('.')[2]}.", re.split(r"\.(?:mamba|shared_mlp|mixer)\.", name)[1]
    ending = "_shexp.weight" if getattr(config, "num_local_experts", 0) else ".weight"
    if part == "input_linear.weight":
        gate, up = tensor.chunk(2)
        return {f"{block}ffn_gate{ending}": gate, f"{block}ffn_up{ending}": up}
    stored = {
        "in_proj.weight": ("ssm_in.weight", tensor),
        "conv1d.weight": ("ssm_conv1d.weight", tensor.squeeze()),
        "conv1d.bias": ("ssm_conv1d.bias", tensor),
        "A_log": ("ssm_a", -tensor.exp()[:, None]),
        "D": ("ssm_d", tensor[:, None]),
        "dt_bias": ("ssm_dt.bias", tensor),
        "norm.weight": ("ssm_norm.weight", tensor.flatten()),
        "out_proj.weight": ("ssm_out.weight", tensor),
        "output_linear.weight": (f"ffn_down{ending}", tensor),
    }
    name, held = stored[part]
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    return {f"{block}{name}": held.view(groups, -1) if part == "norm.weight" and groups > 1 else held}


def _experts(name: str, array: NDArray[np.float32], architecture: str) -> dict[str, NDArray[np.float32]]:
    layer, part = name.split(".")[2], name.rpartition(".")[2]
    if architecture == "gpt-oss":
        suffix = "bias" if part.endswith("bias") else "weight"
        matrix = array if suffix == "bias" else array.swapaxes(1, 2)
        if part.startswith("down"):
            return {f"blk.{layer}.ffn_down_exps.{suffix}": np.ascontiguousarray(matrix)}
        return {
            f"blk.{layer}.ffn_gate_exps.{suffix}": np.ascontiguousarray(matrix[:, ::2]),
            f"blk.{layer}.ffn_up_exps.{suffix}": np.ascontiguousarray(matrix[:, 1::2]),
        }
    if part == "gate_up_proj" and architecture == "gemma4":
        return {f"blk.{layer}.ffn_gate_up_exps.weight": array}
    if part in ("down_proj", "up_proj"):
        return {f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight": array}
    gate, up = np.split(array, 2, axis=1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}


def _theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10_000.0}
    return float(rope["rope_theta"] if "rope_theta" in rope else rope["full_attention"]["rope_theta"])
