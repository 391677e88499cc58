"""Whether a model is read only from this machine: it is a directory, or the hub cannot be reached.

The network is asked once, with a short timeout. Otherwise every file of a hub id is tried six times, half a minute in
all, even if it is in the cache.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

_TIMEOUT_S = 5.0
_REMEMBERED_S = 60.0


def is_local(model: str) -> bool:
    """Whether `model`, a directory or a hub id, can only be read from this machine: `local_files_only`."""
    return Path(model).is_dir() or not is_hub_id(model) or not hub_answers()


def is_hub_id(model: str) -> bool:
    """Whether `model` can be a name on the hub rather than a path: NAME or OWNER/NAME."""
    return not model.startswith((".", "/", "~")) and model.count("/") <= 1 and bool(model)


def hub_answers() -> bool:
    """Whether the hub, or the mirror that HF_ENDPOINT names, answers at all. Checked again after a while."""
    return _ask(int(time.monotonic() / _REMEMBERED_S))


@lru_cache(maxsize=1)
def _ask(period: int) -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception:  # each HTTP library has errors of its own, and HF_HUB_OFFLINE one more
        return False
    return True
