"""CURVE keys of the tcp link: the verifier admits only drafters whose public keys it holds, and drafters trust only the
verifier.

A folder of keys holds `verifier.key`, `drafter.key` (public) and `verifier.key_secret`, `drafter.key_secret`. The
verifier reads its own pair and admits every `*.key` of the folder; a drafter needs its own pair and `verifier.key`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.auth import create_certificates, load_certificate

from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator


class Keys(NamedTuple):
    """The keys that one side needs. verifier: its public key; folder: the public keys of all who may connect to it."""

    public: bytes
    secret: bytes
    verifier: bytes
    folder: Path


def create(folder: Path) -> None:
    """Make a key pair for each side in a new folder (0700, secrets 0600). Existing files are never overwritten."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"keys={folder}: holds files already; name a new folder")
        folder.chmod(0o700)
        for side in ("verifier", "drafter"):
            _, secret = create_certificates(str(folder), side)
            Path(secret).chmod(0o600)
    except OSError as error:
        raise ConfigError(f"keys={folder}: cannot be written: {error.strerror}; name another folder") from None


def load(folder: Path, side: str) -> Keys:
    """Read the keys of one side, verifier or drafter."""
    public, secret = _read(folder, f"{side}.key_secret")
    verifier, _ = _read(folder, "verifier.key")
    if side == "verifier":
        for file in sorted(folder.glob("*.key")):  # a file without a key would keep all others out
            _read(folder, file.name)
    if secret is None:
        raise ConfigError(f"tcp.keys={folder}: {side}.key_secret holds no secret key; copy it again")
    return Keys(public, secret, verifier, folder)


def secure_verifier(context: zmq.Context[Any], socket: zmq.Socket[bytes], keys: Keys) -> ThreadAuthenticator:
    """Let only drafters whose keys are in the folder connect. The authenticator that is returned runs until it is
    stopped.
    """
    from zmq.auth.thread import ThreadAuthenticator

    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = keys.public, keys.secret, True
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(keys.folder))
    return authenticator


def secure_drafter(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Connect only to the verifier with that key, and prove our own identity."""
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.curve_serverkey = keys.verifier


def _read(folder: Path, name: str) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(folder / name)
    except (OSError, ValueError):
        raise ConfigError(
            f"tcp.keys={folder}: {name} is missing or holds no key; make keys with: talon keys DIR"
        ) from None
