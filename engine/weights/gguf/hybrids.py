"""How GGUF files hold hybrids, some of whose layers keep a state: what transformers' tables leave out, and where the
parameters of gated delta nets are.

llama.cpp's converter puts the value heads of `qwen35` and `qwen35moe` in another order: those that one key head serves
do not lie together, but the first of every key head come before the second of each. Rows could be put back, but the
last matrix has a column for each number of a value head, and columns cross blocks. So the decoder keeps the file's
order, and maps heads (`GatedDeltaStructure.key_head_of`); only the stock forward is given transformers' order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, GGUFTensor, TensorProcessor

from engine.core.errors import ModelError
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.latent import ChannelDeltaReader, LatentReader
from engine.weights.gguf.layer_reader import LayerReader
from engine.weights.gguf.mamba import MambaReader, SharedMlpReader
from engine.weights.stored_weights import OWN, Place

HYBRIDS = (
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "lfm2",
    "lfm2moe",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon-h1",
    "kimi-linear",
)
"""Architectures that GGUF files name."""
_TILED = ("qwen35", "qwen35moe")
_DELTA = (*_TILED, "qwen3next")
_HEADS = ("ssm.group_count", "ssm.time_step_rank")
_INTERVAL, RECURRENT = "full_attention_interval", "attention.recurrent_layers"


class _ZeroCentred(TensorProcessor):
    """llama.cpp stores 1 + weight of every norm but that of a delta net's heads."""

    def process(self, weights: Any, name: str, **_: Any) -> GGUFTensor:
        centred = name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
        return GGUFTensor(weights - np.float32(1) if centred else weights, name, {})


