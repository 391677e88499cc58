"""Loads a model's tokenizer, from its name or its configuration.

`transformers` reads it, and `Tokenizer` does its work. What was read is kept in the directories of the cache, so that
later starts do without `transformers`.
"""

from __future__ import annotations

import contextlib
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from engine.config import Config
from engine.core.errors import ConfigError, ModelError, first_line
from engine.files.checked_file import Damaged, read_whole, write_checked
from engine.text.tokenizer import Tokenizer, TokenizerState
from engine.weights.gguf.source import SOURCE
from engine.weights.hub import is_hub_id, is_local

KEPT = "tokenizer.msgpack"
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # files that say what the tokenizer is
_OVERRIDES = ("__call__", "_encode_plus", "decode", "_decode", "apply_chat_template", "get_chat_template")
"""Methods in which a class of `transformers` may do more than the library."""


def load_tokenizer(model: str) -> Any:
    """Return the model's own tokenizer: a `Tokenizer`, or that of `transformers` where that does more. ModelError if
    the model has none.
    """
    if not is_hub_id(model) and not Path(model).is_dir():
        raise ModelError(f"model={model}: no such file or directory; name a model directory, a hub id or a GGUF file")
    kept = KeptTokenizer(Path(model)) if (Path(model) / SOURCE).is_file() else None
    if kept is not None and (state := kept.read()) is not None:
        return Tokenizer(state)
    from transformers import AutoTokenizer  # takes seconds, while the verifier imports too

    try:
        found = AutoTokenizer.from_pretrained(model, local_files_only=is_local(model))
        if (state := state_of(found)) is None:
            return found
    except Exception as error:  # an invalid file may raise anything
        if (folder := Path(model)).is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab.*")]:
            raise ModelError(
                f"model={model}: has no tokenizer: copy tokenizer.json and tokenizer_config.json of its model there"
            ) from error
        raise ModelError(f"model={model}: has no usable tokenizer: {first_line(error)}") from error
    if kept is not None:
        kept.write(state)
    return Tokenizer(state)


def tokenizer_of(config: Config) -> Any:
    """Return the tokenizer of the configuration's model, with its chat template; TalonError if there is
    no such thing.
    """
    tokenizer = load_tokenizer(config.model)
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template={config.chat_template}: cannot be read: {error}") from None
    return tokenizer


def state_of(tokenizer: Any) -> TokenizerState | None:
    """Return what a tokenizer of `transformers` is; None if it does more than the library below it."""
    from transformers import TokenizersBackend

    if not isinstance(tokenizer, TokenizersBackend):
        return None
    kind, backend = type(tokenizer), tokenizer.backend_tokenizer
    cleans = tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
    if cleans or any(getattr(kind, name) is not getattr(TokenizersBackend, name) for name in _OVERRIDES):
        return None
    return TokenizerState(
        backend=backend.to_str(),
        named=tokenizer.special_tokens_map,
        special=[str(token) for token in tokenizer.all_special_tokens],
        splits_special=bool(tokenizer.split_special_tokens),
        chat_template=tokenizer.chat_template,
    )


class KeptTokenizer:
    """A tokenizer's state in the directory that it was read from, as long as no file and no library changes."""

    def __init__(self, folder: Path):
        self._file, digest = folder / KEPT, hashlib.sha256()
        for file in sorted(file for file in folder.iterdir() if file.suffix in _READ and file.name != SOURCE):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode("utf8", "surrogateescape"))
            digest.update(file.read_bytes())
        libraries = [version(name) for name in ("transformers", "tokenizers")]
        digest.update(repr((libraries, TokenizerState.__struct_fields__)).encode())
        self._key = digest.digest()

    def read(self) -> TokenizerState | None:
        """Return the state; None if there is none, or one of another version."""
        try:
            return msgspec.msgpack.decode(read_whole(self._file, self._key), type=TokenizerState)
        except (OSError, Damaged, msgspec.MsgspecError):
            return None

    def write(self, state: TokenizerState) -> None:
        """Write the state. It only saves time, so a folder that cannot be written is no error."""
        with contextlib.suppress(OSError):
            write_checked(self._file, self._key, [msgspec.msgpack.encode(state)])
