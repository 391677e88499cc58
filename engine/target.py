"""A loaded Hugging Face causal language model that verifies token trees, of many requests in one forward.

Three ways to run it, the first that serves the model: the lean decoder (`engine.model.decoder`), the stock forward with
exact attention (`engine.model.stock`), and the stock forward with masks (`engine.model.masked`). Which one does is
found by trying: logits are compared with the untouched model's, and bits of one token alone with those in a batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Segment
from engine.errors import ModelError
from engine.loading import eos_tokens, find_device, first_line, load_model, name_of, steady_context
from engine.model.attention import has_tiles
from engine.model.decoder import LeanDecoder, OtherStructure
from engine.model.kv_pool import KVCache, KVPool, KVShape
from engine.model.masked import MaskedForward, refusal
from engine.model.packed_linear import can_multiply, pack_linears
from engine.model.pointwise import PointwiseOperations
from engine.model.quantised import Quantised
from engine.model.quantised_file import read_quantised
from engine.model.stock import NAME, StockForward, Unsupported
from engine.model.windows import short_windows
from engine.tree import TokenTree

_POOL_SHARE = 0.25  # of the memory that is free, for keys and values
_TRIAL_TOKENS = 24  # of the text that a model is tried with
_DRAFT_ROOM = 64  # rows of drafts that fit into the pool beside the longest text


class Target:
    """A model, and the facts about it that decoding needs.

    context: the most positions it can hold. eos_tokens: the ids that end an answer. exact: whether a token's logits are
    the same bits whatever stands beside it in the forward; inexact: why not, "" if it is exact.
    """

    def __init__(
        self, model: Any, name: str, kv_memory: int | None = None, quantised: dict[int, Quantised] | None = None
    ):
        self.model = model.eval()
        self.name = name
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        if (context := getattr(config, "max_position_embeddings", None)) is None:
            raise refusal(model, name)
        self.context = steady_context(config, context)
        self.layers: int = config.num_hidden_layers
        self.eos_tokens = eos_tokens(model.generation_config)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.pool: KVPool | None = None
        self.inexact = ""
        self._forward: LeanDecoder | StockForward | None = None
        self._masked: MaskedForward | None = None
        self._quantised = quantised or {}
        self._choose_forward(kv_memory)
        self._quantised = {}  # what the forward took of it, it has laid out its own way

    @classmethod
    def load(cls, path: str, dtype: str = "auto", device: str = "auto", kv_memory: int | None = None) -> Target:
        """Load a checkpoint directory or hub id. kv_memory: bytes for keys and values, None for a share of the free."""
        model = load_model(path, dtype, find_device(device))
        multiplies = can_multiply(model.get_input_embeddings().weight)
        target = cls(model, path, kv_memory, read_quantised(Path(path), model) if multiplies else None)
        if isinstance(target._forward, LeanDecoder):
            model.model.layers = torch.nn.ModuleList()  # the decoder has copies, laid out its own way
        return target

    @property
    def exact(self) -> bool:
        return not self.inexact

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

    def open_cache(self, most: int) -> Any:
        """An empty cache for one request of at most `most` positions, drafts included; it takes blocks as it grows."""
        return KVCache(self.pool) if self.pool is not None else self.new_cache(most)

    def release(self, cache: Any) -> None:
        """The request is over."""
        if self._masked is not None:
            self._masked.release(cache)
        else:
            cache.release()

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """One forward over all segments; the caller commits.

        Returns the logits of the rows wanted, in the segments' order, [chosen, vocab] in the model's type, and
        [rows, layers, hidden] features if layers are asked.
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
        """Commit `tokens` behind what the cache holds.

        Returns the last position's logits, [vocab] float32, and [tokens, layers, hidden] features if layers are asked.
        """
        logits, features = self.run([Segment.of_text(tokens, cache)], feature_layers)
        cache.commit(range(len(tokens)))
        return logits[0].float(), features

    def verify(
        self, cache: Any, tree: TokenTree, feature_layers: tuple[int, ...] = (), first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over the tree's nodes from `first` on; the caller commits the accepted path.

        The nodes before `first` were forwarded already (a draft model grows its tree level by level).
        Returns [nodes, vocab] float32 logits and [nodes, layers, hidden] features if layers are asked.
        """
        logits, features = self.run([Segment.of_tree(tree, cache, first)], feature_layers)
        return logits.float(), features

    # Which forward.

    @torch.inference_mode()
    def _choose_forward(self, kv_memory: int | None) -> None:
        tokens = [(7 + 31 * i) % self.vocab_size for i in range(_TRIAL_TOKENS)]
        expected = self._untouched(tokens)
        if expected.isnan().any():
            raise ModelError(
                f"model={self.name}: the logits of a short text are not numbers (NaN) in {name_of(self.dtype)}: "
                "the model overflows, or its weights are damaged; use dtype: float32 or get the checkpoint again"
            )
        with short_windows(self.model.config.get_text_config()) as windowed:
            beyond = self._untouched(tokens) if windowed else expected
        self.inexact = self._try_exact(tokens, expected, beyond, kv_memory)
        if self.inexact and self._forward is None:
            self._take_masks(tokens, expected, beyond)

    def _untouched(self, tokens: list[int]) -> Tensor:
        """The logits of a text by the model as it was loaded, [tokens, vocab] float32."""
        try:
            logits: Tensor = self.model(torch.tensor([tokens], device=self.device)).logits[0].float()
        except (TypeError, ValueError, RuntimeError) as error:
            raise refusal(self.model, self.name) from error
        return logits

    def _take_masks(self, tokens: list[int], expected: Tensor, beyond: Tensor) -> None:
        """Fall back to masks. beyond: the logits with short windows, `expected` itself if there are no windows."""
        heeded = beyond is expected or not torch.equal(beyond, expected)
        try:
            with short_windows(self.model.config.get_text_config()):
                self._masked = MaskedForward(self.model, self.name, heeded)
                agrees = beyond is expected or self._agrees(tokens, beyond)
            self._masked = MaskedForward(self.model, self.name, heeded)
            self._masked.check_recording()
            agrees = agrees and self._agrees(tokens, expected)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refusal(self.model, self.name) from error
        if not agrees:
            raise refusal(self.model, self.name)

    def _try_exact(self, tokens: list[int], expected: Tensor, beyond: Tensor, kv_memory: int | None) -> str:
        """Set up a forward with exact attention; says what stands against it."""
        if self.device.type != "cpu":
            return f"exact attention is not there for {self.device.type} yet"
        if self.dtype not in (torch.float32, torch.bfloat16):
            return f"its type is {name_of(self.dtype)}"
        usual = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(NAME)
            self.pool, groups = self._make_pool(kv_memory)
            stock = self._forward = StockForward(self.model, self.pool, groups)
            with short_windows(self.model.config.get_text_config()):
                agrees = beyond is expected or self._agrees(tokens, beyond)
            with PointwiseOperations() as pointwise:  # with the real windows, which the lean decoder takes over
                agrees = self._agrees(tokens, expected) and agrees
        except (Unsupported, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            agrees, reason = False, f"its attention cannot be replaced ({first_line(error)})"
        else:
            reason = "its logits differ with exact attention"
        if not agrees:
            self._forward = self.pool = None
            self.model.set_attn_implementation(usual)
            pack_linears(self.model)
            return reason
        exact = self._try_lean(stock, groups, tokens, expected)
        if self._forward is stock:
            exact = pack_linears(self.model)
            if (other := _other_matrix(self.model)) is not None:
                return f"{other} is multiplied in a way of its own"
            if (operation := pointwise.depending_on_place(torch.get_num_threads())) is not None:
                return f"on this machine {operation} depends on the rows before it"
        if not exact:
            return f"products in {name_of(self.dtype)} depend on the number of rows on this machine"
        return "" if self._equal_bits(tokens) else "a token's logits depend on the rows beside it"

    def _try_lean(self, stock: StockForward, groups: int, tokens: list[int], expected: Tensor) -> bool:
        """Take the lean decoder if the model has its structure and it computes the same.

        Returns whether its products are exact.
        """
        assert self.pool is not None
        try:
            lean = LeanDecoder(self.model, self.pool, groups, stock.rules, self._quantised)
        except (OtherStructure, AttributeError):  # a part that the structure has is not there
            return False
        self._forward = lean
        if not self._agrees(tokens, expected):
            self._forward = stock
            return False
        return lean.exact

    def _make_pool(self, kv_memory: int | None) -> tuple[KVPool, int]:
        config = self.model.config.get_text_config()
        heads: int = config.num_attention_heads
        kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = KVShape(self.layers, kv_heads, head_dim, self.dtype, has_tiles(self.dtype))
        memory = int(_POOL_SHARE * _free_memory()) if kv_memory is None else kv_memory
        return KVPool(shape, max(1, memory // shape.block_bytes)), heads // kv_heads

    def _agrees(self, tokens: list[int], expected: Tensor) -> bool:
        """Whether a text read in two parts, the second as a tree of two branches, has the untouched model's logits."""
        split = len(tokens) - 4
        cache = self.new_cache(len(tokens) + 8)
        try:
            self.prefill(cache, tokens[:split])
            wrong = (tokens[split] + 1) % self.vocab_size
            nodes = [tokens[split], wrong, tokens[split + 1], wrong, tokens[split + 2]]
            tree = TokenTree.from_lists(nodes, [-1, 0, 0, 2, 2], [1.0] * 5)
            logits, _ = self.verify(cache, tree)
        finally:
            self.release(cache)
        found, expected = logits[[0, 2, 4]], expected[split : split + 3]
        error, tolerance = (found - expected).pow(2).mean().sqrt(), 1e-3 if self.dtype == torch.float32 else 0.1
        return bool(error <= tolerance * expected.std())

    def _equal_bits(self, tokens: list[int]) -> bool:
        """Whether a token's logits are the same bits read with others, alone, and in a tree with wrong siblings."""
        read = self.new_cache(len(tokens))
        whole, _ = self.run([Segment.of_text(tokens, read, wanted="all")])
        self.release(read)
        alone = self.new_cache(len(tokens))
        equal = True
        for i, token in enumerate(tokens):
            logits, _ = self.run([Segment.of_text([token], alone)])
            alone.commit([0])
            equal &= torch.equal(logits[0], whole[i])
        self.release(alone)
        split = len(tokens) // 2
        nodes: list[int] = []
        parents: list[int] = []
        spine: list[int] = []
        for token in tokens[split:]:
            parent = spine[-1] if spine else -1
            spine.append(len(nodes))
            wrong = [(token + 1 + i) % self.vocab_size for i in range(2)]
            nodes += [token, *wrong] if parent >= 0 else [token]
            parents += [parent, parent, parent] if parent >= 0 else [parent]
        drafted = self.new_cache(len(tokens) * 3)
        self.prefill(drafted, tokens[:split])
        logits, _ = self.run([Segment.of_tree(TokenTree.from_lists(nodes, parents, [1.0] * len(nodes)), drafted)])
        self.release(drafted)
        return equal and torch.equal(logits[spine], whole[split:])


def _other_matrix(model: Any) -> str | None:
    """A matrix that is neither an embedding nor in one of our products (experts of few rows, say), by its name."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    others = (name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in tables)
    return next(others, None)


def _free_memory() -> int:
    """Bytes that can be taken without swapping."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30


def bfloat16_bits(features: Tensor) -> NDArray[np.uint16]:
    """The features, rounded to bfloat16, as messages carry them: numpy has no such type."""
    bits: NDArray[np.uint16] = features.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
    return bits
