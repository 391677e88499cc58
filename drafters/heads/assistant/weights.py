"""The weights of Gemma 4's assistant: layers with queries alone, between two projections.

A layer attends to the keys and values of the target's last layer of its type that has some, the same for every token
that is drafted. The first projection takes the target's embedding of a token, scaled as the target scales it, and the
state before that token; the second makes the state after it. An output matrix of the assistant's own gives the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from drafters.heads.assistant.stored import AFTER, BEFORE, EMBEDDING, NORM, InGguf, InSafetensors, Stored, refused
from drafters.heads.checkpoint import TargetWeights, find_folder
from drafters.heads.matrices import rows_of
from drafters.heads.mtp.own_tokens import OwnTokens, likely_tokens
from drafters.heads.mtp.weights import ends_of, output_of
from engine.core.errors import DrafterMismatch, ModelError, TalonError
from engine.kernels.attention.attention import Rule
from engine.kernels.gemm.product import Product, multiplies
from engine.kernels.layer.activation import Activation
from engine.kernels.layer.weights import Norm
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES
from engine.model.decoder_layer import Layer, norm_from
from engine.model.loading import load_config
from engine.model.rotary import Frequencies, frequencies_of
from engine.model.structure import AttentionStructure, LayerStructure, LinearStructure, MlpStructure, NormStructure
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import open_gguf
from engine.weights.gguf.weights import GgufWeights
from engine.weights.quantised import unquantised

_SLIDING = "sliding_attention"
_STORED_EMBEDDING = "token_embd.weight"  # in the target's GGUF file
_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NONE = -1e4  # the logit of a token that is near none of them: its probability is 0


class Centroids:
    """An output matrix of which a row multiplies only the tokens near its nearest centroids.

    centroids: [count, hidden]. near: [count, tokens of each] int64, tokens by the centroid that they are near. output:
    [vocab, hidden], whose rows are kept by centroid. nearest: how many centroids a row takes.
    """

    def __init__(self, centroids: Tensor, near: Tensor, output: Tensor, nearest: int):
        self.centroids, self.near, self.nearest = centroids, near, nearest
        self._rows = output[near]
        self._vocabulary = len(output)

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [rows, vocab] float32. x: [rows, hidden]."""
        chosen = (x @ self.centroids.T).topk(self.nearest, dim=1).indices
        logits = torch.full((len(x), self._vocabulary), _NONE, dtype=torch.float32)
        for row, of_row, out in zip(x, chosen, logits, strict=True):
            out[self.near[of_row].flatten()] = (self._rows[of_row].flatten(0, 1) @ row).float()
        return logits


class TargetKeys(NamedTuple):
    """The keys and values of one of the target's layers: its type, their heads, and the dimensions of one."""

    kind: str
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AssistantWeights:
    """keys: of the target, as it gives them. layers, rules: of the assistant, and `reads`, which of the keys each one
    attends to. rotary: the tables that the layers name. embed: the target's scaled embeddings [n, hidden] of tokens
    [n]. head: makes logits of the normed rows, for the tokens `target_ids`. own: where these change with the texts.
    """

    keys: list[TargetKeys]
    layers: list[Layer]
    rules: list[Rule]
    reads: list[int]
    rotary: tuple[Frequencies, ...]
    before: Product
    after: Product
    norm: Norm
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    target_ids: Tensor
    own: OwnTokens | None = None


def read_assistant(model: str, path: str, vocabulary: int) -> AssistantWeights:
    """Read the assistant of a target. model: the target's directory. path: a GGUF file or a directory. vocabulary: the
    most tokens that it drafts. Raises ModelError or DrafterMismatch.
    """
    if not multiplies(torch.bfloat16):
        raise ModelError("method=assistant: products of bfloat16 are not there on this processor; take method=suffix")
    field = f"drafter.path={path}"
    folder = find_folder(model, "model")
    text = load_config(str(folder)).get_text_config()
    stored: Stored
    if Path(path).is_file():
        stored = InGguf(read_gguf(Path(path), field), field)
    else:
        stored = InSafetensors(find_folder(path, "drafter.path"), field)
    keys = _target_keys(text, field)
    _check(stored, text, keys)
    stored.check(_shapes(stored))
    try:
        return _built(stored, folder, text, keys, vocabulary)
    except TalonError:
        raise
    except Exception as error:  # a damaged configuration raises anything
        raise refused(field, error) from error


