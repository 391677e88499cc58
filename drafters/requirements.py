"""Checks what a configuration's drafter reads from the disk, before any model loads.

The drafter's worker reads all of it, and refuses what is damaged or was made for another target. That takes seconds of
imports, so files that are missing or of another kind are reported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.parts import datastore_path, naming, naming_tuned, parts, weights_path
from engine.config import Config
from engine.core.errors import ConfigError, ModelError
from engine.core.methods import find
from engine.install_paths import ROOT
from engine.weights.draft_head import METHOD


def check(config: Config) -> None:
    """Raise what the drafter of `config` would refuse at once, in one line that names the key."""
    if find(config.method).drafter is None:
        return
    for part in _parts(config):
        if find(part.method).has_model:
            with naming_tuned(part):
                check_weights(weights_path(part), part.method)
        for key, folder in _datastores(part):
            check_datastore(key, folder)


def check_vocabulary(config: Config, tokenizer: Any) -> None:
    """Raise ConfigError if the answers that `suffix` starts with have another vocabulary than the target. The drafter's
    worker has no tokenizer to check this.
    """
    answers = config.drafter.answers_folder
    if answers is None or config.remote or find(config.method).drafter is None:
        return
    if "suffix" in parts(config):
        check_datastore("drafter.answers", answers, tokenizer)


def check_paths(config: Config) -> None:
    """Raise what the paths alone show; fast, since no model library is loaded for it."""
    find(config.method)
    _check_path("model", config.model)
    if config.remote:  # the drafter's files are on its machine
        return
    for part in _parts(config):
        if find(part.method).has_model:
            _check_path("drafter.path", weights_path(part), f', or "talon train {part.method}"')
        for key, folder in _datastores(part):
            if not Path(folder).is_dir():
                raise ConfigError(f"{key}={folder}: no such directory; make it with `talon index build`")


def _datastores(part: Config) -> Iterator[tuple[str, str]]:
    """Yield the datastores that a method reads: the key that names one, and its folder."""
    options = part.drafter
    if part.method == "datastore":
        yield "drafter.datastore", datastore_path(part)
    if part.method == "suffix" and options.answers_folder is not None:
        yield "drafter.answers", options.answers_folder


def _parts(config: Config) -> Iterator[Config]:
    """Yield the configuration of each method that drafts."""
    for method in parts(config):
        yield config.model_copy(update={"method": method})


def _check_path(key: str, path: str, or_else: str = "") -> None:
    """Raise ModelError if a path does not exist. or_else: what to do instead, for the error."""
    if path.startswith(("/", "./", "../")) and not Path(path).exists():
        raise ModelError(f"{key}={path}: no such file or directory; check the path, or name a hub id{or_else}")


def check_weights(path: str, method: str) -> None:
    """Require a directory, or a name the hub or its cache knows, with a config.json and a file of weights."""
    from drafters.heads.checkpoint import find_folder, read_config
    from engine.weights.gguf.source import source_of
    from engine.weights.hub import is_hub_id
    from engine.weights.quantised import unquantised

    if Path(path).is_file():
        return  # a GGUF file is checked when it is read
    if method == "sps" and is_hub_id(path) and not Path(path).is_dir():
        return  # the draft model is fetched as the target is
    folder = unquantised(find_folder(path, "drafter.path"))
    read_config(folder, "drafter.path")
    in_gguf = method in ("sps", METHOD) and source_of(folder) is not None
    if not in_gguf and not any(file.suffix in (".safetensors", ".bin", ".pt") for file in folder.iterdir()):
        raise ModelError(
            f"drafter.path={path}: holds no weights (.safetensors, .bin, .pt): {_where_weights_are(folder)}"
        )


def _where_weights_are(folder: Path) -> str:
    """Return what to do about a head's weights that are missing. Distributions leave out most that come with Talon."""
    if not folder.is_relative_to(ROOT / "models"):
        return "copy the directory again"
    inside = folder.relative_to(ROOT).as_posix()
    return f"a clone of Talon has them: --set drafter.path=CLONE/{inside}, or take --method hybrid or block"


def check_datastore(key: str, path: str, tokenizer: Any = None) -> None:
    """Require a datastore, of the tokenizer if one is given, with no file missing or truncated."""
    from retrieval_index.datastore import Datastore

    with naming(key):
        Datastore(Path(path), tokenizer)
