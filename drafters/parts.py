"""What a configuration's drafter is made of, and where its files are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config import AUTO, Config
from engine.core.errors import ConfigError, ModelError, shown
from engine.core.methods import METHODS, find
from engine.weights.draft_head import ASSISTANT, METHOD


def parts(config: Config) -> tuple[str, ...]:
    """Return the methods that the configuration's drafter is made of; ConfigError if they do not go together. A head
    that is yet to be learned is not among them.
    """
    if not find(config.method).merges:
        return (config.method,)
    head, memories = config.drafter.head, config.drafter.memories
    if head == AUTO:
        head = "eagle3"
    for key, name, model in [("head", head, True), *(("memories", name, False) for name in memories)]:
        fitting = [n for n, m in METHODS.items() if m.drafter and not (m.merges or m.probes) and m.has_model == model]
        find(name, f"drafter.{key}")
        if name not in fitting:
            raise ConfigError(f"drafter.{key}={shown(name)}: cannot stand there; these can: {', '.join(fitting)}")
    if config.drafter.learned is not None and config.drafter.weights(head) is None:
        return memories
    return (head, *memories)


def weights_path(config: Config) -> str:
    """Return where the weights of the configuration's head or draft model are."""
    if (path := config.drafter.weights(config.method)) is not None:
        return path
    if config.method == METHOD:  # the head in the model's own file
        return config.model
    if config.method == "sps":
        raise ConfigError("drafter.path: method sps needs the directory or hub id of a small model")
    if config.method == ASSISTANT:
        raise ConfigError(
            "drafter.path: method assistant needs the model's assistant: name its GGUF file or its directory, or put "
            "it beside the model's"
        )
    raise ConfigError(
        f'drafter.path: method {config.method} needs a head: give its directory, or "talon train {config.method}"'
    )


@contextmanager
def naming_tuned(config: Config) -> Iterator[None]:
    """Let errors of a head that was found by `drafter.tuned` name this key."""
    try:
        yield
    except ModelError as error:
        tuned, path = config.drafter.tuned, config.drafter.weights(config.method)
        if tuned is None or path is None or not Path(path).is_relative_to(tuned):
            raise
        raise type(error)(str(error).replace(f"drafter.path={path}", f"drafter.tuned={path}")) from error


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Let errors of a datastore name the key that it was found by."""
    from retrieval_index.datastore import DatastoreError

    try:
        yield
    except DatastoreError as error:
        raise ConfigError(f"{key}={error}") from None


def datastore_path(config: Config) -> str:
    """Return where the configuration's datastore is."""
    if (path := config.drafter.datastore) is None:
        raise ConfigError('drafter.datastore: method datastore needs the folder of one: "talon index build"')
    return path
