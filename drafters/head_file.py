"""What can be said of a draft head's files without its target: `talon models check HEAD`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drafters.heads.assistant.stored import InGguf
from drafters.heads.layouts.llama_cpp import read_head
from engine.core.errors import ModelError, first_line
from engine.weights.draft_head import ARCHITECTURES, ASSISTANT, method_of
from engine.weights.gguf.file import GgufFile, read_gguf

_KINDS = {"eagle3": "an EAGLE-3 head", "block": "a one-pass head, DFlash's or DSpark's", ASSISTANT: "an assistant"}
_HIDDEN = ("target_hidden_size", "embedding_length_out", "embedding_length")


def lines_of_head(path: str) -> list[str] | None:
    """Return what `talon models check` prints of a GGUF file that holds a head alone, or of an assistant's directory;
    None of other files. Raises ModelError if the file cannot be read.
    """
    if Path(path).is_dir() and method_of(Path(path)) == ASSISTANT:
        return [_drafter(path, ASSISTANT)]
    if not Path(path).is_file() or Path(path).suffix.lower() != ".gguf":
        return None
    file = read_gguf(Path(path), f"model={path}")
    return [*_lines(path, file)] if file.architecture in ARCHITECTURES else None


def _lines(path: str, file: GgufFile) -> Iterator[str]:
    architecture, metadata = file.architecture, file.metadata
    method = ARCHITECTURES[architecture]
    hidden = next((size for key in _HIDDEN if (size := metadata.get(f"{architecture}.{key}"))), "no named")
    tokens = metadata.get("tokenizer.ggml.tokens") or metadata.get(f"{architecture}.vocab_size", "no named")
    layers = ", ".join(map(str, file.arrays.get(f"{architecture}.target_layers", ())))
    yield _drafter(path, method)
    yield f"for: a target of hidden size {hidden} and {tokens} tokens"
    yield f"reads: {f'the states that enter layers {layers}' if layers else 'the last state, keys and values'}"
    yield f"types: {file.kinds}"
    yield f"memory: {file.packed_size / 1e9:.2f} GB of weights in the file's bits"
    if problem := _problem(path, file, method):
        yield f"will not work: {problem}"


def _drafter(path: str, method: str) -> str:
    return f"drafter: {_KINDS[method]}: method={method}, or hybrid, with drafter.path={path}"


def _problem(path: str, file: GgufFile, method: str) -> str:
    """Return why no head is made of the file; "" if only a target can tell."""
    try:
        if method == ASSISTANT:
            InGguf(file, f"drafter.path={path}")
        else:
            read_head(path, method, "drafter.path")
    except ModelError as error:
        return first_line(error)
    return ""
