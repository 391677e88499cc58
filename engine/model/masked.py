"""The stock forward with its own attention, for models that exact attention does not support: one segment at a time.

The 4-D mask and the position ids say what a row sees. A row's bits then depend on the other rows, so a target that runs
like this is not exact. On a GPU, verifications are captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.tree import TokenTree
from engine.model.cuda.graphs import CaptureOwner, Recorded, Spare, bucket, rounded
from engine.model.masked_cache import MaskedCache


class MaskedForward:
    """Runs one segment after the other. Raises ModelError for families that cannot take a tree mask.

    windowed: whether the model heeds the windows that its configuration names; some families ignore such a key.
    """

    sizes = (1,)

    def __init__(self, model: Any, name: str, windowed: bool = True):
        self.model, self.name = model, name
        config = model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo's window counts cache slots, not positions
            raise refusal(model, name, "its windows count slots of the cache, not positions")
        types, options = get_layer_types_and_kwargs(config)
        self._windows = {kind: option.get("sliding_window") for kind, option in zip(types, options, strict=True)}
        if not windowed and self._windows.pop("sliding_attention", None) is not None:
            self._windows["full_attention"] = None
        # whether forwards are recorded as graphs
        self.records = self.device.type == "cuda" and set(self._windows) == {"full_attention"}
        self._spare: Spare[MaskedCache] = Spare()
        self._owner = CaptureOwner()
        if unknown := set(self._windows) - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"model={name}: {config.model_type} has {sorted(unknown)} layers, which cannot take a tree mask"
            )

    def new_cache(self, capacity: int) -> MaskedCache:
        """Return an empty cache for one request of at most `capacity` positions, tree nodes included."""
        if not self.records:
            return MaskedCache(self.layers, capacity)
        capacity = rounded(capacity)
        spare = self._spare.take(capacity)
        return MaskedCache(self.layers, capacity, fixed=True) if spare is None else spare

    def release(self, cache: MaskedCache) -> None:
        """Take back a finished request's cache. Its CUDA graphs are reused by later requests."""
        if cache.fixed:
            cache.length = cache.pending = 0
            self._spare.give(cache.capacity, cache)

    def __call__(self, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Return logits of the wanted rows, [chosen, vocab], and features [rows, layers, hidden] if
        layers are given.
        """
        done = [self._segment(segment, tuple(feature_layers)) for segment in segments]
        logits = torch.cat([logits for logits, _ in done])
        features = [features for _, features in done if features is not None]
        return logits, torch.cat(features) if features else None

    def _segment(self, segment: Segment, feature_layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        cache: MaskedCache = segment.cache
        if segment.tree is None:
            first = segment.past + segment.offset
            positions = range(first, first + len(segment))
            kept = 0 if segment.wanted == "all" else 1  # 0 keeps every row
            logits, features = self._forward(cache, segment.tokens, positions, None, feature_layers, kept)
            return logits[: segment.wanted_rows], features
        return self._tree(cache, segment.tree, segment.pending, feature_layers, segment.offset)

    def _tree(
        self, cache: MaskedCache, tree: TokenTree, first: int, feature_layers: tuple[int, ...], offset: int
    ) -> tuple[Tensor, Tensor | None]:
        positions = tree.depths + cache.length
        if cache.fixed and not offset and first == 0 and cache.length + bucket(len(tree)) <= cache.capacity:
            return self._tree_recorded(cache, tree, positions, feature_layers)
        mask = self._tree_mask(cache.length, tree, positions, first) if len(tree) > 1 else None
        cache.pending = first
        return self._forward(cache, tree.tokens[first:], (positions[first:] + offset).tolist(), mask, feature_layers, 0)

    def _forward(
        self,
        cache: MaskedCache,
        tokens: NDArray[np.int32],
        positions: range | list[int],
        mask: Tensor | dict[str, Tensor] | None,
        feature_layers: tuple[int, ...],
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor | None]:
        ids = torch.tensor(tokens[None], dtype=torch.int64, device=self.device)
        places = torch.tensor([list(positions)], device=self.device)
        return self._call(cache, ids, places, mask, feature_layers, logits_to_keep)

    def _call(
        self,
        cache: MaskedCache,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        feature_layers: tuple[int, ...],
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=bool(feature_layers),
        )
        features = None
        if feature_layers:
            features = torch.stack([out.hidden_states[layer][0] for layer in feature_layers], dim=1)
        return out.logits[0], features

    def _tree_recorded(
        self, cache: MaskedCache, tree: TokenTree, positions: NDArray[np.int32], feature_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a tree's forward as a CUDA graph. Rows that pad the bucket see the text and are seen by no row."""
        past, n, rows = cache.length, len(tree), bucket(len(tree))
        ids, places = torch.zeros(1, rows, dtype=torch.int64), torch.full((1, rows), past)
        ids[0, :n], places[0, :n] = torch.from_numpy(tree.tokens), torch.from_numpy(positions)
        seen = self._tree_mask(past, tree, positions, 0)
        assert isinstance(seen, Tensor)  # models with several kinds of layers are not recorded
        mask = torch.full((1, 1, rows, cache.capacity), torch.finfo(self.dtype).min, dtype=self.dtype)
        mask[:, :, :n, : past + n] = seen
        mask[:, :, n:, : past + 1] = 0
        key = (rows, *feature_layers)
        if key not in cache.recorded:
            work = partial(self._forward_into, cache, feature_layers)
            cache.recorded[key] = Recorded(work, self.device, owner=self._owner)
        logits, *features = cache.recorded[key](ids, places, mask, past + torch.arange(rows))
        return logits[:n], features[0][:n] if features else None

    def _forward_into(
        self,
        cache: MaskedCache,
        feature_layers: tuple[int, ...],
        ids: Tensor,
        places: Tensor,
        mask: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run a forward whose keys and values go to `slots` of the cache."""
        cache.slots = slots
        try:
            logits, features = self._call(cache, ids, places, mask, feature_layers)
        finally:
            cache.slots = None
        return (logits,) if features is None else (logits, features)

    def _tree_mask(
        self, past: int, tree: TokenTree, positions: NDArray[np.int32], first: int
    ) -> Tensor | dict[str, Tensor]:
        """Return mask(s) [1, 1, nodes - first, past + nodes]: every node sees the committed text and its own ancestors.

        There is one mask per kind of layer where the model has several; a sliding layer sees only its window.
        """
        nodes, hidden = len(tree), torch.finfo(self.dtype).min
        others = torch.from_numpy(~tree.ancestor_mask[first:])
        masks = {}
        for kind, window in self._windows.items():
            # The mask is additive, since every layer's attention would turn a boolean mask into this one.
            mask = torch.zeros(nodes - first, past + nodes, dtype=self.dtype)
            mask[:, past:].masked_fill_(others, hidden)
            if window is not None and positions.max() >= window:
                query = torch.from_numpy(positions)
                key = torch.cat([torch.arange(past), query])
                mask.masked_fill_(query[first:, None] - key >= window, hidden)
            masks[kind] = mask[None, None].to(self.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def check_recording(self) -> None:
        """Find out whether graphs work: some models synchronise with the host, which a CUDA graph cannot capture."""
        if self.records:
            try:
                cache = self.new_cache(16)
                self([Segment.of_text([0, 0], cache)])
                cache.commit([0, 1])
                self([Segment.of_tree(TokenTree.chain(0, [0], [1.0]), cache)])
            except RuntimeError:
                self.records = False
            self.records = self.records and self._owner.captures and not Recorded.stuck


def refusal(model: Any, name: str, reason: str) -> ModelError:
    """Return the error of a family that attends in a way that neither exact attention nor a mask can express. reason:
    what was found.
    """
    return ModelError(
        f"model={name}: the {model.config.model_type} family cannot take a tree mask ({reason}); use another target"
    )
