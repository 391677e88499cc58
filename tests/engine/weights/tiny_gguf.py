"""Tiny GGUF files of random Llamas, written as llama.cpp writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.kernels.quant.stored import StoredMatrix
from engine.model.target import Target
from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from engine.weights.tokenizer import KeptTokenizer, state_of
from tests.conftest import save_tiny_llama

TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
SPECIAL = ["<|text|>", "<|user|>", "<|assistant|>", "<|end|>"]
MERGES = ["Ġ Ġ", "4 8"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of tokens
HEADS, KEY_HEADS = 4, 2
WEIGHTS = "tiny.gguf"  # the file of `save_tiny_gguf`
OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's parameters in transformers and in a GGUF file."""


def tiny_llama(hidden: int = 64, intermediate: int = 96, layers: int = 2) -> LlamaForCausalLM:
    """Random weights; embeddings and output are one matrix. Rows are long enough for blocks of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=intermediate,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    kind: Kind = Kind.F32,
    values: dict[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32] | StoredMatrix | None] | None = None,
    architecture: str = "llama",
    part_tensors: int = 0,
    model: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """Write a tiny Llama; returns it. kind: of its matrices. values, tensors: in place of its own, None leaves out.
    part_tensors: the most in one of several files, 0 for one file. model: in place of `tiny_llama`, with as many heads.
    """
    model = tiny_llama() if model is None else model
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    add_values(writer, values or {})
    weights = model.state_dict().items()
    stored: dict[str, Any] = {_name(name): _as_stored(name, tensor.float().numpy()) for name, tensor in weights}
    if config.tie_word_embeddings:
        del stored["output.weight"]
    for name, array in (stored | dict(tensors or {})).items():
        if array is None:
            continue
        if isinstance(array, StoredMatrix):
            writer.add_tensor(name, array.raw, raw_dtype=Kind[array.kind])
            continue
        of_kind = kind if array.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(array, of_kind), raw_dtype=of_kind)
    write_all(writer)
    return model


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def add_values(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """Add metadata in the place of what has the same keys; None leaves out."""
    for key, value in values.items():
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def write_all(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_tiny_gguf(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **changes: Any) -> str:
    """Save the Llama of `save_tiny_llama` as a GGUF file and what describes it, and load it once. What that finds of
    the model is kept there, so that starts import no stock model and try nothing: they take half of the time.
    """
    model = LlamaForCausalLM.from_pretrained(save_tiny_llama(folder, **changes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_gguf(folder / WEIGHTS, Kind.BF16, model=model)
    (folder / "model.safetensors").unlink()
    state = state_of(AutoTokenizer.from_pretrained(folder))
    assert state is not None
    KeptTokenizer(folder).write(state)
    GgufSource.of(folder / WEIGHTS, WEIGHTS).write(folder)
    Target.load(str(folder), activations="auto", kv_memory=1 << 20)
    return str(folder)


def described_gguf(file: Path) -> str:
    """Describe a GGUF file in this process, which saves the imports of another; returns the folder, beside the file."""
    folder = file.with_name(f"described {file.stem}")
    folder.mkdir()
    describe(read_gguf(file, "model=x"), folder, file.stem, "Made for a test.")
    GgufSource.of(file, str(file)).write(folder)
    return str(folder)


def change_last_byte(path: Path) -> None:
    """Change a file in place, and nothing that its length and time tell: as other weights of the same shape would."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, suffix = name.rpartition(".")
    if module in whole:
        return f"{whole[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{OF_LAYERS[part]}.{suffix}"


def _as_stored(name: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """llama.cpp turns neighbouring dimensions of a head, where transformers turns its halves."""
    for part, heads in (("q_proj", HEADS), ("k_proj", KEY_HEADS)):
        if part in name:
            halves = weights.reshape(heads, 2, -1, weights.shape[1])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)
    return weights