def _qwen3next(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Qwen3-Next: Qwen3.5 with experts, but for the positions of images."""
    as_qwen35 = {key.replace("qwen3next.", "qwen35moe."): value for key, value in metadata.items()}
    config: dict[str, Any] = GGUF_CONFIG_ARCHS["qwen35moe"](
        as_qwen35 | {"qwen35moe.rope.dimension_sections": ()}, tensors
    )
    rope = config["rope_parameters"]
    kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    names = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    return config | names | {"rope_parameters": {"rope_type": "default", **kept}}


def _lfm2moe(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    as_lfm2 = {key.replace("lfm2moe.", "lfm2."): value for key, value in metadata.items()}
    config: dict[str, Any] = GGUF_CONFIG_ARCHS["lfm2"](as_lfm2, tensors)
    config.pop("block_auto_adjust_ff_dim")
    return config | {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "moe_intermediate_size": metadata["lfm2moe.expert_feed_forward_length"],
        "num_experts": metadata["lfm2moe.expert_count"],
        "num_experts_per_tok": metadata["lfm2moe.expert_used_count"],
        "num_dense_layers": metadata["lfm2moe.leading_dense_block_count"],
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in tensors),
    }


_Described = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]


def _with_recurrent_layers(architecture: str, described: _Described) -> _Described:
    """Describe a file that names its recurrent layers by that list, of its draft head's too, or by an interval; without
    either, every fourth layer attends.
    """

    def config_of(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
        config = described({f"{architecture}.{_INTERVAL}": 4} | metadata, tensors)
        if (recurrent := metadata.get(f"{architecture}.{RECURRENT}")) is None:
            return config
        layers = config["num_hidden_layers"]
        kinds = (np.ravel(recurrent).tolist() * (layers if np.ndim(recurrent) == 0 else 1))[:layers]
        if len(kinds) < layers:  # `check_hybrid` says so
            return config
        return config | {"layer_types": ["linear_attention" if kind else "full_attention" for kind in kinds]}

    return config_of


def teach_hybrids() -> None:
    """Add to transformers' tables the hybrids that they leave out, and how others name their recurrent layers."""
    GGUF_CONFIG_ARCHS.update({"qwen3next": _qwen3next, "lfm2moe": _lfm2moe})
    GGUF_CONFIG_ARCHS.update({name: _with_recurrent_layers(name, GGUF_CONFIG_ARCHS[name]) for name in _DELTA})
    TENSOR_PROCESSORS.update(dict.fromkeys(_DELTA, _ZeroCentred) | {"lfm2moe": TENSOR_PROCESSORS["lfm2"]})


def check_hybrid(file: GgufFile) -> None:
    """Raise ModelError for a hybrid's file that contradicts itself."""
    architecture, metadata = file.architecture, file.metadata
    blocks = {int(tensor.name.split(".")[1]) for tensor in file.tensors if tensor.name.startswith("blk.")}
    count = int(metadata[f"{architecture}.block_count"])
    if metadata.get(f"{architecture}.nextn_predict_layers") and 0 not in blocks:
        raise ModelError("it holds a draft head alone; name it as drafter.path, and the model's own file as model")
    if blocks != set(range(count)):
        raise ModelError(f"{architecture}.block_count is {count}, and its tensors are of {len(blocks)}")
    listed = metadata.get(f"{architecture}.{RECURRENT}", True)  # of a list, the length
    if not isinstance(listed, bool) and listed != count:
        raise ModelError(f"{architecture}.{RECURRENT} is of {listed} layers, and block_count is {count}")
    if architecture in _DELTA:
        keys, values = (int(metadata[f"{architecture}.{key}"]) for key in _HEADS)
        if not keys or values % keys:
            raise ModelError(
                f"{architecture}.{_HEADS[1]} is {values}: value heads are no multiple of the key heads "
                f"({architecture}.{_HEADS[0]} is {keys})"
            )


def draft_block(file: GgufFile) -> str:
    """Return how the names of the draft head's tensors begin, which is no part of the model; "" if the
    file has none.
    """
    heads = file.metadata.get(f"{file.architecture}.nextn_predict_layers", 0)
    return f"blk.{file.metadata[f'{file.architecture}.block_count'] - 1}." if heads else ""


def layer_readers(file: GgufFile, model: Any) -> Iterator[LayerReader]:
    """Read the parts of layers that files hold in another way than transformers' tables say. model: on the meta device.
    Raises Unreadable if a tensor is not there.
    """
    for index, layer in enumerate(model.model.layers):
        prefix, block = f"model.layers.{index}.", f"blk.{index}."
        if hasattr(layer, "linear_attn"):
            yield DeltaReader(file, model.config.get_text_config(), f"{prefix}linear_attn.", block)
        for name in ("mamba", "mixer"):
            if hasattr(net := getattr(layer, name, None), "ssm_state_size"):
                yield MambaReader(file, net, f"{prefix}{name}.", block)
        if hasattr(getattr(layer, "self_attn", None), "kv_lora_rank"):
            yield LatentReader(file, layer.self_attn, f"{prefix}self_attn.", block)
        if hasattr(getattr(layer, "self_attn", None), "forget_gate"):
            yield ChannelDeltaReader(file, layer.self_attn, f"{prefix}self_attn.", block)
        if hasattr(layer, "shared_mlp"):
            experts = getattr(layer, "block_sparse_moe", None) is not None
            yield SharedMlpReader(file, layer.shared_mlp, f"{prefix}shared_mlp.", block, experts)


class DeltaReader(LayerReader):
    """The parameters of a gated delta net."""

    def __init__(self, file: GgufFile, config: Any, prefix: str, block: str):
        """config: of the model."""
        super().__init__(file, prefix, block)
        self.hidden, self.key_heads = config.hidden_size, config.linear_num_key_heads
        self.each = config.linear_num_value_heads // self.key_heads
        self.value_dim = config.linear_value_head_dim
        self.keys = self.key_heads * config.linear_key_head_dim
        self.values = self.key_heads * self.each * self.value_dim
        self.tiled = file.architecture in _TILED and self.each > 1 and self.key_heads > 1
        heads = np.arange(2 * self.keys, dtype=np.int64)
        self._channels = np.concatenate([heads, 2 * self.keys + self._grouped(self.value_dim)])
        if file.architecture in _TILED:
            self._matrix("in_proj_qkv", "attn_qkv", self._channels)
            self._matrix("in_proj_z", "attn_gate", self._grouped(self.value_dim))
            self._matrix("in_proj_b", "ssm_beta", self._grouped(1))
            self._matrix("in_proj_a", "ssm_alpha", self._grouped(1))
        else:
            self._whole()
        self._out()
        self._vectors()

    def _grouped(self, size: int) -> NDArray[np.int64]:
        """Return the stored place of each number of value heads in transformers' order, `size` of each head."""
        shape = (self.each, self.key_heads, size) if self.tiled else (1, -1, size)
        places: NDArray[np.int64] = np.arange(self.key_heads * self.each * size, dtype=np.int64)
        return np.ascontiguousarray(places.reshape(shape).swapaxes(0, 1)).reshape(-1)

    def _matrix(self, name: str, tensor: str, order: NDArray[np.int64]) -> None:
        stored, parameter = self.found(f"{tensor}.weight", (self.hidden, len(order))), f"{self.prefix}{name}.weight"
        shape = (len(order), self.hidden)
        self.places[parameter] = Place((stored,), shape, _permutation(order))
        if self.tiled:
            self.places[OWN + parameter] = Place((stored,), shape)

    def _whole(self) -> None:
        """Read Qwen3-Next's matrices: transformers has one matrix, with q, k, v and z of each key head together, and
        so have older files.
        """
        channels, inputs = 2 * self.keys + self.values, self.hidden
        starts = np.split(np.arange(channels + self.values), [self.keys, 2 * self.keys, channels])
        order = np.concatenate([part.reshape(self.key_heads, -1) for part in starts], axis=1).reshape(-1)
        whole, qkv, z = (f"{self.prefix}in_proj_{part}.weight" for part in ("qkvz", "qkv", "z"))
        if self.file.tensor(f"{self.block}ssm_in.weight") is not None:
            stored = (self.found("ssm_in.weight", (inputs, len(order))),)
            self.places[whole] = Place(stored, (len(order), inputs))
            for name, rows in zip((qkv, z), np.split(np.argsort(order), [channels]), strict=True):
                self.places[OWN + name] = Place(stored, (len(rows), inputs), rows.astype(np.int64).tobytes())
        else:
            of_qkv = self.found("attn_qkv.weight", (inputs, channels))
            of_z = self.found("attn_gate.weight", (inputs, self.values))
            self.places[whole] = Place((of_qkv, of_z), (len(order), inputs), _permutation(order))
            self.places[OWN + qkv] = Place((of_qkv,), (channels, inputs))
            self.places[OWN + z] = Place((of_z,), (self.values, inputs))
        self._matrix("in_proj_ba", "ssm_ba", np.arange(2 * self.key_heads * self.each))

    def _out(self) -> None:
        stored, parameter = self.found("ssm_out.weight", (self.values, self.hidden)), f"{self.prefix}out_proj.weight"
        shape = (self.hidden, self.values)
        self.places[parameter] = Place((stored,), shape, b"", _permutation(self._grouped(self.value_dim)))
        if self.tiled:
            self.places[OWN + parameter] = Place((stored,), shape)

    def _vectors(self) -> None:
        """Read what is not a matrix. For the decay of a step, the file holds minus the exponential of transformers'
        number.
        """
        heads, prefix = self.key_heads * self.each, self.prefix
        decay, bias = self.decay(heads), self.numbers("ssm_dt.bias", heads)
        convolution = self.numbers("ssm_conv1d.weight", len(self._channels))
        order, channels = torch.from_numpy(self._grouped(1)), torch.from_numpy(self._channels)
        self.vectors |= {f"{prefix}A_log": (-decay).log()[order], f"{OWN}{prefix}A_log": decay}
        self.vectors |= {f"{prefix}dt_bias": bias[order], f"{prefix}conv1d.weight": convolution[channels][:, None]}
        if self.tiled:
            self.vectors |= {f"{OWN}{prefix}dt_bias": bias, f"{OWN}{prefix}conv1d.weight": convolution[:, None]}
        self.vectors[f"{prefix}norm.weight"] = self.numbers("ssm_norm.weight", self.value_dim).to(torch.bfloat16)


def _permutation(order: NDArray[np.int64]) -> bytes:
    """Return the order as a `Place` holds it."""
    return b"" if np.array_equal(order, np.arange(len(order))) else np.ascontiguousarray(order, np.int64).tobytes()
