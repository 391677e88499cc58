"""What the configuration of a one-pass head says of its blocks, whichever of the layouts it is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from drafters.heads.checkpoint import Checkpoint
from drafters.heads.one_pass.spine import SpineSizes
from engine.core.errors import DrafterMismatch

_SLIDING, _SPINE = "sliding_attention", "dspine_config"
_FLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = (
    ("input_embedding_scale", (None, 1)),
    ("output_multiplier", (None, 1)),
    ("final_logit_softcapping", (None, 0)),
)
"""Keys that change what a head computes, and their values that change nothing."""


class Flash2(NamedTuple):
    """What DFlash 2 adds: convolutions of so many taps, with a factor for each group of columns, and a selector of that
    rank among each row's likeliest tokens.
    """

    taps: int
    group: int
    rank: int
    candidates: int


@dataclass(frozen=True)
class BlockOptions:
    """size: rows of a block. first: the row that predicts the token after the root. causal: whether a row sees its
    block's rows up to itself alone. windows: the positions that rows of each layer see, 0: all. jet: whether JetSpec's
    policy is the published one.
    """

    flash: dict[str, Any]
    layers: int
    size: int
    first: int
    causal: bool
    windows: tuple[int, ...]
    jet: bool
    flash_2: Flash2 | None
    spine: SpineSizes | None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> BlockOptions:
        """Read them. Raises ModelError for layouts that are not drafted with."""
        options = checkpoint.config
        flash: dict[str, Any] = options.get("dflash_config") or {}
        layers = checkpoint.number("num_hidden_layers")
        spine = _spine(checkpoint)
        shifted = bool(flash.get("draft_shift", False)) if "dflash_config" in options else spine is None
        sliding = _sliding(checkpoint, flash, layers)
        window = flash.get("swa_window_size") or options.get("sliding_window") or 0
        causal = spine is not None or _causal(checkpoint, flash)
        if not (options.get("use_sliding_window") or flash.get("use_swa")):
            window = 0
        if window and any(sliding) and not causal:
            raise checkpoint.error("layers with windows whose rows see later ones are not supported")
        return cls(
            flash=flash,
            layers=layers,
            size=checkpoint.number("block_size", flash.get("block_size")),
            first=0 if shifted else 1,
            causal=causal,
            windows=tuple(window if slides else 0 for slides in sliding),
            jet=bool(flash.get("causal_head", False)),
            flash_2=_flash_2(checkpoint, flash),
            spine=spine,
        )

    def feature_layers(self, checkpoint: Checkpoint, layers: int) -> tuple[int, ...]:
        """Return the hidden states that form the context. The files name the layers that output them; -1 is the input.
        layers: of the target.
        """
        named = self.flash.get("target_layer_ids", checkpoint.config.get("target_layer_ids"))
        if named is None:
            named = _spread(layers, self.layers)
        if not isinstance(named, list) or not named or not all(isinstance(layer, int) for layer in named):
            raise checkpoint.error(f"{checkpoint.source}: target_layer_ids={named!r} is not a list of layers")
        if not all(-1 <= layer < layers for layer in named):
            raise DrafterMismatch(
                f"target has {layers} layers, the head reads the outputs of {', '.join(map(str, named))} "
                f"(drafter.path={checkpoint.path}): use the target it was trained for"
            )
        return tuple(layer + 1 for layer in named)


def _sliding(checkpoint: Checkpoint, flash: dict[str, Any], layers: int) -> list[bool]:
    """Return for each layer whether its attention slides, as vLLM reads the keys."""
    types = checkpoint.config.get("layer_types")
    sliding = [kind == _SLIDING for kind in types or ()]
    if not any(sliding):
        return [bool(flash.get("use_swa", False))] * layers
    if len(sliding) != layers:
        raise checkpoint.error(f"{checkpoint.source}: layer_types names {len(sliding)} layers of {layers}")
    return sliding


def _causal(checkpoint: Checkpoint, flash: dict[str, Any]) -> bool:
    """Return whether rows see no later ones: as a key says, else where `layer_types` names layers that slide."""
    options = checkpoint.config
    named = (options.get("is_causal"), options.get("causal"), flash.get("causal"), flash.get("causal_head"))
    if (said := next((value for value in named if value is not None), None)) is not None:
        return bool(said)
    by_type = [kind == _SLIDING for kind in options.get("layer_types") or ()]
    if any(by_type) and not all(by_type):
        raise checkpoint.error(
            f"{checkpoint.source}: layer_types mixes layers with {_SLIDING} and others: not supported"
        )
    return any(by_type)


def _flash_2(checkpoint: Checkpoint, flash: dict[str, Any]) -> Flash2 | None:
    if not any(key in flash for key in _FLASH_2):
        return None
    for key in _FLASH_2:
        if not isinstance(flash.get(key), int) or flash[key] < 1:
            raise checkpoint.error(f"{checkpoint.source}: {key}={flash.get(key)!r} is not a positive count")
    for key, plain in _SCALES:
        if (value := flash.get(key, checkpoint.config.get(key))) not in plain:
            raise checkpoint.error(f"{checkpoint.source}: {key}={value!r} is not supported, none is")
    found = Flash2(*(flash[key] for key in _FLASH_2))
    if checkpoint.number("hidden_size") % found.group:
        raise checkpoint.error(f"{checkpoint.source}: conv_group_size={found.group} does not divide hidden_size")
    return found


def _spine(checkpoint: Checkpoint) -> SpineSizes | None:
    """Return the sizes of DSpine's parts: what a file does not say is as SpecForge has it."""
    said = checkpoint.config.get(_SPINE)
    if not isinstance(said, dict):
        return None
    sizes = {"transfer_rank": 1024, "message_size": 512, "top_k": 16}
    sizes |= {key: said[key] for key in sizes if key in said}
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise checkpoint.error(f"{checkpoint.source}: {_SPINE}.{key}={value!r} is not a positive count")
    return SpineSizes(*sizes.values())


def _spread(target_layers: int, draft_layers: int) -> list[int]:
    """Return the layers that JetSpec reads where the file names none."""
    if draft_layers == 1:
        return [target_layers // 2]
    step = (target_layers - 4) / (draft_layers - 1)
    return [round(1 + index * step) for index in range(draft_layers)]
