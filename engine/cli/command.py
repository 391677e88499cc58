"""What the subcommands of `talon` share: options, overrides of the configuration, one-line errors."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from engine import config as configuration
from engine.core.errors import TalonError

T = TypeVar("T")
ConfigOption = Annotated[Path, typer.Option("--config", help="YAML file, see configs/.", show_default="the demo model")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any configuration key: drafter.budget=40, weights=q8_0"),
]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MODELS_OWN = "the model's own"


def overrides(assignments: list[str] | None, **named: Any) -> dict[str, Any]:
    """Return the configuration's overrides from --set and from options that name a key; options not given
    are left out.
    """
    values = dict(configuration.parse_assignment(text) for text in assignments or [])
    return values | {key: value for key, value in named.items() if value is not None}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn Talon's errors into one line and exit code 2, Ctrl-C into exit code 130."""
    try:
        yield
    except TalonError as error:
        print(f"talon: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        print(f"talon: {error.filename or 'output'}: the disk is full: make room and run again", file=sys.stderr)
        _forget_output()
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end; Ctrl-C cleans up."""
    with one_line_errors():
        return asyncio.run(main)


def _forget_output() -> None:
    """Discard buffered standard output: writing it would fail again when the process ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
