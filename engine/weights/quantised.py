"""A checkpoint with quantised weights as a target: a directory in the cache says of which checkpoint, and how.

It is another model than the checkpoint, so it is another directory. The weights stay where they are, and are quantised
as they are read. Configuration and tokenizer are copies, made anew when any file of the checkpoint changes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, ModelError, first_line
from engine.files.progress import shown
from engine.files.whole_file import write_whole
from engine.weights.cache import home, is_intact, keep
from engine.weights.checkpoint import CODES, NUMBERS, read_checkpoint
from engine.weights.gguf.source import SOURCE, source_of
from engine.weights.identity import model_identity

FORMAT = 1
"""Raise it when the contents of such a directory change, or how weights are quantised."""
PACKED = "mxfp4"
"""How a checkpoint may be quantised so that its blocks are taken as they are."""
_CONFIG = "config.json"
_QUANTISATION = "quantization_config"
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # configuration and tokenizer


@dataclass(frozen=True)
class QuantisedSource:
    """The checkpoint that a directory of the cache stands for, and how it is quantised. checkpoint: its directory.
    weights: as in the configuration, such as q8_0, or PACKED. state: of the checkpoint's files.
    """

    checkpoint: str
    weights: str
    state: str
    format: int = FORMAT

    @classmethod
    def of(cls, checkpoint: Path, weights: str) -> QuantisedSource:
        state = model_identity(str(checkpoint), (".safetensors", *_COPIED)).hex()
        return cls(str(checkpoint), weights, state)

    @property
    def folder(self) -> Path:
        """The directory in the cache. Other files, another type and another format have another one."""
        path = Path(self.checkpoint)
        hub = path.parent.parent.name if path.parent.name == "snapshots" else ""
        key = hashlib.sha256(repr(self).encode("utf8", "surrogateescape")).hexdigest()[:12]
        return home() / "quantised" / f"{hub.removeprefix('models--') or path.name}-{self.weights}-{key}"


def quantised_folder(model: str, weights: str) -> str:
    """Return the directory of a model with weights of that type, made if it is not there. model: its directory.

    Raises ConfigError or ModelError, one line, if there is no such thing. What is no directory is returned unchanged.
    """
    folder, field = Path(model), f"weights={weights}"
    if not folder.is_dir():
        return model  # loading the model says why
    if (found := quantised_source_of(folder)) is not None and found.weights == weights:
        return model
    if found is not None or source_of(folder) is not None:
        raise ConfigError(f"{field}: the weights of {model} are quantised already; leave weights out")
    source = QuantisedSource.of(folder.resolve(), weights)
    if is_intact(source.folder) and quantised_source_of(source.folder) == source:
        return str(source.folder)
    config = _config_of(folder, weights)
    kinds = (*NUMBERS, CODES) if weights == PACKED else NUMBERS
    read_checkpoint(folder, field, kinds)  # a damaged checkpoint is refused before anything is written
    copied = [file for file in folder.iterdir() if file.suffix in _COPIED and not file.name.endswith(".index.json")]

    def build(unfinished: Path) -> None:
        for file in copied:
            shutil.copyfile(file, unfinished / file.name)
        write_whole(unfinished / _CONFIG, json.dumps(config, indent=2).encode())
        write_whole(unfinished / SOURCE, json.dumps(asdict(source)).encode())

    with shown() as report:
        needed = sum(file.stat().st_size for file in copied)
        return str(keep(source.folder, field, needed, build, report, lambda made: quantised_source_of(made) == source))


def is_packed(folder: Path) -> bool:
    """Return whether the directory is a checkpoint whose matrices lie in blocks of the type PACKED."""
    try:
        return bool(json.loads((folder / _CONFIG).read_bytes())[_QUANTISATION]["quant_method"] == PACKED)
    except (OSError, ValueError, TypeError, LookupError):
        return False


def quantised_source_of(folder: Path) -> QuantisedSource | None:
    """Return what the directory was made from; None if it is not such a directory, or one of another format."""
    try:
        source = QuantisedSource(**json.loads((folder / SOURCE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return source if source.format == FORMAT else None


def unquantised(folder: Path) -> Path:
    """Return the directory of the checkpoint that this one was made of; any other directory is its own."""
    source = quantised_source_of(folder)
    return folder if source is None else Path(source.checkpoint)


def _config_of(folder: Path, weights: str) -> dict[str, Any]:
    """Return the model's configuration, with the type that quantised weights are computed with."""
    try:
        config: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf8"))
        parts = [config, *(config[key] for key in ("text_config",) if key in config)]
        quantisation = [part.pop(_QUANTISATION) for part in parts if _QUANTISATION in part]
        for part in parts:
            part.pop("torch_dtype", None)
            part["dtype"] = "bfloat16"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"model={folder}: no usable config.json in this directory: {first_line(error)}") from error
    if quantisation and weights != PACKED:
        raise ConfigError(f"weights={weights}: the weights of {folder} are quantised already; leave weights out")
    return config
