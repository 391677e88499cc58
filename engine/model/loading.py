"""Loads a model of `transformers` onto its device, and reads what its files say.

`transformers` takes seconds to import, which a model that is known from an earlier start does not need.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.config import Config
from engine.core.errors import ConfigError, ModelError, first_line
from engine.core.params import left_open, not_applied
from engine.model.memory import check_whole_memory, free_memory
from engine.weights.catalogue import suggestion
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.source import open_gguf
from engine.weights.gguf.weights import GgufWeights
from engine.weights.hub import hub_answers, is_hub_id, is_local
from engine.weights.quantised_weights import QuantisedCheckpoint, QuantisedWeights, matched, open_quantised
from engine.weights.stored_weights import Place, StoredWeights

# Threads as workers load target and draft model at once; `transformers` was seen to leave out tied weights then.
_LOADING = threading.Lock()
_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Kinds of layers, as configurations name them, that have a state of the text, instead of keys and values or beside."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def load_model(path: str, dtype: str, device: torch.device, not_lean: str = "") -> Any:
    """Load the model of a directory or hub id, with all of its weights present and finite. not_lean: why the lean
    decoder does not run a GGUF file, if it was tried.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what a report warns of is refused below, in one line
    config = load_config(path)
    wanted = find_dtype(dtype, config, device)
    stored = open_stored(Path(path))
    check_quantisation(path, config)
    if isinstance(stored, GgufFile):
        why = f"transformers' own forward reads it as {name_of(wanted)}"
        why = f"the lean decoder does not run it ({not_lean}), and {why}" if not_lean else why
        check_whole_memory(stored, wanted, f"model={path}", why, free_memory())
    try:
        with _LOADING:
            if isinstance(stored, GgufFile):
                model, report = _dequantised(stored, path, config, wanted)
            elif stored is not None:
                model, report = _filled(stored, path, config, wanted), {"missing_keys": [], "mismatched_keys": []}
            else:
                model, report = AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    dtype=wanted,
                    local_files_only=is_local(path),
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # the first is named below
                )
    except Exception as error:  # every file format has errors of its own
        raise ModelError(f"model={path}: cannot be loaded: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model={path}: {len(missing)} weights are missing, {missing[0]} first; get the whole checkpoint"
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, found, expected = wrong[0]
        raise ModelError(
            f"model={path}: {len(wrong)} weights have other sizes than its configuration says, {name} first "
            f"({list(found)}, not {list(expected)}); get the whole checkpoint"
        )
    if isinstance(stored, GgufFile) and not _is_filled(stored):  # otherwise all has been found in the file
        _check_whole(stored, model, path)
    _check_numbers(model, path)
    if device.type == "cpu":
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        copy_mapped(one for one in model.parameters() if id(one) in looked_up or one.dim() < 2)
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"model={path}: does not fit the GPU ({first_line(error)}); free its memory or name a smaller model"
        ) from error


def check_quantisation(path: str, config: Any) -> None:
    """Raise ModelError if transformers cannot read a checkpoint's quantised weights here."""
    if (found := getattr(config, "quantization_config", None)) is None:
        return
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # that there is no GPU
    torch.compiler.set_stance("force_eager")  # BitNet's layers would be compiled, with a C++ compiler, at first use
    try:
        AutoHfQuantizer.from_config(found, pre_quantized=True).validate_environment(device_map=None)
    except Exception as error:  # every kind has errors of its own
        raise ModelError(
            f"model={path}: its quantised weights cannot be read here: {first_line(error)}; or take a GGUF file of the "
            "model, or the checkpoint that was quantised"
        ) from error


def copy_mapped(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let no parameter lie in a file that safetensors has mapped: if the file is cut, the kernel ends whoever reads it,
    and what is written over it would change answers. Matrices that are packed need no copy, they are ones.
    """
    for parameter in parameters:
        parameter.data = parameter.data.clone()


def open_stored(folder: Path) -> GgufFile | QuantisedCheckpoint | None:
    """Return where the weights of a directory lie in blocks, or are quantised from; None if it is another directory.

    Raises ModelError if what the directory describes is gone or has changed.
    """
    return open_gguf(folder) or open_quantised(folder)


def weights_of(stored: GgufFile | QuantisedCheckpoint, model: Any) -> StoredWeights:
    """Return what reads the parameters of a `skeleton`. Raises Unreadable if it cannot."""
    if isinstance(stored, QuantisedCheckpoint):
        return QuantisedWeights(stored, *matched(stored, model))
    from engine.weights.gguf.families import located

    return GgufWeights(stored, *located(stored, model))


def reopened(
    stored: GgufFile | QuantisedCheckpoint, places: Mapping[str, Place], vectors: Mapping[str, Tensor]
) -> StoredWeights:
    """Return the stored weights from the places and vectors that an earlier start recorded."""
    kind = GgufWeights if isinstance(stored, GgufFile) else QuantisedWeights
    return kind(stored, places, vectors)  # type: ignore[arg-type]


def skeleton(path: str, config: Any) -> Any:
    """Return the stock model of a directory without its weights, on the meta device; its buffers are there. Raises
    ModelError if transformers makes none of the configuration.
    """
    from transformers import GenerationConfig

    try:
        model = unfilled(config)
    except Exception as error:  # every family has errors of its own
        raise ModelError(
            f"model={path}: transformers makes no {config.model_type} model of its configuration: {first_line(error)}; "
            "get the model again, or use another target"
        ) from error
    with suppress(OSError):  # a directory without one: the end tokens of its configuration
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def unfilled(config: Any) -> Any:
    """Return the stock model of a configuration alone. See `skeleton`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        for name, buffer in dict(module.named_buffers(recurse=False)).items():
            stored = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.zeros_like(buffer, device="cpu"), persistent=stored)
    for module in model.modules():
        if any(True for _ in module.buffers()):
            model._init_weights(module)  # as transformers itself fills what no checkpoint holds
    return model


