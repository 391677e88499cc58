"""Starts what is compared: what cannot be started here is left out, with a line that says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from rich.console import Console

from engine.core.errors import ConfigError, TalonError

from ..report.figures import BASELINE


class Closeable(Protocol):
    async def close(self) -> None: ...


Started = TypeVar("Started", bound=Closeable)


async def start_each(
    names: Sequence[str],
    start: Callable[[str], Awaitable[Started]],
    warm_up: Callable[[Started], Awaitable[Any]],
    console: Console,
) -> dict[str, Started]:
    """What can be started, warmed up; for the others, a line says what they lack. Plain decoding's error is raised, and
    what was started by then is closed.
    """
    started: dict[str, Started] = {}
    try:
        for name in names:
            try:
                started[name] = await start(name)
                await warm_up(started[name])
            except TalonError as error:
                if name == BASELINE:
                    raise
                if name in started:
                    await started.pop(name).close()
                console.print(f"left out: {name}: {error}", markup=False)
        others = [name for name in names if name != BASELINE]
        if others and not any(name in started for name in others):
            raise ConfigError(f"methods: none of {', '.join(others)} can be started here, see above")
    except BaseException:
        for one in started.values():
            await one.close()
        raise
    return started
