"""`talon connect` starts a client that talks to a running server, or prints what it has to be told."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from engine.cli.agents import AGENTS, Agent, ServedModel
from engine.cli.command import one_line_errors
from engine.core.errors import ConfigError, printable, shown

KEY_VARIABLE = "TALON_API_KEY"
_PATIENCE_S = 10


def connect(
    name: Annotated[str, typer.Argument(help=f"The client: {', '.join(AGENTS)}.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What follows -- goes to the client.", show_default=False)
    ] = None,
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option(help=f"The server's API key; or {KEY_VARIABLE}.", show_default="none")
    ] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the settings, and start nothing.")] = False,
) -> None:
    """Start a client that works with a running server, or print its settings.

    talon connect claude

    talon connect codex -- exec "What does this project do?"
    """
    with one_line_errors():
        if (agent := AGENTS.get(name)) is None:
            raise ConfigError(f"connect {printable(name, 64)}: is no client known here; there are {', '.join(AGENTS)}")
        server = served_model(url.rstrip("/").removesuffix("/v1"), key or os.environ.get(KEY_VARIABLE) or "none")
        if agent.own_tokens > server.context // 2:
            held = f"{printable(server.model, 100)} holds {server.context}"
            line = f"begins with about {agent.own_tokens} tokens of its own, and {held}"
            print(f"talon: {name} {line}", file=sys.stderr)
        if print_ or not agent.command:
            print("\n".join(agent.lines(server)))
        else:
            _start(agent, server, arguments or [])


def served_model(url: str, key: str) -> ServedModel:
    """Ask a server for its model. Raises ConfigError if there is none, or the key is wrong."""
    host = _host(url)
    try:
        asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with _opener(host).open(asked, timeout=_PATIENCE_S) as answer:
            found: dict[str, Any] = json.load(answer)["data"][0]
        model, context = found["id"], found["context_length"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"--url {url}: wants an API key: give --key or {KEY_VARIABLE}") from None
        raise ConfigError(f"--url {url}: answers /v1/models with status {error.code}: is this talon serve?") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = printable(str(getattr(error, "reason", error)).strip(), 200)
        raise ConfigError(f"--url {url}: no server answers ({reason}): start one with: talon serve") from None
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"--url {url}: /v1/models does not tell the context: is this talon serve?") from None
    if not (isinstance(model, str) and model.isprintable()):
        raise ConfigError(f"--url {url}: the model's name is {shown(model)}, no text that prints: rename it there")
    if type(context) is not int:
        raise ConfigError(f"--url {url}: the model's context is {shown(context)}, no number: is this talon serve?")
    return ServedModel(url, key, model, context)


def _host(url: str) -> str:
    """Return the host of an address. Raises ConfigError for an invalid address."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.hostname
    except ValueError:  # a port that is no number, or brackets that do not close
        pass
    raise ConfigError(f"--url {printable(url, 100)}: is no address; give one such as http://127.0.0.1:8000")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Keeps the key from the target of a redirect: the answer is then its status."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(host: str) -> urllib.request.OpenerDirector:
    """Return an opener that asks a host: without redirects, and without a proxy if the host is this machine."""
    proxies = urllib.request.ProxyHandler({} if _is_this_machine(host) else None)
    return urllib.request.build_opener(_NoRedirect, proxies)


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _start(agent: Agent, server: ServedModel, arguments: list[str]) -> None:
    """Replace this process by the client's."""
    command = [*agent.started_by(server), *arguments]
    if (program := shutil.which(command[0])) is None:
        raise ConfigError(f"connect {agent.name}: {command[0]} is not installed: {agent.install}")
    print(f"talon: {agent.name} asks {printable(server.model, 100)} at {server.url}", file=sys.stderr, flush=True)
    inherited = {name: value for name, value in os.environ.items() if name not in agent.removes}
    os.execve(program, command, inherited | agent.variables(server))
