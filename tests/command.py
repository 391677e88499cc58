"""Runs the `talon` command in this process: a process of its own, as it is to a user, would import for ten seconds."""

from __future__ import annotations

import functools

import typer
from click.testing import Result
from typer.testing import CliRunner

from engine.cli.main import assemble


@functools.cache
def command() -> typer.Typer:
    """Return the command. It is assembled once, because its parts are added to one object."""
    return assemble()


def talon(*arguments: str, standard_input: str = "") -> Result:
    """Return what it printed, and its exit code; raise an exception that it did not turn into a line."""
    result = CliRunner(env={"COLUMNS": "120"}).invoke(command(), arguments, input=standard_input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
