"""Models of the hub: their files are fetched before workers start, so that all workers read one directory.

Whether the hub answers is asked once, with a short timeout. Otherwise every file of a hub id is tried six times, half a
minute in all, even if it is in the cache.
"""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.core.errors import ModelError, printable

_TIMEOUT_S = 5.0
_REMEMBERED_S = 60.0
_WEIGHTS = (".safetensors", ".bin", ".pt")  # the first kind that exists is taken
_OTHERS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_MOST_NAMES = 400  # characters of names in an error
_SUBFOLDERS = "*/*"  # subfolders hold the same weights in other formats


def fetched(model: str, key: str = "model") -> str:
    """Return the directory of a hub id's files, downloaded now if they are not here.

    Another name is returned unchanged, and so is an id that neither the hub nor its cache has: loading it says why.
    key: the configuration's key, for errors. Raises ModelError for an id whose weights are GGUF files alone.
    """
    if Path(model).is_dir() or not is_hub_id(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shows = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        if not hub_answers():
            kept = [f"*{ending}" for ending in (*_OTHERS, _WEIGHTS[0])]
            folder = snapshot_download(model, allow_patterns=kept, ignore_patterns=_SUBFOLDERS, local_files_only=True)
            return str(folder)
        listed: list[Any] = list(snapshot_download(model, ignore_patterns=_SUBFOLDERS, dry_run=True))
        _refuse_gguf_alone([file.filename for file in listed], f"{key}={model}", key)
        names = _needed([file.filename for file in listed])
        if missing := sum(file.file_size for file in listed if file.will_download and file.filename in names):
            print(f"talon: downloading {model}, {missing / 1e6:,.0f} MB", file=sys.stderr)
            if shows and sys.stderr.isatty():
                enable_progress_bars()
        return str(snapshot_download(model, allow_patterns=names))
    except ModelError:
        raise
    except Exception:  # may be an error of the hub, of its cache or of the file system
        return model
    finally:
        if shows:
            enable_progress_bars()


def _needed(names: list[str]) -> list[str]:
    """Return the files of a model that are read: configuration, tokenizer, and weights in one format."""
    # Mistral's directories hold the same weights under names of their own too
    if any(name.startswith("model") for name in names):
        names = [name for name in names if not name.startswith("consolidated")]
    kinds = [kind for kind in _WEIGHTS if any(name.endswith(kind) for name in names)]
    return [name for name in names if name.endswith((*_OTHERS, *kinds[:1]))]


def _refuse_gguf_alone(names: list[str], field: str, key: str) -> None:
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if files and not any(name.endswith(_WEIGHTS) for name in names):
        held = printable(", ".join(files), _MOST_NAMES)
        raise ModelError(f"{field}: holds GGUF files alone ({held}): download one, and set {key}=FILE.gguf")


def is_local(model: str) -> bool:
    """Return whether `model`, a directory or a hub id, can only be read from this machine: `local_files_only`."""
    return Path(model).is_dir() or not is_hub_id(model) or not hub_answers()


def is_hub_id(model: str) -> bool:
    """Return whether `model` can be a name on the hub rather than a path: NAME or OWNER/NAME."""
    return not model.startswith((".", "/", "~")) and model.count("/") <= 1 and bool(model)


def hub_answers() -> bool:
    """Return whether the hub, or the mirror that HF_ENDPOINT names, answers at all. It is asked again after a while."""
    return _ask(int(time.monotonic() / _REMEMBERED_S))


@lru_cache(maxsize=1)
def _ask(period: int) -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception:  # each HTTP library has errors of its own, and HF_HUB_OFFLINE one more
        return False
    return True
