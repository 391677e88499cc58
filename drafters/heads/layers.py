"""The few pieces a draft head computes with, compact and without modelling classes: a draft step of a small head takes
well under a millisecond, so every Python call and every copy shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.heads.matrices import HeadTensors, Multiplied, split_inputs
from engine.core.errors import ModelError, first_line
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.int8.matmul import Int8Matmul
from engine.kernels.gemm.matmul import Matmul, Unit, shape_of, units
from engine.kernels.gemm.onednn import pack, packed_product
from engine.kernels.gemm.product import can_multiply, multiplies
from engine.kernels.quant.layouts import STEP
from engine.kernels.quant.nearest import nearest
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES
from engine.model.loading import has_native_bfloat16
from engine.model.rotary import cosines_sines, hold_frequencies

_ROWS_AT_ONCE = 4096  # rows of a table, so that a load takes little more memory than it keeps


def draft_dtype(device: torch.device) -> torch.dtype:
    """Return the type that heads compute in: bfloat16 where its products are fast, else float32."""
    return torch.bfloat16 if device.type != "cpu" or multiplies(torch.bfloat16) else torch.float32


def small_dtype(device: torch.device) -> torch.dtype:
    """Return the type that heads compute in where torch does the products: `draft_dtype`, but float32 where bfloat16 is
    slow.
    """
    return draft_dtype(device) if device.type != "cpu" or has_native_bfloat16() else torch.float32


# cuDNN's attention, torch's choice on an H100, builds a plan for every new length of a text: 30 to 50 ms each round.
torch.backends.cuda.enable_cudnn_sdp(False)


class Linear:
    """A product x [n, in] -> [n, out], with the weight laid out for few rows. weight: [out, in] as stored in
    checkpoints, or parts that are stored in codes.

    gated: the matrix stacks the gate and up projections; the result is silu(gate) * up. A draft step over a few rows
    takes as long as reading its matrices, so on a CPU they are kept in 8 bits, or in the bits of their file, and rows
    are rounded to 8 bits too, unless AMX multiplies bfloat16.
    """

    rounds = False  # rows before the product

    def __init__(self, weight: Multiplied, bias: Tensor | None = None, gated: bool = False, coded: bool = True):
        """Lay the weight out. coded: False to keep the matrix as it is, and the rows."""
        self.bias, self.gated = bias, gated
        self.weight, self.packed, self.matmul = torch.empty(0), None, None
        if not isinstance(weight, Tensor):
            outputs, self.inputs = shape_of(weight)
            self.matmul = _stored_product(weight, bias, gated, coded)
        else:
            outputs, self.inputs = weight.shape
            whole = not gated or outputs % (2 * LANES) == 0
            self.matmul = _multiplied(weight, bias, gated, coded) if whole and can_multiply(weight) else None
            self.packed = None if self.matmul else pack(weight)
            self.weight = weight if self.matmul is None and self.packed is None else weight.new_empty(0)
        self.outputs: int = outputs // (2 if gated else 1)

    def __call__(self, x: Tensor) -> Tensor:
        if self.matmul is not None:
            return self.matmul(x)
        out = F.linear(x, self.weight, self.bias) if self.packed is None else packed_product(x, self.packed, self.bias)
        if not self.gated:
            return out
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up


def _multiplied(weight: Tensor, bias: Tensor | None, gated: bool, coded: bool) -> Matmul:
    fits = weight.shape[0] % LANES == 0 and weight.shape[1] % STEP == 0
    if not (coded and fits and weight.dtype == torch.bfloat16 and (_rounds_rows() or units()[0].paired)):
        return Matmul(weight, bias, gated)
    return _stored_product([nearest(weight)], bias, gated, coded)


def _stored_product(stored: Sequence[StoredMatrix], bias: Tensor | None, gated: bool, coded: bool) -> Matmul:
    if coded and _rounds_rows() and all(part.layout.coded for part in stored):
        return Int8Matmul(stored, bias, gated)
    return Matmul(stored, bias, gated)


def _rounds_rows() -> bool:
    """Return whether rows are rounded to 8 bits: AMX multiplies bfloat16 in less time."""
    return bool(instruction_sets()) and units()[0] is not Unit.AMX


class PairLinear:
    """A product (token, x [n, in]) -> [n, out] over the token's embedding and x, concatenated.

    The embedding's part is computed once for each token: a step then reads a row of `of_token` [vocab, out] instead of
    half of the weight. On a CPU a row is computed when it is first needed, and takes no memory until then.
    """

    def __init__(self, embed: Callable[[Tensor], Tensor], vocab: int, weight: Multiplied, bias: Tensor | None = None):
        """Lay the weight out. embed: the embeddings [n, e] of tokens [n]; weight: [out, e + in]. Where a device records
        steps, all rows are computed now.
        """
        self._embed, one = embed, embed(torch.zeros(1, dtype=torch.int64))
        of_embedding, of_x = split_inputs(weight, one.shape[1])
        self._of_embedding, self.linear = Linear(of_embedding, bias, coded=False), Linear(of_x)
        self.of_token = one.new_empty(vocab, self.linear.outputs)
        self._computed = np.zeros(vocab, bool)
        if one.device.type != "cpu":
            self._compute(torch.arange(vocab))

    def reserve(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Compute the rows of these tokens that are not there yet."""
        if not self._computed[tokens].all():
            known = np.unique(tokens)
            self._compute(torch.from_numpy(known[~self._computed[known]]))

    def _compute(self, tokens: Tensor) -> None:
        for some in tokens.split(_ROWS_AT_ONCE):
            self.of_token[some] = self._of_embedding(self._embed(some))
        self._computed[tokens.cpu().numpy()] = True

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        if tokens.device.type == "cpu":
            self.reserve(tokens.numpy())
        return self.linear(x).add_(self.of_token.index_select(0, tokens))


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps). It is written out: on a CPU F.rms_norm takes 100 us for one row, this takes
    10.
    """

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight, torch.full((), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale.to(x.dtype)).mul_(self.weight)


class Rotary:
    """Rotary position embedding with cached tables, any scaling a Llama config can name."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype):
        self.module = LlamaRotaryEmbedding(config).to(device)
        hold_frequencies(self.module)
        self.device, self.dtype = device, dtype
        self.table = self._of(0, 256)

    def reserve(self, positions: int) -> None:
        """Prepare the cosines and sines of all positions below `positions`: table [positions, 2, 1, head_dim]."""
        if positions <= (held := len(self.table)):
            return
        self.table = torch.cat([self.table, self._of(held, 2 * positions)])

    def halves(self, positions: int) -> Tensor:
        """Return [positions, head_dim] float32: cosines of the first half of the dimensions, then sines."""
        return torch.cat(cosines_sines(self.module, 0, positions, self.device), dim=1)

    def _of(self, first: int, end: int) -> Tensor:
        """Return the table's part for positions `first` to `end`."""
        cos, sin = cosines_sines(self.module, first, end, self.device)
        # The sines have the sign of rotate_half, so that `roll` suffices.
        return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)], dim=1)[:, :, None].to(
            self.dtype
        )

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x: [n, heads, head_dim], at positions: [n]."""
        cos, sin = self.table.index_select(0, positions).unbind(1)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class HeadCache:
    """Keys and values of one request in one preallocated block: [2, kv_heads, capacity, head_dim]."""

    def __init__(self, layer: DecoderLayer, capacity: int):
        shape = (2, layer.kv_heads, capacity, layer.head_dim)
        self.data = torch.empty(shape, device=layer.device, dtype=layer.attends_in)
        layer.rotary.reserve(capacity)
        self.capacity = capacity

    def write(self, keys: Tensor, values: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Write states [kv_heads, n, head_dim] to the slots from `at` on, and return all up to them."""
        held_keys, held_values = self.data[0], self.data[1]
        end = at + keys.shape[1]
        held_keys[:, at:end], held_values[:, at:end] = keys, values
        return held_keys[:, :end], held_values[:, :end]