def _target_keys(text: Any, field: str) -> list[TargetKeys]:
    """Return the keys that the target gives, in the order of `DecoderStructure.last_keys`: of the last layer of each
    type that has some of its own.
    """
    types, each = getattr(text, "layer_types", None), getattr(text, "per_layer_config", None)
    if not types or each is None:
        raise DrafterMismatch(f"{field}: the target is of type {text.model_type}, and an assistant is Gemma 4's")
    own = types[: len(types) - (getattr(text, "num_kv_shared_layers", 0) or 0)]
    last = sorted({kind: at for at, kind in enumerate(own)}.items(), key=lambda found: found[1])
    return [TargetKeys(kind, each[at].num_key_value_heads, each[at].head_dim) for kind, at in last]


def _check(stored: Stored, text: Any, keys: list[TargetKeys]) -> None:
    """Raise DrafterMismatch unless the assistant fits the target."""
    config, sizes = stored.config, {one.kind: one for one in keys}
    _match(stored.field, "backbone_hidden_size", stored.hidden, text.hidden_size)
    _match(stored.field, "vocab_size", config.vocab_size, text.vocab_size)
    for at, kind in enumerate(config.layer_types):
        if kind not in sizes:
            raise DrafterMismatch(f"{stored.field}: layer {at} reads keys of {kind}, and the target has no such layer")
        _match(stored.field, f"head_dim of {kind}", config.per_layer_config[at].head_dim, sizes[kind].head_dim)
        if config.num_attention_heads % sizes[kind].kv_heads:
            raise DrafterMismatch(
                f"{stored.field}: num_attention_heads {config.num_attention_heads} is no multiple of the target's "
                f"{sizes[kind].kv_heads} heads of keys; name the assistant of this very model"
            )


