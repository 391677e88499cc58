"""The parameters of an assistant by transformers' names, from a GGUF file in the file's bits or from safetensors.

Both have what `engine.model.decoder_layer.Parameters` asks for, and the tensors that only an assistant has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import dequantize
from torch import Tensor
from transformers import Gemma4TextConfig

from drafters.heads.checkpoint import read_config, read_tensors
from drafters.heads.mtp.weights import coded
from engine.core.errors import ModelError, first_line, shown
from engine.kernels.quant.stored import StoredMatrix
from engine.weights.draft_head import ASSISTANT_TYPES
from engine.weights.gguf.configurations import CONFIGURATIONS
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.header import GgufTensor
from engine.weights.gguf.weights import GgufWeights

ARCHITECTURE, FAMILY = "gemma4-assistant", "gemma4"
EMBEDDING, NORM, BEFORE, AFTER = "model.embed_tokens", "model.norm", "pre_projection", "post_projection"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
_NAMES = {
    EMBEDDING: "token_embd",
    NORM: "output_norm",
    BEFORE: "nextn.pre_projection",
    AFTER: "nextn.post_projection",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""llama.cpp's names, of whole modules and of parts of a layer."""


class Stored(ABC):
    """config: of the assistant's layers. hidden: of the target that it was trained for. field: how errors begin."""

    config: Gemma4TextConfig
    hidden: int

    def __init__(self, field: str):
        self.field = field

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter. Raises ModelError if it is not there."""

    @abstractmethod
    def matrix(self, name: str) -> StoredMatrix:
        """Return a matrix [outputs, inputs]."""

    @abstractmethod
    def vector(self, name: str) -> Tensor:
        """Return a parameter that is no matrix."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless all parameters have these shapes: kernels would read beyond others."""
        for name, shape in shapes.items():
            if (found := self.shape(name)) != shape:
                raise ModelError(f"{self.field}: tensor {self.called(name)} has shape {[*found]}, not {[*shape]}")

    def called(self, name: str) -> str:
        """Return the name of a parameter where it is stored."""
        return name

    def experts(self, name: str, parts: int = 0) -> Sequence[Sequence[StoredMatrix]]:
        """Raise: an assistant has no experts."""
        raise ModelError(f"{self.field}: {name}: assistants with experts are not read")

    def centroids(self) -> tuple[Tensor, Tensor, int] | None:
        """Return [count, hidden], the tokens near each, [count, tokens], and how many a row takes; None without."""
        return None

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self.field}: tensor {name} is missing; get the assistant again")


class InGguf(Stored):
    """Matrices lie in memory in the file's own bits, where those have a layout."""

    def __init__(self, file: GgufFile, field: str):
        super().__init__(field)
        self.file, self._weights = file, GgufWeights(file, {}, {})
        if file.architecture != ARCHITECTURE:
            raise ModelError(
                f"{field}: general.architecture is {shown(file.architecture)}, which is no {ARCHITECTURE}; take the "
                "method that reads such a file, or method=suffix"
            )
        self.config, self.hidden = self._config(), self._count("embedding_length_out")

    def _config(self) -> Gemma4TextConfig:
        """Return the configuration, as that of a Gemma 4 with these layers."""
        known = self.file.metadata | self.file.arrays
        told = {key.replace(f"{ARCHITECTURE}.", f"{FAMILY}."): value for key, value in known.items()}
        names = tuple(tensor.name for tensor in self.file.tensors)
        try:
            found = CONFIGURATIONS[FAMILY](told, names)
            found.pop("model_type")
            factors = self.file.values("rope_freqs.weight")
            if factors is not None:
                found["rope_parameters"]["full_attention"]["partial_rotary_factor"] = float((factors == 1).mean())
            return Gemma4TextConfig(**found)
        except Exception as error:  # transformers checks values by errors of many kinds
            raise ModelError(f"{self.field}: its metadata describe no assistant ({first_line(error)})") from None

    def _count(self, key: str) -> int:
        value = self.file.metadata.get(f"{ARCHITECTURE}.{key}")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.field}: {ARCHITECTURE}.{key}: {shown(value)} is not a positive count")
        return value

    def called(self, name: str) -> str:
        return _stored_name(name)

    def _tensor(self, name: str) -> GgufTensor:
        if (tensor := self.file.tensor(stored := _stored_name(name))) is None:
            raise self._missing(stored)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape[::-1]

    def matrix(self, name: str) -> StoredMatrix:
        return self._weights.rows(self._tensor(name).name)

    def vector(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        return torch.from_numpy(dequantize(self.file.read(tensor), tensor.kind).copy()).flatten()


class InSafetensors(Stored):
    """Matrices get 8 bits a number, as every head's."""

    def __init__(self, folder: Path, field: str):
        super().__init__(field)
        config = read_config(folder, "drafter.path")
        if (kind := config.get("model_type")) not in ASSISTANT_TYPES:
            raise ModelError(f"{field}: config.json: model_type={shown(kind)} is none of {', '.join(ASSISTANT_TYPES)}")
        self.hidden, self._about = config.get("backbone_hidden_size", 0), config
        try:
            text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
            self.config = Gemma4TextConfig(**text)
        except Exception as error:  # transformers checks values by errors of many kinds
            raise ModelError(f"{field}: config.json: text_config: {first_line(error)}; copy it again") from None
        self.tensors = {name: tensor for file in _files(folder, field) for name, tensor in file.items()}

    def _found(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self._missing(name)
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._found(name).shape)

    def matrix(self, name: str) -> StoredMatrix:
        return coded(self._found(name).to(torch.bfloat16))

    def vector(self, name: str) -> Tensor:
        return self._found(name)

    def centroids(self) -> tuple[Tensor, Tensor, int] | None:
        if not self._about.get("use_ordered_embeddings", False):
            return None
        centroids, order = self._found(CENTROIDS), self._found(ORDER).long()
        count, vocabulary = len(centroids), len(self._found(f"{EMBEDDING}.weight"))
        self.check({CENTROIDS: (count, self.config.hidden_size)})
        whole = vocabulary % count == 0 and order.shape == (vocabulary,)
        if not whole or not torch.equal(order.sort().values, torch.arange(vocabulary)):
            raise ModelError(f"{self.field}: tensor {ORDER} does not give each token to one of {count} centroids")
        if (nearest := int(self._about["centroid_intermediate_top_k"])) < 1:
            raise ModelError(
                f"{self.field}: centroid_intermediate_top_k={nearest}: 1 or more are computed; get it again"
            )
        return centroids, order.view(count, -1), min(count, nearest)


def _files(folder: Path, field: str) -> list[dict[str, Tensor]]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{field}: holds no *.safetensors; copy the directory again")
    return [read_tensors(file, "drafter.path") for file in found]


def _stored_name(name: str) -> str:
    """Return llama.cpp's name of a parameter."""
    module = name.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return f"{_NAMES.get(module, module)}.weight"
    _, _, index, part = module.split(".", 3)
    return f"blk.{index}.{_NAMES.get(part, part)}.weight"


def refused(field: str, error: Any) -> ModelError:
    """Return the refusal of an assistant that cannot be built."""
    return ModelError(f"{field}: the assistant cannot be read ({first_line(error)}); take method=suffix")
