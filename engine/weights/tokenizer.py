"""A model's tokenizer, from its name or its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import Config
from engine.core.errors import ConfigError, ModelError, first_line
from engine.weights.hub import is_hub_id, is_local


def load_tokenizer(model: str) -> Any:
    """The model's own tokenizer; ModelError if it has none."""
    if not is_hub_id(model) and not Path(model).is_dir():
        raise ModelError(f"model={model}: no such directory; name a model directory, a hub id or a GGUF file")
    from transformers import AutoTokenizer  # takes seconds, while the verifier imports too

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=is_local(model))
    except Exception as error:  # an invalid file may raise anything
        if (folder := Path(model)).is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab.*")]:
            raise ModelError(
                f"model={model}: has no tokenizer: copy tokenizer.json and tokenizer_config.json of its model there"
            ) from error
        raise ModelError(f"model={model}: has no usable tokenizer: {first_line(error)}") from error


def tokenizer_of(config: Config) -> Any:
    """The tokenizer of the configuration's model, with its chat template; TalonError if there is no such thing."""
    tokenizer = load_tokenizer(config.model)
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template={config.chat_template}: cannot be read: {error}") from None
    return tokenizer
