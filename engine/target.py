"""A stock Hugging Face causal language model that can verify a token tree.

Tree attention goes in through the 4-D mask and the position ids; the KV cache is ours; nothing of the model family's
code is copied or patched. Families whose attention cannot take such a mask are found by trying, and refused by name.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError, ModelError
from engine.kv_cache import KVCache
from engine.model_hub import hub_answers, is_hub_id, is_local
from engine.packed_linear import pack_linears
from engine.recorded import Recorded, Spare, bucket, rounded
from engine.tree import TokenTree

# Workers that are threads load target and draft model at once; `transformers` was seen to leave tied weights out then.
_LOADING = threading.Lock()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class Target:
    """A loaded model and the facts about it that decoding needs.

    context: the most positions it can hold. eos_tokens: the ids that end an answer.
    """

    def __init__(self, model: Any, name: str):
        self.model = model.eval()
        self.name = name
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        if (context := getattr(config, "max_position_embeddings", None)) is None:
            raise self._refusal()
        self.context = _steady_context(config, context)
        self.layers: int = config.num_hidden_layers
        self.eos_tokens = eos_tokens(model.generation_config)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo: its window counts cache slots, not positions
            raise self._refusal()
        types, options = get_layer_types_and_kwargs(config)
        self._windows = {kind: option.get("sliding_window") for kind, option in zip(types, options, strict=True)}
        self.records = self.device.type == "cuda" and set(self._windows) == {"full_attention"}  # see engine.recorded
        self._spare: Spare[KVCache] = Spare()
        if unknown := set(self._windows) - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"model={name}: {config.model_type} has {sorted(unknown)} layers, which cannot take a tree mask"
            )

    @classmethod
    def load(cls, path: str, dtype: str = "auto", device: str = "auto") -> Target:
        """Load a checkpoint directory or hub id and show that it can verify a tree."""
        where = find_device(device)
        transformers_logging.disable_progress_bar()
        config = load_config(path)
        try:
            with _LOADING:
                model, report = AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    dtype=_dtype(dtype, config, where),
                    local_files_only=is_local(path),
                    output_loading_info=True,
                )
        except Exception as error:  # every file format has errors of its own
            raise ModelError(f"model={path}: cannot be loaded: {_first_line(error)}") from error
        if missing := sorted(report["missing_keys"]):
            raise ModelError(
                f"model={path}: {len(missing)} weights are missing, {missing[0]} first; get the whole checkpoint"
            )
        model = model.to(where)
        pack_linears(model)
        target = cls(model, path)
        target.check_recording()
        target.check_tree_attention()
        return target

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one request of at most `capacity` positions, tree nodes included."""
        if not self.records:
            return KVCache(self.layers, capacity)
        capacity = rounded(capacity)
        spare = self._spare.take(capacity)
        return KVCache(self.layers, capacity, fixed=True) if spare is None else spare

    def release(self, cache: KVCache) -> None:
        """The request is over. What was recorded over its cache is good for another's text."""
        if cache.fixed:
            cache.length = cache.pending = 0
            self._spare.give(cache.capacity, cache)

    @torch.inference_mode()
    def prefill(
        self, cache: KVCache, tokens: list[int], feature_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Commit `tokens` behind what the cache holds.

        Returns the last position's logits, [vocab] float32, and [tokens, layers, hidden] features if layers are asked.
        """
        start = cache.length
        logits, features = self._forward(cache, tokens, range(start, start + len(tokens)), None, feature_layers, 1)
        cache.commit(range(len(tokens)))
        return logits[0], features

    @torch.inference_mode()
    def verify(
        self, cache: KVCache, tree: TokenTree, feature_layers: tuple[int, ...] = (), first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over the tree's nodes from `first` on; the caller commits the accepted path.

        The nodes before `first` were forwarded already (a draft model grows its tree level by level).
        Returns [nodes, vocab] float32 logits and [nodes, layers, hidden] features if layers are asked.
        """
        positions = tree.depths + cache.length
        if cache.fixed and first == 0 and cache.length + bucket(len(tree)) <= cache.capacity:
            return self._verify_recorded(cache, tree, positions, feature_layers)
        mask = self._tree_mask(cache.length, tree, positions, first) if len(tree) > 1 else None
        cache.pending = first
        return self._forward(cache, tree.tokens[first:].tolist(), positions[first:].tolist(), mask, feature_layers, 0)

    def _forward(
        self,
        cache: KVCache,
        tokens: list[int],
        positions: range | list[int],
        mask: Tensor | dict[str, Tensor] | None,
        feature_layers: tuple[int, ...],
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor | None]:
        ids = torch.tensor([tokens], device=self.device)
        return self._call(
            cache, ids, torch.tensor([list(positions)], device=self.device), mask, feature_layers, logits_to_keep
        )

    def _call(
        self,
        cache: KVCache,
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
        return out.logits[0].float(), features

    def _verify_recorded(
        self, cache: KVCache, tree: TokenTree, positions: NDArray[np.int32], feature_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """`verify` as a recorded forward. Rows that fill up the bucket see the text and are seen by nobody."""
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
            cache.recorded[key] = Recorded(partial(self._forward_into, cache, feature_layers), self.device)
        logits, *features = cache.recorded[key](ids, places, mask, past + torch.arange(rows))
        return logits[:n], features[0][:n] if features else None

    def _forward_into(
        self, cache: KVCache, feature_layers: tuple[int, ...], ids: Tensor, places: Tensor, mask: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        """A forward whose keys and values go to `slots` of the cache."""
        cache.slots = slots
        try:
            logits, features = self._call(cache, ids, places, mask, feature_layers)
        finally:
            cache.slots = None
        return (logits,) if features is None else (logits, features)

    def _tree_mask(
        self, past: int, tree: TokenTree, positions: NDArray[np.int32], first: int
    ) -> Tensor | dict[str, Tensor]:
        """Mask(s) [1, 1, nodes - first, past + nodes]: every node sees the committed text and its own ancestors.

        One mask per kind of layer where the model has several; a sliding layer sees only its window.
        """
        nodes, hidden = len(tree), torch.finfo(self.dtype).min
        others = torch.from_numpy(~tree.ancestor_mask[first:])
        masks = {}
        for kind, window in self._windows.items():
            # additive, since every layer's attention would turn a boolean mask into this one
            mask = torch.zeros(nodes - first, past + nodes, dtype=self.dtype)
            mask[:, past:].masked_fill_(others, hidden)
            if window is not None and positions.max() >= window:
                query = torch.from_numpy(positions)
                key = torch.cat([torch.arange(past), query])
                mask.masked_fill_(query[first:, None] - key >= window, hidden)
            masks[kind] = mask[None, None].to(self.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def check_recording(self) -> None:
        """Find out whether forwards can be recorded: some families' look at results on the way, which graphs cannot."""
        if self.records:
            try:
                cache = self.new_cache(16)
                self.prefill(cache, [0, 0])
                self.verify(cache, TokenTree.chain(0, [0], [1.0]))
            except RuntimeError:
                self.records = False

    def check_tree_attention(self) -> None:
        """Compare a small tree's logits with those of its paths read in sequence; ModelError if they differ."""
        prompt = [token % self.vocab_size for token in (7, 3, 11, 5, 2)]
        tokens = [token % self.vocab_size for token in (1, 4, 6, 8, 9)]
        tree = TokenTree.from_lists(tokens, [-1, 0, 0, 1, 2], [1, 1, 1, 1, 1])
        try:
            cache = self.new_cache(len(prompt) + len(tree))
            self.prefill(cache, prompt)
            logits, _ = self.verify(cache, tree)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._refusal() from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.15
        for leaf in (3, 4):
            alone, _ = self.prefill(self.new_cache(16), prompt + tree.path_tokens(leaf))
            if not (logits[leaf] - alone).abs().max() <= tolerance * alone.std():
                raise self._refusal()

    def _refusal(self) -> ModelError:
        family = self.model.config.model_type
        return ModelError(f"model={self.name}: the {family} family cannot take a tree mask; use another target")


def load_config(path: str) -> Any:
    """The model's `transformers` configuration; ModelError if there is none or it is no decoder-only model."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=is_local(path))
    except (OSError, ValueError, KeyError) as error:
        if Path(path).is_dir():
            raise ModelError(f"model={path}: no usable config.json in this directory: {_first_line(error)}") from error
        if is_hub_id(path) and not hub_answers():
            raise ModelError(
                f"model={path}: no such directory, not in the hub cache, and the hub cannot be reached: check the "
                "network, or name a directory"
            ) from error
        raise ModelError(
            f"model={path}: no such directory, and no model of that name can be reached on the hub"
        ) from error
    if config.is_encoder_decoder:
        raise ModelError(f"model={path}: {config.model_type} is an encoder-decoder; use a decoder-only model")
    return config


def _steady_context(config: Any, context: int) -> int:
    """The positions over which a token's key stays what it is. LongRoPE turns all of them otherwise as soon as a text
    outgrows the original length, which makes keys that are in the cache wrong.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    short: list[int] = [
        kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min([context, *short])


def eos_tokens(generation_config: GenerationConfig) -> frozenset[int]:
    """The token ids that end an answer."""
    eos = generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def bfloat16_bits(features: Tensor) -> NDArray[np.uint16]:
    """The features, rounded to bfloat16, as messages carry them: numpy has no such type."""
    bits: NDArray[np.uint16] = features.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
    return bits


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; where it does not, float32 was measured to be faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def find_device(device: str) -> torch.device:
    """The device that a configuration's `device` names."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch finds no CUDA device here; use device: cpu or auto")
    return torch.device(device)


def _dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    stored = config.get_text_config().dtype or torch.float32
    if device.type == "cpu" and (stored == torch.float16 or not has_native_bfloat16()):
        return torch.float32
    return stored


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