def qkv_weights(config: LlamaConfig, tensors: HeadTensors, inputs: int) -> tuple[Multiplied, Tensor | None]:
    """Take the weights of a layer's queries, keys and values: [(heads + 2 * kv_heads) * head_dim, inputs] and a bias.

    tensors: of the layer. inputs: width of the attention's input.
    """
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    weight = tensors.matrices({f"self_attn.{name}_proj.weight": size for name, size in sizes.items()}, inputs)
    bias = None
    if getattr(config, "attention_bias", False) or getattr(config, "qkv_bias", False):
        bias = torch.cat([tensors.vector(f"self_attn.{name}_proj.bias", size) for name, size in sizes.items()])
    return weight, bias


class DecoderLayer:
    """A Llama layer over a preallocated cache, given queries, keys and values: heads differ in how they compute these.

    tensors: of the layer.
    """

    def __init__(self, config: LlamaConfig, tensors: HeadTensors, device: torch.device, dtype: torch.dtype):
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or hidden // self.heads
        self.device, self.dtype = device, dtype
        # A CPU's attention over one row takes six times as long in bfloat16 as in float32, over ten rows a fifth more.
        self.attends_in = torch.float32 if device.type == "cpu" else dtype
        self.rotary = Rotary(config, device, self.attends_in)
        out_bias = tensors.vector("self_attn.o_proj.bias", hidden) if getattr(config, "attention_bias", False) else None
        self.out = Linear(tensors.matrix("self_attn.o_proj.weight", hidden, self.heads * self.head_dim), out_bias)
        self.norm = RMSNorm(tensors.vector("post_attention_layernorm.weight", hidden), config.rms_norm_eps)
        gate_up = {"mlp.gate_proj.weight": ffn, "mlp.up_proj.weight": ffn}
        self.gate_up = Linear(tensors.matrices(gate_up, hidden, gated=True), gated=True)
        self.down = Linear(tensors.matrix("mlp.down_proj.weight", hidden, ffn))
        self.query_norm: RMSNorm | None = None  # over each head, in families that have such norms
        self.key_norm: RMSNorm | None = None

    def __call__(
        self, qkv: Tensor, residual: Tensor, positions: Tensor, cache: HeadCache, at: int, mask: Tensor | None
    ) -> Tensor:
        """Return [n, hidden]. residual: [n, hidden]; for the rest see `attended`."""
        x = residual + self.attended(qkv, positions, cache, at, mask)
        return x + self.mlp(self.norm(x))

    def mlp(self, x: Tensor) -> Tensor:
        """Return [n, hidden], what the MLP makes of the normed x."""
        return self.down(self.gate_up(x))

    def attended(self, qkv: Tensor, positions: Tensor, cache: HeadCache, at: int, mask: Tensor | None) -> Tensor:
        """Return [n, hidden]. qkv: [n, (heads + 2 * kv_heads) * head_dim]; at: as for `HeadCache.write`.

        mask: [n, slots returned] bool, what each row may attend to; None for one row that sees all of them.
        """
        n, heads, kv = len(qkv), self.heads, self.kv_heads
        qkv = qkv.view(n, heads + 2 * kv, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(qkv[:, :heads]), self.key_norm(qkv[:, heads : heads + kv])
            qkv = torch.cat([query, key, qkv[:, heads + kv :]], dim=1)
        qkv = qkv.to(self.attends_in)
        rotated = self.rotary(qkv[:, : heads + kv], positions)
        keys, values = cache.write(rotated[:, heads:].transpose(0, 1), qkv[:, heads + kv :].transpose(0, 1), at)
        attended = F.scaled_dot_product_attention(
            rotated[:, :heads].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            enable_gqa=kv != heads,
        )
        return self.out(attended[0].transpose(0, 1).reshape(n, -1).to(self.dtype))

    def keys_values(self, kv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, [kv_heads, n, head_dim] each, of kv: [n, 2 * kv_heads * head_dim]."""
        kv = kv.view(len(kv), 2 * self.kv_heads, self.head_dim)
        key = kv[:, : self.kv_heads] if self.key_norm is None else self.key_norm(kv[:, : self.kv_heads])
        key = self.rotary(key.to(self.attends_in), positions)
        return key.transpose(0, 1), kv[:, self.kv_heads :].to(self.attends_in).transpose(0, 1)


def causal_mask(n: int, past: int, device: torch.device) -> Tensor:
    """Return [n, past + n] bool: each of n new rows sees the past and the new rows up to itself."""
    return torch.ones(n, past + n, dtype=torch.bool, device=device).tril_(past)


def llama_config(values: dict[str, Any], path: str) -> LlamaConfig:
    """Read the head's `config.json` as a Llama configuration; heads of every family are Llama layers."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    for key in needed:
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise ModelError(
                f"drafter.path={path}: config.json: {key}={values.get(key)!r} is not a positive count: copy it again"
            )
    ignored = {"model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "num_hidden_layers"}
    ignored |= {"layer_types"}  # of all layers, and this configuration is of one
    try:
        return LlamaConfig(**{key: value for key, value in values.items() if key not in ignored}, num_hidden_layers=1)
    except Exception as error:
        raise ModelError(f"drafter.path={path}: config.json: {first_line(error)}: copy it again") from None