def _shapes(stored: Stored) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters. Raises ModelError for sizes that kernels do not take."""
    config, found = stored.config, dict[str, tuple[int, ...]]()
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, size in (("hidden_size", hidden), ("intermediate_size", inner), ("backbone_hidden_size", stored.hidden)):
        if size % LANES:
            raise ModelError(f"{stored.field}: {name}={size} is not supported, multiples of {LANES} are")
    for at in range(config.num_hidden_layers):
        head_dim = config.per_layer_config[at].head_dim
        queries = config.num_attention_heads * head_dim
        of_layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in _LAYER_NORMS}
        of_layer |= {"self_attn.q_proj.weight": (queries, hidden), "self_attn.q_norm.weight": (head_dim,)}
        of_layer |= {"self_attn.o_proj.weight": (hidden, queries), "mlp.down_proj.weight": (hidden, inner)}
        of_layer |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")} | {"layer_scalar": (1,)}
        found |= {f"model.layers.{at}.{name}": shape for name, shape in of_layer.items()}
    found |= {f"{NORM}.weight": (hidden,), f"{EMBEDDING}.weight": (config.vocab_size, hidden)}
    return found | {f"{BEFORE}.weight": (hidden, 2 * stored.hidden), f"{AFTER}.weight": (stored.hidden, hidden)}


def _match(field: str, what: str, mine: int, target: int) -> None:
    if mine != target:
        raise DrafterMismatch(
            f"{field}: {what} {mine} != the target's {target}; name the assistant of this very model, or take "
            "method=suffix"
        )


def _built(stored: Stored, folder: Path, text: Any, keys: list[TargetKeys], vocabulary: int) -> AssistantWeights:
    config = stored.config
    of_kind = frequencies_of(Gemma4TextRotaryEmbedding(config))
    assert of_kind is not None
    kinds, types = [*of_kind], config.layer_types
    sizes = [next(one for one in keys if one.kind == kind) for kind in types]
    structures = [
        _layer(config, at, size, kinds.index(kind), of_kind[kind].dims)
        for at, (kind, size) in enumerate(zip(types, sizes, strict=True))
    ]
    if any(of_kind[kind].dims > size.head_dim for kind, size in zip(types, sizes, strict=True)):
        raise ModelError(f"{stored.field}: rope_parameters rotate more dimensions than a head has; get it again")
    window = config.sliding_window + 1  # as transformers counts it here: so many keys before the query
    head, target_ids, own = _output(stored, folder, text.vocab_size, vocabulary)
    return AssistantWeights(
        keys=keys,
        layers=[Layer(structure, stored, "bfloat16", torch.bfloat16) for structure in structures],
        rules=[Rule(1.0, window if kind == _SLIDING else 0) for kind in types],
        reads=[keys.index(size) for size in sizes],
        rotary=tuple(of_kind.values()),
        before=Product([stored.matrix(f"{BEFORE}.weight")]),
        after=Product([stored.matrix(f"{AFTER}.weight")]),
        norm=norm_from(NormStructure(f"{NORM}.weight", config.rms_norm_eps, False), stored),
        embed=_embed(folder, text.hidden_size),
        head=head,
        target_ids=target_ids,
        own=own,
    )


def _layer(config: Gemma4TextConfig, at: int, keys: TargetKeys, table: int, rotated: int) -> LayerStructure:
    """Return the structure of a layer, of which the keys are the target's."""
    prefix = f"model.layers.{at}."

    def linear(*names: str) -> LinearStructure:
        count = len(names)
        return LinearStructure(tuple(f"{prefix}{name}.weight" for name in names), ("",) * count, (None,) * count)

    def norm(name: str) -> NormStructure:
        return NormStructure(f"{prefix}{name}.weight", config.rms_norm_eps, False)

    attention = AttentionStructure(
        qkv=linear("self_attn.q_proj"),
        out=linear("self_attn.o_proj"),
        heads=config.num_attention_heads,
        kv_heads=keys.kv_heads,
        head_dim=keys.head_dim,
        query_norm=norm("self_attn.q_norm"),
        key_norm=None,
        rotated=rotated,
        rotary_table=table,
    )
    return LayerStructure(
        mixer=attention,
        mlp=MlpStructure(linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj"), Activation.GELU),
        input_norm=norm("input_layernorm"),
        out_norm=norm("post_attention_layernorm"),
        inner_norm=norm("pre_feedforward_layernorm"),
        down_norm=norm("post_feedforward_layernorm"),
        scales=(1.0, 1.0, 1.0),
        scale=f"{prefix}layer_scalar",
    )


def _output(
    stored: Stored, folder: Path, size: int, vocabulary: int
) -> tuple[Callable[[Tensor], Tensor], Tensor, OwnTokens | None]:
    """Return what makes logits, the tokens of these, and how they change: all tokens where centroids narrow them, else
    the likeliest and those of the texts.
    """
    matrix = stored.matrix(f"{EMBEDDING}.weight")
    if (found := stored.centroids()) is not None:
        centroids, near, nearest = found
        output = Centroids(centroids.to(torch.bfloat16), near, matrix.values(), nearest)
        return output, torch.arange(size), None

    def rows_of(ids: np.ndarray[Any, np.dtype[np.int64]]) -> StoredMatrix:
        return matrix.reordered(ids)

    head, own = output_of(rows_of, likely_tokens(size, vocabulary, ends_of(folder, size)))
    return head, own.target_ids, own


def _embed(folder: Path, hidden: int) -> Callable[[Tensor], Tensor]:
    """Return what looks up the target's embeddings, scaled."""
    scale, file = float(torch.tensor(hidden**0.5).to(torch.bfloat16)), open_gguf(unquantised(folder))
    if file is None:
        embedding = TargetWeights.read(str(folder)).embedding
        return lambda tokens: (rows_of(embedding, tokens).float() * scale).to(torch.bfloat16)
    weights = GgufWeights(file, {}, {})
    if file.tensor(_STORED_EMBEDDING) is None:
        raise ModelError(f"model={file.path}: tensor {_STORED_EMBEDDING} is missing; get the file again")
    return lambda tokens: (weights.numbers(_STORED_EMBEDDING, tokens.numpy()).float() * scale).to(torch.bfloat16)
