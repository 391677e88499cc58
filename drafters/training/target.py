"""The target of a training: loaded, identified by a digest, and answering prompts in batches."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine.core.errors import ConfigError, ModelError, first_line
from engine.model.loading import has_native_bfloat16, load_model, name_of, open_stored
from engine.weights.gguf.source import SOURCE

DEVICES = ("auto", "cpu", "cuda")


def load_target(folder: Path, device: str) -> tuple[Any, Any]:
    if device not in DEVICES:
        raise ConfigError(f"device={device!r}: is none of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch finds no CUDA device here: use --device cpu or auto")
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    dtype = torch.bfloat16 if where.type == "cuda" or has_native_bfloat16() else torch.float32
    transformers_logging.disable_progress_bar()
    try:
        if open_stored(folder) is None:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        else:
            model = load_model(str(folder), name_of(dtype), torch.device("cpu"))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise ModelError(f"target={folder}: cannot be loaded ({reason}): give a complete model directory") from None
    return model.to(where).eval().requires_grad_(False), tokenizer


def target_digest(target: Path) -> str:
    """Return a digest that tells the weights of targets apart."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for kind in ("*.safetensors", "*.bin", SOURCE) for file in target.glob(kind)):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def chat(tokenizer: Any, prompt: str) -> list[int]:
    """Return the prompt's token ids in the target's chat form."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


@torch.inference_mode()
def generate(
    model: Any, batch: list[list[int]], pad: int, tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Return the answers of a batch, [batch, up to `tokens`] as lists; prompts are padded on the left. The batch is
    halved where an accelerator's memory is too small for it.
    """
    width = max(map(len, batch))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if model.device.type == "cuda":  # a cache that grows is copied with every token
        options |= {"cache_implementation": "static", "disable_compile": True}
    try:
        out = model.generate(ids, attention_mask=seen, max_new_tokens=tokens, pad_token_id=pad, **options)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    else:
        return out[:, width:].tolist()  # type: ignore[no-any-return]
    torch.cuda.empty_cache()
    half = len(batch) // 2
    return [
        row for part in (batch[:half], batch[half:]) for row in generate(model, part, pad, tokens, temperature, seed)
    ]
