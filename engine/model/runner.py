"""A model's forward with the caches that it takes: what decoding runs, and what a trial at load tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import Activations
from engine.core.batch import Batch, Segment
from engine.core.errors import OutOfBlocks
from engine.core.tree import TokenTree
from engine.model.decoder import LeanDecoder
from engine.model.forward import Forward
from engine.model.kv_cache import KVCache, commit_all
from engine.model.kv_pool import KVPool

if TYPE_CHECKING:
    from engine.model.cuda.cuda_forward import CudaForward
    from engine.model.masked import MaskedForward


class Runner:
    """Runs forwards over the requests of a target. pool: where the keys and values of all requests are; None for the
    forward with masks, whose caches hold them.
    """

    def __init__(self, forward: Forward | MaskedForward, pool: KVPool | None, vocab_size: int, dtype: torch.dtype):
        self.forward, self.pool, self.vocab_size, self.dtype = forward, pool, vocab_size, dtype

    @property
    def _masked(self) -> MaskedForward:
        return cast("MaskedForward", self.forward)  # whose module imports transformers, for seconds

    @property
    def activations(self) -> Activations:
        """How the products take their rows: int8 if matrices in blocks do."""
        return self.forward.activations if isinstance(self.forward, LeanDecoder) else "bfloat16"

    @property
    def kv_type(self) -> str:
        """What keys and values are kept as: the name of the model's type, or q8_0."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.pool is None else self.pool.kind

    def new_cache(self, capacity: int) -> Any:
        """Return an empty cache for one request, with space for `capacity` positions, tree nodes included.

        Raises OutOfBlocks if the pool has no space for it.
        """
        if self.pool is None:
            return self._masked.new_cache(capacity)
        cache = KVCache(self.pool)
        try:
            cache.reserve(capacity)
        except OutOfBlocks:
            cache.release()
            raise
        return cache

    def open_cache(self, most: int, tenant: str = "") -> Any:
        """Return an empty cache for one request of at most `most` positions, drafts included; it takes blocks as it
        grows. tenant: see `KVCache`.
        """
        return KVCache(self.pool, tenant) if self.pool is not None else self.new_cache(most)

    def release(self, cache: Any) -> None:
        """Release the cache of a finished request."""
        if self.pool is None:
            self._masked.release(cache)
        else:
            cache.release()

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Run one forward over all segments; the caller commits.

        Returns the logits of the rows wanted, in the segments' order, [chosen, vocab] in the model's type, and [rows,
        layers, hidden] features if layers are requested.
        """
        if self.pool is None:
            return self._masked(segments, feature_layers)
        for segment in segments:
            segment.cache.reserve(segment.past + segment.pending + len(segment))
        return cast("Forward", self.forward)(Batch.of(segments), feature_layers)

    @torch.inference_mode()
    def run_roots(
        self, roots: Sequence[Segment], tokens: Tensor, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run what `run` does over roots whose tokens are on the device alone, [roots] int32. Raises OutOfBlocks."""
        for root in roots:
            root.cache.reserve(root.past + 1)
        return cast("CudaForward", self.forward)(Batch.of(roots), feature_layers, tokens)

    def commit(self, accepted: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """Keep, in each cache, the rows of its last segment that are given (ascending), as its next positions."""
        if self.pool is not None:
            commit_all(accepted)
            return
        for cache, path in accepted:
            cache.commit(path)

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
        """Run one forward over the tree's nodes from `first` on; the caller commits the accepted path.

        The nodes before `first` were forwarded already (a draft model grows its tree level by level). Returns [nodes,
        vocab] float32 logits and [nodes, layers, hidden] features if layers are requested.
        """
        logits, features = self.run([Segment.of_tree(tree, cache, first)], feature_layers)
        return logits.float(), features


class Chosen(NamedTuple):
    """The runner that a trial has chosen. inexact_reason: why a token's bits depend on other rows, "" if they do
    not. stock_reason: why a CPU does not run the lean decoder, "" if it does.
    """

    runner: Runner
    inexact_reason: str
    stock_reason: str = ""


def bfloat16_bits(features: Tensor) -> NDArray[np.uint16]:
    """Return the features, rounded to bfloat16, as messages carry them: numpy has no such type."""
    bits: NDArray[np.uint16] = features.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
    return bits
