"""Writes an EAGLE-3 head in the layouts that vLLM and llama.cpp serve: `talon models export HEAD`.

The head is first made for its target, as a drafter makes it, so that what is written is whole and fits. Nothing that
it computes is changed: what a layout cannot say is refused. That is every block head that Talon trains: DFlash and
DSpark have no `entry`, through which its rows read the last context vector, and norms of queries and keys, which its
layers lack; `speculators` has no causal blocks, and llama.cpp no gate in the Markov link.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from drafters.heads.checkpoint import Checkpoint, TargetWeights, read_config
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.layers import llama_config
from drafters.heads.layouts import speculators
from drafters.heads.layouts.llama_cpp_writer import write_eagle3
from drafters.heads.matrices import numbers
from engine.core.errors import ModelError, shown
from engine.weights.gguf.source import open_gguf
from engine.weights.resolve import resolve

_METHOD = "eagle3"
_TRAIN = 'train one that fits: "talon train eagle3"'
_STATIC = ("default", "linear", "llama3")
"""Rotary types whose frequencies are the same at every length of a text, and whose cosines are not scaled."""


class _Served(NamedTuple):
    """name: what the engine that serves it is given; folder: the directory that Talon reads."""

    name: str
    folder: Path


class _Public(NamedTuple):
    """A head of the public layout. config: with what its file leaves to defaults. codes: of the tensors that are held
    in 8 bits. frequencies: [head_dim / 2], of its rotary embedding.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    codes: dict[str, tuple[Tensor, Tensor]]
    frequencies: Tensor


def export_head(head: str, layout: str, target: str, out: Path) -> str:
    """Write the head in the folder `head` for the model `target` to `out`, and return the command that serves it.

    layout: one of `LAYOUTS`. Raises ModelError if the layout cannot hold the head, the head is for another target, or
    `out` is there or cannot be written.
    """
    if layout not in LAYOUTS:
        raise ModelError(f"as={shown(layout)}: is none of {', '.join(LAYOUTS)}")
    if out.exists():
        raise ModelError(f"out={out}: is there already; name another path, or remove it")
    checkpoint = _read(head)
    found = _find(target, layout)
    made = _make(checkpoint, found)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
            command = LAYOUTS[layout](made, found, whole := Path(beside) / out.name)
            whole.rename(out)
    except OSError as error:
        raise ModelError(f"out={out}: cannot be written ({error.strerror or error}); name another path") from None
    return f"{command} {shlex.quote(str(out))}"


def _read(head: str) -> Checkpoint:
    """Read the head's folder. Raises ModelError for a head that neither layout can hold, or that is in one already."""
    checkpoint = Checkpoint(head, _METHOD)
    if checkpoint.speculator is not None or not checkpoint.folder.is_dir():
        raise ModelError(f"drafter.path={head}: is in a layout of other engines already, which read it as it is")
    if "midlayer.hidden_norm.weight" in checkpoint.tensors:
        return checkpoint
    why = "neither speculators nor GGUF holds others of Talon's"
    if "entry.weight" in checkpoint.tensors:
        why = "DFlash and DSpark have no place for entry.weight, by which its rows read the last context vector"
    raise ModelError(f"drafter.path={head}: is no EAGLE-3 head, and {why}; {_TRAIN}")


def _find(target: str, layout: str) -> _Served:
    """Find the target in the form that the engine of the layout serves."""
    folder = Path(resolve(target, "target"))
    gguf = open_gguf(folder)
    if layout == "gguf" and gguf is None:
        raise ModelError(f"target={target}: is no GGUF file, whose tokenizer the head gets; name the one it drafts for")
    if layout == "speculators" and gguf is not None:
        raise ModelError(f"target={target}: is a GGUF file, and vLLM is told a directory or hub id; name that")
    if gguf is not None:
        return _Served(str(gguf.path.absolute()), folder)
    return _Served(str(folder.absolute()) if Path(target).exists() else target, folder)


def _make(checkpoint: Checkpoint, target: _Served) -> _Public:
    """Make the head for its target. Raises DrafterMismatch if it is for another."""
    tensors = {name: numbers(tensor) for name, tensor in checkpoint.tensors.items()}
    weights = TargetWeights.read(str(target.folder))
    head = Eagle3Head(checkpoint, weights, torch.device("cpu"))
    config = {
        **checkpoint.config,
        **llama_config(checkpoint.config, checkpoint.path).to_dict(),
        "vocab_size": weights.vocab_size,
        "draft_vocab_size": len(head.target_ids),
        "target_hidden_size": weights.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.feature_layers),
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    return _Public(config, kept, checkpoint.codes(), head.layer.rotary.module.inv_freq)


def _write_speculators(head: _Public, target: _Served, out: Path) -> str:
    """Write a folder, and return the command of vLLM that takes it."""
    architectures = read_config(target.folder, "target").get("architectures") or []
    config = speculators.stored_config(head.config, target.name, architectures)
    named = {speculators.stored_name(name, _METHOD): tensor.contiguous() for name, tensor in head.tensors.items()}
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
    (out / "model.safetensors").write_bytes(save(named, {"format": "pt"}))
    return "vllm serve"


def _write_gguf(head: _Public, target: _Served, out: Path) -> str:
    """Write a file, and return the command of llama.cpp that takes it."""
    if head.config["attention_bias"]:
        raise ModelError(f"as=gguf: attention_bias=true: llama.cpp's EAGLE-3 adds no biases; {_TRAIN}")
    write_eagle3(out, head.config, head.tensors, head.codes, _factors(head), Path(target.name))
    return f"llama-server -m {shlex.quote(target.name)} --spec-type draft-eagle3 -md"


def _factors(head: _Public) -> Tensor | None:
    """Return [head_dim / 2], what divides the rotary frequencies of the base; None if nothing does."""
    rope, dim = head.config["rope_parameters"], head.config["head_dim"]
    if rope["rope_type"] not in _STATIC or 2 * len(head.frequencies) != dim:
        known = ", ".join(_STATIC)
        raise ModelError(f"as=gguf: rope_parameters={shown(rope)}: rope_type {known} of all dimensions fits; {_TRAIN}")
    if rope["rope_type"] == "default":
        return None
    return rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim) / head.frequencies


LAYOUTS: dict[str, Callable[[_Public, _Served, Path], str]] = {"speculators": _write_speculators, "gguf": _write_gguf}
"""What writes a head in each layout, and returns the command that serves it but for the path."""
