"""`python -m engine.weights.gguf.describe_process FILE FOLDER TITLE ORIGIN` writes configuration and tokenizer of a
GGUF file.

It runs as its own process, because transformers trusts the file and takes seconds to import. It exits when its standard
input closes. Lines that start with "talon: " are for the user; if it fails, the last one says why. It also checks the
tensors, once, because no later step does.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from engine.core.errors import ModelError, first_line, shown
from engine.weights.gguf.damage import DamagedTensors, check_tensors
from engine.weights.gguf.ends import end_tokens
from engine.weights.gguf.families import completed
from engine.weights.gguf.file import GgufFile, read_gguf
from engine.weights.gguf.reader import MODEL, read_by_transformers
from engine.weights.gguf.vocabulary import correct_added, follow_llama_cpp, teach_tokenizers
from engine.weights.tokenizer import KeptTokenizer, state_of


def describe(file: GgufFile, folder: Path, title: str, origin: str) -> None:
    """Fill `folder` with all but the weights, and a card. Raises ModelError if the file cannot be followed."""
    teach_tokenizers()
    with read_by_transformers(file) as alone:
        source: dict[str, Any] = {"gguf_file": MODEL, "local_files_only": True}
        config = AutoConfig.from_pretrained(alone, **source)
        tokenizer = AutoTokenizer.from_pretrained(alone, config=config, **source)
    config = completed(file, config)
    config.dtype = torch.bfloat16
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    follow_llama_cpp(file, tokenizer)
    generation_config = GenerationConfig.from_model_config(config)
    generation_config.eos_token_id = end_tokens(file, tokenizer)
    config.save_pretrained(folder)
    generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    correct_added(file, folder / "tokenizer.json")
    if (state := state_of(AutoTokenizer.from_pretrained(folder, local_files_only=True))) is not None:
        KeptTokenizer(folder).write(state)
    (folder / "README.md").write_text(_card(file, title, origin), encoding="utf8")


def _card(file: GgufFile, title: str, origin: str) -> str:
    return (
        f"# {title}\n\n{origin}\n\n"
        f"Described with transformers {version('transformers')}. **The weights are those of the GGUF file**, and stay "
        f"in it ({file.elements:,} values; tensors: {file.kinds}), so answers are those of the file, not of the model "
        "it was quantised from. Tokenizer, chat template and end tokens come from the file too.\n"
    )


def main() -> None:
    """Describe the file; on failure, print the reason in one line. On a full disk, exit with the error's number, and
    for a damaged file with that of a bad message.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    transformers_logging.set_verbosity_error()
    file, folder, title, origin = sys.argv[1:]
    try:
        gguf = read_gguf(Path(file), "file")
        if zeros := check_tensors(gguf):
            print(f"talon: {title}: {len(zeros)} tensors hold zeros alone, {shown(zeros[0])} first", flush=True)
        describe(gguf, Path(folder), title, origin)
    except DamagedTensors as error:
        print(f"talon: {error}", flush=True)
        sys.exit(errno.EBADMSG)
    except Exception as error:  # every family's code raises its own errors
        reason = first_line(error)
        # tokenizers has an error of its own for a full disk
        if getattr(error, "errno", None) == errno.ENOSPC or f"(os error {errno.ENOSPC})" in reason:
            sys.exit(errno.ENOSPC)
        sys.exit(
            f"talon: {reason if isinstance(error, ModelError | ValueError) else f'{type(error).__name__}: {reason}'}"
        )


if __name__ == "__main__":
    main()
