"""The KV cache on disk, for as long as a verifier runs. Whatever decides the bits of keys and values is in its key."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from engine.config import Config
from engine.core.batch import BLOCK_SIZE
from engine.files.cache_folder import CacheFolder
from engine.kernels.jit_cache import machine_code
from engine.model.target import Target
from engine.weights.identity import model_identity

_PROBE_BLOCKS = 3
_LIBRARIES = ("talon-decoding", "torch", "transformers", "numpy")


@contextmanager
def disk_cache(config: Config, target: Target) -> Iterator[None]:
    """Let the target's pool use the folder that the configuration names, if it names one. Raises ConfigError if that
    cannot be written to.
    """
    if config.verifier.cache is None:
        yield
        return
    folder = CacheFolder(Path(config.verifier.cache), int(config.verifier.cache_gb * 1e9))
    try:
        if target.pool is None or target.inexact_reason or target.device.type != "cpu":
            reason = target.inexact_reason or "it is not there for GPUs"
            print(f"talon: verifier.cache={folder.folder}: keys and values are not kept: {reason}", file=sys.stderr)
        else:
            target.pool.save_to(folder, _identity(config.model, target))
        yield
    finally:
        folder.close()


def _identity(model: str, target: Target) -> bytes:
    """Return the SHA-256 of all that decides the bits of keys and values: the model's files, its type, our kernels and
    what compiles them, the processor, and, for what is not in this list, the bits of a text that is read for it.
    """
    assert target.pool is not None
    facts = (
        target.dtype,
        [part.shape for part in target.pool.parts],
        None if target.pool.layer_states is None else target.pool.layer_states.shape,
        machine_code(),
        [version(name) for name in _LIBRARIES],
    )
    return hashlib.sha256(model_identity(model) + repr(facts).encode() + _probe(target)).digest()


def _probe(target: Target) -> bytes:
    """Return a hash of the logits, keys, values and state of a fixed text."""
    assert target.pool is not None
    length = min(_PROBE_BLOCKS * BLOCK_SIZE, target.context)
    cache = target.new_cache(length)
    logits, _ = target.prefill(cache, [(7919 * at + 1) % target.vocab_size for at in range(length)])
    digest = hashlib.sha256(logits.cpu().numpy().tobytes())
    for kept in [one for part in target.pool.parts for one in (part.keys, part.values)]:
        digest.update(kept[:, cache.block_table.tolist()].float().numpy().tobytes())
    if target.pool.layer_states is not None:
        digest.update(target.pool.layer_states.states[cache.state.slot].numpy())
    cache.release()
    return digest.digest()
