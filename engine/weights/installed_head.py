"""The head in Talon's home, where the engine finds it by the model's weights (`engine.weights.trained`).

It appears as a whole: a head is copied beside the old one, and a link, which the engine follows, is then turned to it.
"""

from __future__ import annotations

import errno
import json
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from engine.core.errors import ModelError
from engine.files.removal import removed
from engine.files.whole_file import write_whole

METHOD = "block"
MOST_LEARNED = 4
"""Owners whose learned heads are kept, in memory and on the disk: those that learned latest."""
_CARD = "tuned.json"
_FILES = ("config.json", "model.safetensors", "training.json")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def install(head: Path, tuned: Path, model: str, identity: str, again: str = "run the same command again") -> Path:
    """Put the head into the folder `tuned` in the place of an older one, and return where it is. model: its name;
    identity: of its weights; again: what tries once more. Raises ModelError where it cannot be written; the older one
    then stays.
    """
    place = tuned / METHOD
    try:
        tuned.mkdir(parents=True, exist_ok=True)
        with FileLock(tuned.with_name(f".{tuned.name}.lock")):
            made = _copied(head, tuned, json.dumps({"model": model, "identity": identity}).encode())
            link = tuned / f".{METHOD}.link"
            link.unlink(missing_ok=True)
            link.symlink_to(made.name)
            link.replace(place)
            for older in tuned.glob(f".{METHOD}-*"):
                if older != made:
                    removed(older)
    except OSError as error:
        fix = "make room and" if error.errno in _FULL else "see to it that it can be, and"
        raise ModelError(f"head={place}: cannot be written ({error.strerror or error}): {fix} {again}") from None
    return place


def _copied(head: Path, tuned: Path, card: bytes) -> Path:
    """Copy the head into a folder of its own, which all users may read, and return that; on an error nothing stays."""
    made = Path(tempfile.mkdtemp(prefix=f".{METHOD}-", dir=tuned))
    try:
        for name in _FILES:
            write_whole(made / name, (head / name).read_bytes())
        write_whole(made / _CARD, card)
        made.chmod(0o755)
    except OSError:
        removed(made)
        raise
    return made


def learned_heads(folder: Path) -> dict[str, Path]:
    """Return where the heads are that were installed last in subfolders of `folder`, by the subfolder's name."""
    found = []
    for place in folder.glob(f"*/{METHOD}"):
        with suppress(OSError):  # removed meanwhile
            found.append((place.lstat().st_mtime_ns, place.parent.name, place.resolve(strict=True)))
    return {name: head for _, name, head in sorted(found, reverse=True)[:MOST_LEARNED]}


def forget_heads(folder: Path) -> None:
    """Remove the heads of those who learned before the latest `MOST_LEARNED`."""
    kept = learned_heads(folder)
    for owner in folder.glob("*"):
        if owner.name not in kept:
            for head in (owner / METHOD, *owner.glob(f".{METHOD}-*")):
                removed(head)


def made_for(tuned: Path) -> tuple[str, str] | None:
    """Return the name and the identity of the model that the head there was made for; None if that is not known."""
    try:
        card = json.loads((tuned / METHOD / _CARD).read_text(encoding="utf8"))
        return str(card["model"]), str(card["identity"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
