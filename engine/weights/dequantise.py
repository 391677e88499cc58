"""`python -m engine.weights.dequantise FILE FOLDER TITLE ORIGIN`: a GGUF file as a bfloat16 Hugging Face directory.

It runs as its own process: it needs memory for the whole model, and may be killed for that. It exits when its standard
input closes. Lines that start with "talon: " are for the user; if it fails, the last one says why.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from engine.core.errors import ModelError, first_line, shown
from engine.text.chat import turn_end
from engine.weights.gguf_blocks import quantised_weights
from engine.weights.gguf_file import GgufFile, read_gguf
from engine.weights.quantised_file import write_quantised

_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Vocabularies (`tokenizer.ggml.pre`) for which llama.cpp splits off each digit first; transformers does not."""
_LIKE_GPT2 = {"gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def dequantise(gguf: GgufFile, folder: Path, title: str, origin: str) -> None:
    """Fill `folder` with the model, its tokenizer and a card. Raises ModelError if the file cannot be converted."""
    with tempfile.TemporaryDirectory(dir=folder) as alone:  # no other file of its folder is read with it
        (Path(alone) / "model.gguf").symlink_to(gguf.path.absolute())
        source: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
        model, report = AutoModelForCausalLM.from_pretrained(
            alone,
            **source,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(alone, **source)
    _check_weights(gguf, model, report)
    _scale_positions(gguf, model.config)
    _split_text(gguf, tokenizer)
    model.generation_config.eos_token_id = _end_tokens(gguf, tokenizer)
    model.save_pretrained(folder)
    write_quantised(folder, quantised_weights(gguf.path, model))
    tokenizer.save_pretrained(folder)
    _drop_foreign_tokens(gguf, folder / "tokenizer.json")
    (folder / "README.md").write_text(_card(gguf, title, origin), encoding="utf8")


def _check_weights(gguf: GgufFile, model: Any, report: Any) -> None:
    """transformers silently leaves out weights that it does not know, which would make it a different model."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{len(missing)} weights are missing, {missing[0]} first")
    known = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    stored = sum(tensor.elements for tensor in gguf.tensors if not tensor.name.startswith("rope_"))
    if sum(known.values()) < stored and not gguf.metadata.get(f"{gguf.architecture}.nextn_predict_layers"):
        raise ModelError(f"transformers reads {sum(known.values()):,} of its {stored:,} weights")


def _scale_positions(gguf: GgufFile, config: Any) -> None:
    """Set the scaling of positions that transformers does not read from the file; ModelError if its kind is unknown.

    Llama 3's is stored as one factor per frequency, from which its parameters follow.
    """
    rope = config.get_text_config().rope_parameters or {}
    factors = gguf.values("rope_freqs.weight")
    if factors is not None:
        factor = float(factors.max())
        if not np.allclose(factors, llama3_factors(rope["rope_theta"], len(factors), factor), rtol=1e-3):
            raise ModelError("its rope_freqs are not those of Llama 3")
        config.rope_parameters = rope | {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    elif any(tensor.name.startswith("rope_") for tensor in gguf.tensors):
        raise ModelError("its position factors (rope_*) are not read from GGUF")
    elif rope.get("rope_type", "default") == "default":
        kind = gguf.metadata.get(f"{gguf.architecture}.rope.scaling.type", "none")
        if kind != "none":
            raise ModelError(f"its scaling of positions ({shown(kind)}) is not read from GGUF")


def llama3_factors(theta: float, frequencies: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What Llama 3.1 divides each frequency by: 1 for high ones, `factor` for low ones, interpolated in between."""
    low, high, length = _LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(frequencies) / frequencies)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _split_text(gguf: GgufFile, tokenizer: Any) -> None:
    """Split text into words as the vocabulary expects; transformers splits as for GPT-2 where it knows no other way."""
    way = gguf.metadata.get("tokenizer.ggml.pre", "default")
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or way in _LIKE_GPT2:
        return
    if way in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        print(f"talon: {gguf.path.name}: text is split into words as for GPT-2; {shown(way)} is not known", flush=True)


def _drop_foreign_tokens(gguf: GgufFile, file: Path) -> None:
    """transformers appends GPT-2's end of text to a vocabulary without one; such a token would have no embedding."""
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    content = json.loads(file.read_text(encoding="utf8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf8")


def _end_tokens(gguf: GgufFile, tokenizer: Any) -> list[int] | None:
    """Token ids that end an answer: end of text, of turn and of message, and what the chat template writes after an
    assistant's turn.
    """
    ids = [gguf.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return sorted({token for token in (*ids, turn_end(tokenizer)) if isinstance(token, int)}) or None


def _card(gguf: GgufFile, title: str, origin: str) -> str:
    return (
        f"# {title}\n\n{origin}\n\n"
        f"Dequantised to bfloat16 with transformers {version('transformers')} and gguf {version('gguf')}. **The "
        f"weights are those of the GGUF file** ({gguf.elements:,} values; tensors: {gguf.kinds}), so answers are those "
        "of the file, not of the model it was quantised from. Tokenizer, chat template and end tokens come from the "
        "file too.\n"
    )


def main() -> None:
    """Convert the file; on failure, print the reason in one line."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    transformers_logging.set_verbosity_error()
    file, folder, title, origin = sys.argv[1:]
    try:
        dequantise(read_gguf(Path(file), "file"), Path(folder), title, origin)
    except Exception as error:  # every family's code raises its own errors
        reason = first_line(error)
        sys.exit(
            f"talon: {reason if isinstance(error, ModelError | ValueError) else f'{type(error).__name__}: {reason}'}"
        )


if __name__ == "__main__":
    main()