def _filled(stored: GgufFile | QuantisedCheckpoint, path: str, config: Any, dtype: torch.dtype) -> Any:
    """Return the stock model with weights in blocks, rounded to bfloat16, whatever it computes in."""
    model = skeleton(path, config)
    weights_of(stored, model).fill(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _dequantised(gguf: GgufFile, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the stock model of a GGUF file, and what transformers says of its keys. The weights of a quantised file
    are bfloat16, whatever it computes in.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    from engine.weights.gguf.reader import MODEL, read_by_transformers

    if _is_filled(gguf):
        return _filled(gguf, path, config, dtype), {"missing_keys": [], "mismatched_keys": []}
    if config.model_type == "mixtral":
        raise ModelError("transformers reads no Mixtral from GGUF, which runs on a CPU in bfloat16 alone")
    with read_by_transformers(gguf) as alone, redirect_stderr(io.StringIO()):  # transformers' progress bars
        model, report = AutoModelForCausalLM.from_pretrained(
            alone,
            gguf_file=MODEL,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model.generation_config = GenerationConfig.from_pretrained(path)
    for parameter in model.parameters():  # buffers of float32 stay what they are
        parameter.data = parameter.data.to(dtype)
    return model, report


def _is_filled(gguf: GgufFile) -> bool:
    from engine.weights.gguf.families import is_filled

    return is_filled(gguf)


def _check_whole(gguf: GgufFile, model: Any, path: str) -> None:
    """Raise ModelError for weights that transformers does not know: it silently leaves them out, which would make it a
    different model.
    """
    known = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    stored = sum(tensor.elements for tensor in gguf.tensors if not tensor.name.startswith("rope_"))
    if sum(known.values()) < stored and not gguf.metadata.get(f"{gguf.architecture}.nextn_predict_layers"):
        raise ModelError(
            f"model={path}: transformers reads {sum(known.values()):,} of the {stored:,} weights of its file"
        )


def load_config(path: str) -> Any:
    """Return the model's `transformers` configuration; ModelError if there is none or it is not a
    decoder-only model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=is_local(path))
    except Exception as error:  # an invalid file may raise anything
        if Path(path).is_dir():
            raise ModelError(f"model={path}: no usable config.json in this directory: {first_line(error)}") from error
        if is_hub_id(path) and not hub_answers():
            raise ModelError(
                f"model={path}: no such directory, not in the hub cache, and the hub cannot be reached: check the "
                f"network, or name a directory{suggestion(path)}"
            ) from error
        reason = f" ({first_line(error)})" if is_hub_id(path) else ""
        raise ModelError(
            f"model={path}: no such directory, and no usable model of that name on the hub{reason}{suggestion(path)}"
        ) from error
    if config.is_encoder_decoder:
        raise ModelError(f"model={path}: {config.model_type} is an encoder-decoder; use a decoder-only model")
    return config


def has_states(config: Any) -> bool:
    """Return whether the model has layers with a state, which one forward of ours can run (`engine.model.decoder`)."""
    return bool(_WITH_STATE.intersection(getattr(config.get_text_config(), "layer_types", None) or ()))


def find_device(device: str) -> torch.device:
    """Return the device that a configuration's `device` names."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch finds no CUDA device here; use device: cpu or auto")
    return torch.device(device)


def dtype_of(config: Config) -> torch.dtype:
    """Return what the configuration's target computes in, without loading it."""
    return find_dtype(config.dtype, load_config(config.model), find_device(config.device))


def find_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the type a model with that `transformers` configuration is loaded in."""
    if dtype != "auto":
        return DTYPES[dtype]
    from engine.kernels.gemm.product import multiplies  # imports all kernels, which the front end does not need

    stored = config.get_text_config().dtype or torch.float32
    if device.type == "cpu" and (stored == torch.float16 or (stored == torch.bfloat16 and not multiplies(stored))):
        return torch.float32
    return stored


def has_native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 natively; if not, torch's own bfloat16 products are slow."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def name_of(dtype: torch.dtype) -> str:
    """Return the type's name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Facts(msgspec.Struct, frozen=True):
    """What decoding needs to know about a model. full_context: the maximum positions that the configuration names;
    own_context: those over which a cached key stays valid. eos_tokens: the ids that end an answer. generation: of
    generation_config.json, what requests may leave open; not_applied: what Talon does not follow.
    """

    vocab_size: int
    layers: int
    full_context: int
    own_context: int
    eos_tokens: frozenset[int]
    generation: dict[str, Any]
    not_applied: list[str]


def facts_of(model: Any) -> Facts | None:
    """Return the facts of a stock model; None if its configuration names no maximum of positions."""
    config, generation = model.config.get_text_config(), model.generation_config
    if (context := getattr(config, "max_position_embeddings", None)) is None:
        return None
    return Facts(
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        full_context=context,
        own_context=steady_context(config, context),
        eos_tokens=eos_tokens(generation),
        generation=left_open(generation),
        not_applied=not_applied(generation),
    )


def eos_tokens(generation_config: Any) -> frozenset[int]:
    """Return the token ids that end an answer."""
    eos = generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def steady_context(config: Any, context: int) -> int:
    """Return the positions over which a token's key stays valid. LongRoPE rotates all keys differently as soon as a
    text outgrows the original length, which invalidates cached keys. Dynamic NTK does so beyond the context itself.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    short: list[int] = [
        kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min([context, *short])


def _check_numbers(model: Any, path: str) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
            raise ModelError(f"model={path}: weight {name} holds NaN or infinity; get the checkpoint again")
