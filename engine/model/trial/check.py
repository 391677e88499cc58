"""Describes a model from its files, without starting it: family, types, memory, and what will not work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.config import Config
from engine.core.batch import BLOCK_SIZE
from engine.core.errors import first_line
from engine.core.kv_shape import KVShape
from engine.kernels.quant.layouts import has_layout
from engine.model.loading import check_quantisation, facts_of, load_config, open_stored, skeleton, weights_of
from engine.model.reader.decoder import describe
from engine.model.structure import DecoderStructure, OtherStructure
from engine.weights.draft_head import ASSISTANT, assistant_beside, brings_head
from engine.weights.gguf.file import GgufFile
from engine.weights.quantised_weights import QuantisedCheckpoint
from engine.weights.resolve import target_folder, with_own
from engine.weights.stored_weights import Unreadable

_POSITIONS = 8192  # for which memory is told


def lines_of(model: str) -> Iterator[str]:
    """Return what `talon models check` prints. Raises ModelError if the model cannot be read."""
    folder = Path(target_folder(Config(model=model)))
    config, stored = load_config(str(folder)), open_stored(folder)
    check_quantisation(str(folder), config)
    stock = skeleton(str(folder), config)
    parameters = sum(parameter.numel() for parameter in stock.parameters())
    size, structure, reason = _described(stock, stored)
    facts = facts_of(stock)
    yield f"family: {config.model_type}, {parameters / 1e9:.2f} billion parameters, {len(_layers(stock))} layers"
    yield f"types: {_types_of(stored, config)}"
    yield f"forward: {f'the stock one, slower: {reason}' if reason else 'lean, if its logits agree at the first start'}"
    yield f"memory: {size / 1e9:.2f} GB of weights{'' if structure is None else _keys(structure)}"
    yield f"positions: {'not named' if facts is None else f'{facts.own_context:,} of {facts.full_context:,}'}"
    yield f"drafter: {_drafter(folder)}"
    unpacked = {tensor.kind.name for tensor in stored.tensors} if isinstance(stored, GgufFile) else set()
    if unpacked := {kind for kind in unpacked if not has_layout(kind)}:
        yield f"will take more memory than its file: {', '.join(sorted(unpacked))} become bfloat16"
    if structure is not None and (len(structure.key_sizes) > 1 or len(structure.attending) < len(structure.layers)):
        yield "will not work: a GPU, or a type other than bfloat16 and float32: the lean decoder alone runs it"
    elif structure is not None and any(one.latent is not None for one in structure.attending.values()):
        yield "on a GPU: the stock forward with a mask, slower and not exact"


def not_lean(folder: Path) -> str:
    """Return why the lean decoder does not run the model of a directory; "" if its structure is known, and its logits
    will be compared. Raises ModelError if the model cannot be read.
    """
    stock = skeleton(str(folder), load_config(str(folder)))
    return _described(stock, open_stored(folder))[2]


def _described(
    stock: torch.nn.Module, stored: GgufFile | QuantisedCheckpoint | None
) -> tuple[int, DecoderStructure | None, str]:
    """Return the bytes of a model's weights, its structure if it is known, and what is unknown of it."""
    size = 2 * sum(parameter.numel() for parameter in stock.parameters())
    try:
        weights = None if stored is None else weights_of(stored, stock)
        size = size if weights is None else weights.size
        return size, describe(stock, weights), ""
    except (Unreadable, OtherStructure, AttributeError) as error:  # a part of the structure is missing
        return size, None, first_line(error)


def _layers(stock: torch.nn.Module) -> list[str]:
    """Return the names of its layers."""
    return [name for name, _ in stock.named_modules() if name.rpartition(".")[0].endswith("layers")]


def _types_of(stored: GgufFile | QuantisedCheckpoint | None, config: Any) -> str:
    if isinstance(stored, GgufFile):
        return stored.kinds
    return _type_of(config) if stored is None else f"{_type_of(config)}, experts in {stored.kind}"


def _type_of(config: Any) -> str:
    quantised = getattr(config, "quantization_config", None) or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
    name = str(config.dtype or torch.float32).removeprefix("torch.")
    return f"{name}, quantised as {method}" if method else name


def _keys(structure: DecoderStructure) -> str:
    shapes = [KVShape(*sizes, torch.bfloat16) for sizes in structure.key_sizes]
    each = sum(shape.block_bytes for shape in shapes) * _POSITIONS // BLOCK_SIZE
    return f", {each / 1e9:.2f} GB of keys and values for each {_POSITIONS:,} positions"


def _drafter(folder: Path) -> str:
    drafter = with_own(Config(model=str(folder))).drafter
    if drafter.tuned is not None:
        return f"{drafter.head}, which talon tune made here: method={drafter.head} or hybrid"
    if brings_head(folder):
        return "its own head: method=mtp or hybrid"
    if (beside := assistant_beside(folder)) is not None:
        return f"the assistant {beside}: method={ASSISTANT} or hybrid"
    if drafter.path is not None:
        return f"{drafter.head}, which comes with Talon: method={drafter.head} or hybrid"
    return "none of its own: method=suffix"
