"""Opaque client ids, by which drafters and caches tell clients apart; key and session cannot be recovered from them."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import sys
import threading
from pathlib import Path

_BYTES = 32


class OwnerNames:
    """Makes the opaque ids of clients. cache: the folder of the prompt cache, or of what is learned, in which names
    stay the same after a restart; None: they do not. nobody: the name of a client that gives neither key nor session.
    """

    def __init__(self, cache: str | None, nobody: str | None = None):
        self._nobody = nobody
        self._secret = secrets.token_bytes(_BYTES) if cache is None else _kept_secret(Path(cache) / "owners.key")

    def name(self, key: bytes, session: str) -> str | None:
        """Return a name `TENANT/SESSION` for a client's API key and session; `nobody` if it has neither. key: the
        server's own.
        """
        if not (key or session):
            return self._nobody
        whole = key + session.encode("utf8", "surrogateescape")
        return f"{self._hash(key) if key else ''}/{self._hash(whole) if session else ''}"

    def _hash(self, what: bytes) -> str:
        return hmac.digest(self._secret, what, "sha256").hex()


def _kept_secret(path: Path) -> bytes:
    """Return what the file holds, made now if it is not there. Without a file that can be used, names are new every
    time.
    """
    fresh = secrets.token_bytes(_BYTES)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            if len(kept := path.read_bytes()) == _BYTES:
                return kept
            print(f"talon: {path} is damaged: clients' caches begin anew", file=sys.stderr)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(fresh)
        try:
            os.link(temporary, path)  # of two servers that write, the first one's file stays
        except FileExistsError:
            if len(kept := path.read_bytes()) == _BYTES:
                return kept
            os.replace(temporary, path)
        return fresh
    except OSError as error:
        print(f"talon: {path}: {error.strerror}: no client finds its cache again", file=sys.stderr)
        return fresh
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
