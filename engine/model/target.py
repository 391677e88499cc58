"""A loaded Hugging Face causal language model that verifies token trees, of many requests in one forward.

Of the ways to run it (`engine.model.forward`) the first that works is used, which is found by trial
(`engine.model.probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import Activations, Config
from engine.core.batch import BLOCK, Batch, Segment
from engine.core.errors import ConfigError, ModelError, first_line
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.kernels.attention.attention import has_pairs
from engine.kernels.gemm.packed_linear import PackedLinear, multiplies, pack_linears
from engine.kernels.pointwise import PointwiseOperations
from engine.model.cuda_products import allow_split_sums, exact_sizes, forbid_split_sums
from engine.model.decoder import LeanDecoder
from engine.model.decoder_layer import OtherStructure
from engine.model.forward import Forward
from engine.model.free_memory import free_memory
from engine.model.kv_pool import KVCache, KVPool
from engine.model.loading import (
    eos_tokens,
    find_device,
    find_dtype,
    load_config,
    load_model,
    name_of,
    skeleton,
    steady_context,
)
from engine.model.masked import MaskedForward, refusal
from engine.model.memory_need import check_memory
from engine.model.probe import ModelProbe
from engine.model.proof import Proof
from engine.model.rotary import hold_frequencies
from engine.model.stock import NAME, StockForward, Unsupported
from engine.model.stock_logits import LayeredStock, WholeStock
from engine.model.windows import short_windows
from engine.weights.gguf_source import open_gguf
from engine.weights.gguf_weights import GgufWeights, Unreadable

if TYPE_CHECKING:
    from engine.model.cuda.cuda_forward import CudaForward

_POOL_SHARE = 0.25  # share of free memory for keys and values
_BESIDE = "a token's logits depend on the rows beside it"


class Target:
    """A model, and the facts about it that decoding needs.

    full_context: the maximum positions that the configuration names; own_context: those over which a cached key stays
    valid. eos_tokens: the ids that end an answer. exact: whether a token's
    logits have the same bits whatever other rows are in the forward; inexact: why not, "" if it is exact. unlike: why a
    CPU runs the stock forward, which takes longer, and not the lean decoder; "" if it does not.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        kv_memory: int | None = None,
        weights: GgufWeights | None = None,
        activations: Activations = "bfloat16",
    ):
        """weights: of a model on the meta device. activations: how their matrices take rows. Raises OtherStructure if
        the lean decoder cannot run those.
        """
        self.model = model.eval()
        self.name = name
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        if (context := getattr(config, "max_position_embeddings", None)) is None:
            raise refusal(model, name)
        self.full_context: int = context
        self.own_context = steady_context(config, context)
        self.layers: int = config.num_hidden_layers
        self.eos_tokens = eos_tokens(model.generation_config)
        self.device = torch.device("cpu") if weights is not None else model.device
        self.dtype: torch.dtype = model.dtype
        self.pool: KVPool | None = None
        self.inexact = ""
        self._forward: Forward | None = None
        self._masked: MaskedForward | None = None
        self.unlike = ""
        if weights is None:
            self._choose_forward(kv_memory)
        else:
            self._take_lean(weights, kv_memory, activations)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: str = "auto",
        device: str = "auto",
        kv_memory: int | None = None,
        activations: Activations = "bfloat16",
    ) -> Target:
        """Load a checkpoint directory or hub id. kv_memory: bytes for keys and values, None: a share of free memory.
        activations: int8 for matrices in blocks, where there are any and the lean decoder runs them: see `activations`.
        """
        target = cls._load_gguf(path, dtype, find_device(device), kv_memory, activations)
        if target is None:
            target = cls(load_model(path, dtype, find_device(device)), path, kv_memory)
        if isinstance(target._forward, LeanDecoder):
            target.model.model.layers = torch.nn.ModuleList()  # the decoder has copies in its own layout
        return target

    @classmethod
    def of_config(cls, config: Config) -> Target:
        """The target that a configuration names. Raises ConfigError if it cannot have those activations."""
        memory = config.verifier.kv_memory
        target = cls.load(config.model, config.dtype, config.device, memory, config.activations)
        if config.activations != target.activations:
            raise ConfigError(
                f"activations={config.activations}: this model has no matrices in blocks that this processor "
                f"multiplies so; take a GGUF file of a common structure, or activations={target.activations}"
            )
        return target

    @classmethod
    def _load_gguf(
        cls, path: str, dtype: str, device: torch.device, kv_memory: int | None, activations: Activations
    ) -> Target | None:
        """The target of a directory that describes a GGUF file, with nothing in memory but the decoder's own layout;
        None if the stock forward has to be loaded for it.
        """
        if device.type != "cpu" or (gguf := open_gguf(Path(path))) is None:
            return None
        config = load_config(path)
        if find_dtype(dtype, config, device) != torch.bfloat16 or not multiplies(torch.bfloat16):
            return None
        check_memory(gguf, f"model={path}", free_memory())
        model = skeleton(path, config)
        try:
            return cls(model, path, kv_memory, GgufWeights(gguf, model), activations)
        except (Unreadable, OtherStructure, AttributeError):  # a part of the structure is missing
            return None

    @property
    def context(self) -> int:
        """The maximum positions of a request: the model's, as far as the pool has room for them."""
        return self.own_context if self.pool is None else min(self.own_context, self.pool.blocks * BLOCK)

    @property
    def activations(self) -> Activations:
        """How the products take their rows: int8 if matrices in blocks do."""
        return self._forward.activations if isinstance(self._forward, LeanDecoder) else "bfloat16"

    @property
    def exact(self) -> bool:
        return not self.inexact

    @property
    def accelerated(self) -> bool:
        """Whether the forward with exact attention is that of `engine.model.cuda.cuda_forward`."""
        return bool(self.device.type == "cuda")

    @property
    def forward_sizes(self) -> tuple[int, ...]:
        """How many rows a forward computes: fewer are padded to the next of these, more run in slices of the last."""
        if self._forward is None or not self.accelerated:
            return (1,)
        return cast("CudaForward", self._forward).sizes

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as they are laid out."""
        if isinstance(self._forward, LeanDecoder):
            return self._forward.weight_bytes
        packed = (module.product.bytes for module in self.model.modules() if isinstance(module, PackedLinear))
        others: int = sum(weight.nbytes for weight in self.model.parameters())
        return others + sum(packed)

    @property
    def matrix_bytes(self) -> int | None:
        """Bytes of the weights that a forward reads; None if their layout is not ours."""
        return self._forward.matrix_bytes if isinstance(self._forward, LeanDecoder) else None

    def new_cache(self, capacity: int) -> Any:
        """An empty cache for one request, with room for `capacity` positions, tree nodes included.

        Raises OutOfBlocks if the pool has no room for it.
        """
        if self._masked is not None:
            return self._masked.new_cache(capacity)
        assert self.pool is not None
        cache = KVCache(self.pool)
        cache.reserve(capacity)
        return cache

    def open_cache(self, most: int, tenant: str = "") -> Any:
        """An empty cache for one request of at most `most` positions, drafts included; it takes blocks as it grows.
        tenant: see `KVCache`.
        """
        return KVCache(self.pool, tenant) if self.pool is not None else self.new_cache(most)

    def release(self, cache: Any) -> None:
        """Release the cache of a finished request."""
        if self._masked is not None:
            self._masked.release(cache)
        else:
            cache.release()

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """One forward over all segments; the caller commits.

        Returns the logits of the rows wanted, in the segments' order, [chosen, vocab] in the model's type, and
        [rows, layers, hidden] features if layers are requested.
        """
        if self._masked is not None:
            return self._masked(segments, feature_layers)
        assert self._forward is not None
        for segment in segments:
            segment.cache.reserve(segment.past + segment.pending + len(segment))
        return self._forward(Batch.of(segments), feature_layers)

    def prefill(
        self, cache: Any, tokens: Sequence[int], feature_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Forward `tokens` and commit them after what the cache holds.

        Returns the last position's logits, [vocab] float32, and [tokens, layers, hidden] features if layers are
        requested.
        """
        logits, features = self.run([Segment.of_text(tokens, cache)], feature_layers)
        cache.commit(range(len(tokens)))
        return logits[0].float(), features

    def verify(
        self, cache: Any, tree: TokenTree, feature_layers: tuple[int, ...] = (), first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over the tree's nodes from `first` on; the caller commits the accepted path.

        The nodes before `first` were forwarded already (a draft model grows its tree level by level).
        Returns [nodes, vocab] float32 logits and [nodes, layers, hidden] features if layers are requested.
        """
        logits, features = self.run([Segment.of_tree(tree, cache, first)], feature_layers)
        return logits.float(), features

    # Which forward.

    @torch.inference_mode()
    def _choose_forward(self, kv_memory: int | None) -> None:
        if self.accelerated:
            forbid_split_sums()
        trial = ModelProbe(self.model, self.name, self.own_context, WholeStock(self.model, self.name))
        hold_frequencies(self.model)
        self.inexact = self._try_exact(trial, kv_memory)
        if self.inexact and self._forward is None:
            self._take_masks(trial)
            self.unlike = self.inexact if self.device.type == "cpu" else ""

    @torch.inference_mode()
    def _take_lean(self, weights: GgufWeights, kv_memory: int | None, activations: Activations) -> None:
        """Run the lean decoder, once it agrees with the stock forward, which is run layer by layer."""
        weights.fill_small(self.model)
        proof = Proof(Path(self.name), self.own_context, activations)
        stock = LayeredStock(self.model, weights)
        trial = None
        if (rules := proof.read()) is None:
            trial = ModelProbe(self.model, self.name, self.own_context, stock)
            rules = stock.passed[-1]
        hold_frequencies(self.model)
        self.pool, q_per_kv = self._make_pool(kv_memory, weights.gguf.size)
        self._forward = lean = LeanDecoder(self.model, self.pool, q_per_kv, rules, weights.matrix, activations)
        if trial is not None:
            if trial.beyond is not None:
                lean.take_rules(stock.passed[0])
                agrees = trial.agrees(self, trial.beyond)
                lean.take_rules(rules)
            if (trial.beyond is not None and not agrees) or not trial.agrees_anywhere(self):
                raise OtherStructure("its logits differ from those of the stock forward")
            lean.forget_far()
            if trial.equal_bits(self):
                proof.write(rules)
            else:
                self.inexact = _BESIDE

    def _take_masks(self, trial: ModelProbe) -> None:
        """Fall back to masks."""
        try:
            with short_windows(trial.config):  # a forward looks up the windows when it is made
                self._masked = MaskedForward(self.model, self.name, trial.heeds_windows)
                agrees = trial.beyond is None or trial.agrees(self, trial.beyond)
            self._masked = MaskedForward(self.model, self.name, trial.heeds_windows)
            self._masked.check_recording()
            agrees = agrees and trial.agrees_anywhere(self)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refusal(self.model, self.name) from error
        if not agrees:
            raise refusal(self.model, self.name)

    def _try_exact(self, trial: ModelProbe, kv_memory: int | None) -> str:
        """Set up a forward with exact attention. Returns why the target is not exact, "" if it is."""
        if self.dtype not in (torch.float32, torch.bfloat16):
            return f"its type is {name_of(self.dtype)}"
        if self.accelerated:
            return self._try_cuda(trial, kv_memory)
        if self.device.type != "cpu":
            return f"exact attention is not there for {self.device.type} yet"
        with PointwiseOperations() as pointwise:
            reason = self._try_attention(StockForward, trial, kv_memory)
        if reason:
            pack_linears(self.model)
            return reason
        exact = self._try_lean(trial)
        if isinstance(self._forward, StockForward):
            exact = pack_linears(self.model)
            if (other := _other_matrix(self.model)) is not None:
                return f"{other} is multiplied in a way of its own"
            if (operation := pointwise.depending_on_place(torch.get_num_threads())) is not None:
                return f"on this machine {operation} depends on the rows before it"
        if not exact:
            return f"products in {name_of(self.dtype)} depend on the number of rows on this machine"
        return "" if trial.equal_bits(self) else _BESIDE

    def _try_cuda(self, trial: ModelProbe, kv_memory: int | None) -> str:
        """The same on CUDA."""
        try:
            from engine.model.cuda.cuda_forward import CudaForward
        except ImportError:
            return "exact attention on CUDA needs Triton: pip install triton"
        if reason := self._try_attention(CudaForward.tried, trial, kv_memory):
            return reason
        if (other := _other_matrix(self.model)) is not None:
            return f"{other} is multiplied in a way of its own"
        assert isinstance(self._forward, CudaForward)
        if self._forward.take_lean(self.own_context) and not trial.agrees_anywhere(self):
            self._forward.drop_lean()
        if not self._take_sizes(self._forward):
            return f"products in {name_of(self.dtype)} depend on a row's place on this machine"
        return "" if trial.equal_bits(self) else _BESIDE

    def _take_sizes(self, forward: CudaForward) -> bool:
        """Let the forward have the sizes that give a row the same bits; with none but the usual one, split sums are
        allowed again. Returns whether there is any.
        """
        usual = forward.sizes
        found = exact_sizes(forward.linears, forward.possible)
        if len(found) > 1:
            found = forward.agreeing(found)
        if len(found) > 1:
            forward.sizes = found
            return True
        allow_split_sums()
        forward.recorded.clear()  # they were captured with the other products
        return exact_sizes(forward.linears, usual) == usual

    def _try_attention(
        self, make: Callable[[Any, KVPool, int], Forward], trial: ModelProbe, kv_memory: int | None
    ) -> str:
        """Set up the stock forward that `make` makes. Returns why that failed, with everything restored, or ""."""
        usual = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(NAME)
            self.pool, groups = self._make_pool(kv_memory)
            with short_windows(trial.config):  # a CUDA graph keeps the windows that it was captured with
                self._forward = make(self.model, self.pool, groups)
                agrees = trial.beyond is None or trial.agrees(self, trial.beyond)
            self._forward = make(self.model, self.pool, groups)
            agrees = trial.agrees_anywhere(self) and agrees
            reason = "" if agrees else "its logits differ with exact attention"
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"verifier.kv_memory: the GPU has no room for the pool beside the model ({first_line(error)}); lower it"
            ) from error
        except (Unsupported, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            reason = f"its attention cannot be replaced ({first_line(error)})"
        if reason:
            self._forward = self.pool = None
            self.model.set_attn_implementation(usual)
        return reason

    def _try_lean(self, trial: ModelProbe) -> bool:
        """Use the lean decoder if the model has its structure and the logits agree.

        Returns whether its products are exact.
        """
        stock = self._forward
        assert self.pool is not None and isinstance(stock, StockForward)
        try:
            q_per_kv = stock.attention.groups
            lean = LeanDecoder(self.model, self.pool, q_per_kv, stock.rules, lambda weight: weight)
        except (OtherStructure, AttributeError) as error:  # a part of the structure is missing
            self.unlike = first_line(error)
            return False
        self._forward = lean
        if not trial.agrees_anywhere(self):
            self._forward, self.unlike = stock, "its logits differ from those of the lean decoder"
            return False
        lean.forget_far()
        return lean.exact

    def _make_pool(self, kv_memory: int | None, weights: int = 0) -> tuple[KVPool, int]:
        """The pool, and query heads per key head. weights: bytes that are still to be read into memory."""
        config = self.model.config.get_text_config()
        heads: int = config.num_attention_heads
        kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        vnni = not self.accelerated and has_pairs(self.dtype)
        shape = KVShape(self.layers, kv_heads, head_dim, self.dtype, vnni)
        memory = int(_POOL_SHARE * (_free_memory(self.device) - weights)) if kv_memory is None else kv_memory
        return KVPool(shape, max(1, memory // shape.block_bytes), self.device), heads // kv_heads


def _other_matrix(model: Any) -> str | None:
    """A matrix that is neither an embedding nor in a linear layer (experts of few rows, say), by its name."""
    known = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or type(module) is torch.nn.Linear
    }
    others = (name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in known)
    return next(others, None)


def _free_memory(device: torch.device) -> int:
    """Free bytes of the device."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return free_memory()


def bfloat16_bits(features: Tensor) -> NDArray[np.uint16]:
    """The features, rounded to bfloat16, as messages carry them: numpy has no such type."""
    bits: NDArray[np.uint16] = features.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
    return bits
